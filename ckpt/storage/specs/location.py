"""Parsing of a storage's location: from a user's text to a specification; opens nothing and sends no request."""

import os
import re
from dataclasses import replace
from os import PathLike
from pathlib import Path
from urllib.parse import unquote

from prefect_torch.ckpt.storage.protocol import StorageSpec
from prefect_torch.ckpt.text import encodable

_OTHER_NAMES = {"s3a": "s3", "gcs": "gs"}
_BUCKETS = {"s3", "gs", *_OTHER_NAMES}
OBJECT_STORES = _BUCKETS | {"az", "azure", "abfs", "abfss", "adl"}  # Azure's URLs may hold container@account
BLOCK_SLUGS = {
    "checkpoint-storage",
    "local-file-system",
    "remote-file-system",
    "s3-bucket",
    "gcs-bucket",
    "azure-blob-storage-container",
}
URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+)://(?P<rest>.*)", re.DOTALL)
ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
# Options that name a server or an account, by each of their names; the others name credentials, or how to connect.
_SERVER = re.compile(r"(?:(?:aws|azure_storage|azure)_)?(endpoint|account_name)(?:_url)?")
_ONE_SLASH = re.compile(rf"(?:{'|'.join(sorted(OBJECT_STORES))}|file|memory|sftp|ssh|ftp|hdfs|smb):(?!//)", re.IGNORECASE)
_OF_WINDOWS = re.compile(r"[A-Za-z]:(?:\\|/)")
# A host's port, or an address in brackets, is no user with a password. A user may be an e-mail address. A form's JSON schema
# uses this pattern, too.
URL_WITH_LOGIN = r"[A-Za-z][A-Za-z0-9+.-]*://([^/:@\[]*@)*[^/:@\[]*:(?!\d+(/|$))[^@]*@"
_PASSWORD = re.compile(URL_WITH_LOGIN)
MASK = "**********"  # pydantic's, of a SecretStr
_PORT = re.compile(r"[^/:]+:\d+(/|$)")
_PARAMETERS = re.compile(r"\?([\w.%/:-]+=[^&]*&)*(endpoint_override|scheme|region)=")


def parse_location(text: "str | PathLike[str]") -> StorageSpec | None:
    """Return the specification of a local path or a URL; None for "block-type-slug/block-name", which only Prefect can resolve.

    Raises:
        ValueError: If it is empty, not text, or a URL that cannot be written to or shows a password.

    """
    path = os.fspath(text)
    if not path:
        raise ValueError("storage is empty: give a path, a URL, 'block-type-slug/block-name', or a block")
    if encodable(path) != path:
        raise ValueError(f"storage {encodable(path)} has a byte that is not UTF-8, or a NUL: rename the directory")
    if URL.match(path):
        return normalized(StorageSpec(path))
    if "://" in path:
        raise ValueError("storage is neither a path nor a URL: a URL begins with one scheme, as in s3://bucket/prefix")
    if isinstance(text, PathLike) or not is_block_slug(path):
        return StorageSpec(absolute(path))
    return None


def is_bucket(url: str) -> bool:
    """Return whether `url` names a bucket or a container of an object store."""
    match = URL.match(url)
    return match is not None and match["scheme"].lower() in OBJECT_STORES


def canonical(location: str) -> str:
    """Return a local path as this machine resolves it, without links and ".."; a URL with the canonical name of its scheme.

    It serves only to compare two spellings of one location. A location is stored, shown and sent to other machines as it was
    given, since a link may lead elsewhere there.
    """
    scheme, separator, rest = location.partition("://")
    return f"{_OTHER_NAMES.get(scheme, scheme)}://{rest}" if separator else os.path.realpath(location)


def is_one_place(one: StorageSpec, other: StorageSpec) -> bool:
    """Return whether two specifications name one location: buckets of one name are two if each names another server or account.

    One that names no server leaves it to the environment or a profile, and may mean that of the other.
    """
    if canonical(one.url) != canonical(other.url):
        return False
    here, there = _server_of(one), _server_of(other)
    return all(here[name] == there[name] for name in here.keys() & there.keys())


def _server_of(spec: StorageSpec) -> dict[str, str]:
    named = {found[1]: value.rstrip("/") for name, value in spec.options.items() if (found := _SERVER.fullmatch(name.lower()))}
    if canonical(spec.url).startswith("s3://") and not named.get("endpoint"):
        named["endpoint"] = next(filter(None, map(os.environ.get, ENDPOINT_VARIABLES)), "").rstrip("/")
    return {name: value for name, value in named.items() if value}


def refuse_password(text: str) -> None:
    """Raise ValueError if `text`, as a URL, contains a password: it would be shown wherever the URL is.

    Raises:
        ValueError: With the other ways to give it, and without the password.

    """
    if _PASSWORD.match(text):
        scheme = text.partition("://")[0].lower()
        way = f"save a CheckpointStorage block with {scheme}://user@host/path and the password in its field, or log in by a key"
        if scheme in OBJECT_STORES:
            way = "give them as a block, as environment variables or in a profile"
        raise ValueError(
            f"the {scheme}:// URL holds credentials, which Prefect stores and shows with a flow run's parameters: {way}"
        )


def without_password(text: str) -> str:
    """Return `text` as it may be shown: a URL that `refuse_password` refuses has a mask in the place of its login."""
    return f"{text.partition('://')[0]}://{MASK}@{text.rpartition('@')[2]}" if _PASSWORD.match(text) else text


def is_block_slug(text: str) -> bool:
    """Return whether `text` names a saved block, also with a misspelled type ("s3bucket/x") unless that path exists."""
    slug, _, name = text.partition("/")
    if not name or "/" in name:
        return False
    return slug in BLOCK_SLUGS or (_letters(slug) in _LETTERS and not Path(text).exists())


def _letters(slug: str) -> str:
    return re.sub("[-_ ]", "", slug).lower()


_LETTERS = {_letters(slug) for slug in BLOCK_SLUGS}


def absolute(path: str) -> str:
    """Return a local path as an absolute one, with the home directory for "~".

    Raises:
        ValueError: If it is a URL that lost a slash, a path of Windows or of Databricks' own tools, or of an unknown user.

    """
    if path.lower().startswith("dbfs:/"):
        raise ValueError(f"{path} is a path of Databricks' own tools: write /dbfs/…, where its machines have it mounted")
    if _ONE_SLASH.match(path):
        raise ValueError(
            f"{path.partition(':')[0]}:/… is a URL that lost a slash, as in pathlib.Path('s3://…'): give the URL as a string"
        )
    if os.sep == "/" and _OF_WINDOWS.match(path):
        raise ValueError(
            f"{path} is a path of Windows: give one of the machine that runs the ranks (of WSL, /mnt/c/… for C:\\…)"
        )
    try:
        return str(Path(path).expanduser().absolute())
    except RuntimeError as exc:
        raise ValueError(f"{path}: the directory {path.partition('/')[0]!r} is unknown here; give an absolute path") from exc


def normalized(spec: StorageSpec) -> StorageSpec:
    """Return `spec` with a lower-case scheme and no trailing slash.

    Raises:
        ValueError: If it is a URL that cannot be written to, names no bucket, or shows a password.

    """
    match = URL.match(spec.url)
    if match is None:
        return spec
    refuse_password(spec.url)
    scheme, rest = match["scheme"].lower(), match["rest"]
    if scheme in ("file", "local"):
        return replace(spec, url=_file_path(rest), options={})
    if scheme in ("http", "https"):
        raise ValueError(
            f"{scheme}:// cannot be written to: give an S3 server's address as the block's endpoint_url, or in "
            "AWS_ENDPOINT_URL, and the storage as s3://bucket/prefix"
        )
    if scheme in _BUCKETS and "@" in rest.partition("/")[0]:
        raise ValueError(
            f"the {scheme}:// URL holds credentials, which would be shown wherever the URL is: give them as a block, as "
            "environment variables or in a profile"
        )
    if scheme in OBJECT_STORES and not rest.partition("/")[0]:
        raise ValueError(f"{spec.url} names no bucket: write {scheme}://bucket/prefix")
    if scheme in _BUCKETS and _PORT.match(rest):
        raise ValueError(
            f"{scheme}://{rest.partition('/')[0]} names a server's port, and the first part of the URL is the bucket: write "
            f"{scheme}://bucket/prefix, and give the server's address in AWS_ENDPOINT_URL or as an S3 block's endpoint_url"
        )
    if scheme in _BUCKETS and _PARAMETERS.search(rest):
        raise ValueError(
            f"{scheme}://{rest.partition('?')[0]} is followed by parameters, as in pyarrow: give the server's address in "
            "AWS_ENDPOINT_URL and the region in AWS_REGION, or both in an S3 block"
        )
    if scheme in OBJECT_STORES and ("?" in rest or "#" in rest):
        raise ValueError(
            f"{scheme}://{re.split('[?#]', rest)[0]} is followed by '?' or '#': write %3F or %23 in a directory's name"
        )
    rest = rest.rstrip("/")
    if scheme in OBJECT_STORES and {"", ".", ".."} & set(names := unquote(rest).split("/")):
        written = "/".join(name for name in names if name not in ("", ".", ".."))
        raise ValueError(
            f"{scheme}://{rest} has a name that is empty, '.' or '..', which a key's names cannot be: write {scheme}://{written}"
        )
    return replace(spec, url=f"{scheme}://{rest}")


def _file_path(rest: str) -> str:
    host, slash, path = rest.partition("/")
    if host not in ("", "localhost") or not slash:
        raise ValueError(f"file://{rest} names no absolute path: write file:///directory, or the path alone")
    return f"/{unquote(path).strip('/')}"
