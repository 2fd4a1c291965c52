import subprocess
import sys
from pathlib import Path

import pytest
from prefect_torch.ckpt import StorageSpec
from prefect_torch.ckpt.storage.local_files.storage import LocalStorage
from prefect_torch.ckpt.storage.opening import open_storage, parse_storage
from prefect_torch.ckpt.storage.retry import RetryingStorage
from prefect_torch.ckpt.storage.specs.location import ENDPOINT_VARIABLES, is_block_slug, is_one_place, parse_location


@pytest.mark.parametrize("storage", ["./ck", "ck", Path("ck"), "ck/"])
def test_a_relative_path_becomes_absolute(storage, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse_storage(storage) == StorageSpec(str(tmp_path / "ck"))


def test_the_home_folder_is_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert parse_storage("~/ck").url == "/home/me/ck"


def test_a_file_url_is_a_path():
    assert parse_storage("file:///data/with%20space").url == "/data/with space"


@pytest.mark.parametrize("url", ["s3://bucket/prefix", "gs://bucket", "memory://x/y"])
def test_a_url_stays_one(url):
    assert parse_storage(url).url == url
    assert parse_storage(f"{url}/").url == url


@pytest.mark.parametrize(("url", "path"), [("file:///a#b?c/x", "/a#b?c/x"), ("FILE://localhost/x/", "/x"), ("file:///", "/")])
def test_a_file_url_loses_nothing_of_its_path(url, path):
    assert parse_storage(url).url == path


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("file://data/x", "write file:///directory"),  # "data" would be a host
        ("s3:/bucket/x", "lost a slash"),
        ("s3:bucket/x", "lost a slash"),
        (r"C:\Users\ada\checkpoints", "is a path of Windows: give one of the machine that runs the ranks"),
        ("d:/checkpoints", "is a path of Windows"),
        ("~no-such-user/checkpoints", "the directory '~no-such-user' is unknown here; give an absolute path"),
        (" s3://bucket/x", "neither a path nor a URL"),
        ("simplecache::s3://bucket/x", "neither a path nor a URL"),
        (Path("s3://bucket/x"), "lost a slash"),
        ("s3://minio:9000/bucket/x", "names a server's port"),
        ("dbfs:/x", "write /dbfs/"),
        ("s3://bucket/x?versionId=1", "write %3F"),
        ("s3://bucket/x#y", "write %3F or %23"),
        ("s3://bucket/x?scheme=http&endpoint_override=localhost:9000", "AWS_ENDPOINT_URL and the region in AWS_REGION"),
        ("http://127.0.0.1:9000/bucket", "endpoint_url"),
        ("https://s3.example.com/bucket/x", "endpoint_url"),
    ],
)
def test_a_url_that_would_lead_elsewhere_is_refused(url, hint):
    with pytest.raises(ValueError, match=hint):
        parse_storage(url)


def test_a_scheme_may_be_written_in_any_case():
    assert parse_storage("S3://Bucket/X").url == "s3://Bucket/X"


@pytest.mark.parametrize("scheme", ["s3", "s3a", "gs", "gcs", "abfss"])
def test_object_stores_are_opened_by_all_their_schemes(scheme):
    place = "container@account.dfs.core.windows.net" if scheme == "abfss" else "bucket"
    assert open_storage(f"{scheme}://{place}/x").url == f"{scheme}://{place}/x"


@pytest.mark.parametrize("given", [str, StorageSpec])
@pytest.mark.parametrize(
    "url",
    [
        "sftp://me:s3cr3t@host/x",
        "ftp://me:s3cr3t@host",
        "ftp://me@corp.com:s3cr3t@host/x",
        "FTP://:s3cr3t@host:21/x",
        "sftp://me:s3/cr3t@host/x",
        "sftp://me:s3:cr3t@host/x",
        "file://me:s3cr3t@host/x",
        "https://me:s3cr3t@host/x",
        "memory://me:s3cr3t@x",
        "az://me:s3cr3t@x",
    ],
)
def test_a_password_in_a_url_is_refused_with_the_way_to_give_it_and_without_showing_it(given, url):
    with pytest.raises(ValueError, match=r"holds credentials.*(CheckpointStorage block|a block)") as caught:
        parse_storage(given(url))
    assert "cr3t" not in str(caught.value)


def test_a_password_in_a_url_that_lost_a_slash_is_not_shown():
    with pytest.raises(ValueError, match="lost a slash") as caught:
        parse_storage(Path("sftp://me:s3cr3t@host/x"))
    assert "s3cr3t" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "sftp://me@host:22/data",
        "ftp://me@corp.com@host:21/data",
        "sftp://host:22/me@home",
        "sftp://[::1]:22/me@home",
        "memory://x/a:b@c",
        "sftp://host:22",
    ],
)
def test_what_is_no_password_is_none(url):
    assert parse_storage(url) == StorageSpec(url)


def test_credentials_in_the_url_of_an_object_store_are_refused_without_showing_them():
    with pytest.raises(ValueError, match="holds credentials") as caught:
        parse_storage("s3://AKIAKEY:s3cr3t@bucket/x")
    assert "s3cr3t" not in str(caught.value)
    assert "AKIAKEY" not in str(caught.value)


@pytest.mark.parametrize("url", ["s3://AKIAKEY@bucket/x", "gs://AKIAKEY@bucket", "S3A://AKIAKEY@bucket/x"])
def test_a_user_in_the_url_of_a_bucket_is_refused_without_showing_it(url):
    with pytest.raises(ValueError, match="holds credentials") as caught:
        parse_storage(url)
    assert "AKIAKEY" not in str(caught.value)


def test_an_at_sign_in_a_folders_name_is_no_user():
    assert parse_storage("s3://bucket/me@home/x").url == "s3://bucket/me@home/x"


def test_a_path_object_is_never_a_block(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse_storage(Path("s3-bucket/x")).url == str(tmp_path / "s3-bucket/x")


def test_a_local_storage_that_answers_loads_no_other_backend_and_no_retries(tmp_path):
    code = (
        "import sys; from prefect_torch.ckpt.storage.opening import open_storage; storage = open_storage(sys.argv[1]);"
        "storage.put_bytes('x', b'1'); storage.get_bytes('x');"
        "print({'fsspec', 'obstore', 'tenacity', 'boto3', 'prefect', 'torch'} & set(sys.modules))"
    )
    shown = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "set()"


@pytest.mark.parametrize("place", ["folder", "memory://x", "s3://bucket/x"])
def test_what_fails_for_a_while_is_tried_again_wherever_it_is(place):
    assert isinstance(open_storage(place), RetryingStorage)


def test_an_open_storage_stays_what_it_is(tmp_path):
    storage = LocalStorage(tmp_path)
    assert open_storage(storage) is storage


@pytest.mark.parametrize(
    ("text", "is_slug"),
    [
        ("s3-bucket/prod", True),
        ("checkpoint-storage/x", True),
        ("./s3-bucket/prod", False),
        ("s3-bucket/a/b", False),
        ("s3-bucket", False),
        ("checkpoints/digits", False),
        ("s3-bucket/", False),
    ],
)
def test_a_block_is_told_from_a_path(text, is_slug):
    assert is_block_slug(text) == is_slug


@pytest.mark.parametrize("storage", ["", None, 3, ["x"]])
def test_what_is_no_storage_is_refused(storage):
    with pytest.raises(ValueError, match="give a path, a URL"):
        parse_storage(storage)


@pytest.mark.parametrize(
    "endpoint", ["127.0.0.1:9000", "minio:9000", "//minio:9000", "http://", "http://minio 1:9000", "ftp://minio"]
)
@pytest.mark.parametrize("is_variable", [True, False], ids=["variable", "option"])
def test_an_endpoint_that_is_no_address_is_refused_without_its_login(monkeypatch, endpoint, is_variable):
    for given in (endpoint, f"me:secret@{endpoint}"):
        monkeypatch.setenv("AWS_ENDPOINT_URL", given if is_variable else "")
        with pytest.raises(ValueError, match="is no address of a server: write http://HOST:PORT or https://HOST") as caught:
            open_storage(StorageSpec("s3://bucket", {} if is_variable else {"aws_endpoint_url": given}))
        assert repr(endpoint) in str(caught.value)


def test_an_unknown_scheme_is_refused():
    with pytest.raises(ValueError, match="nosuch:// cannot be a storage"):
        open_storage("nosuch://x")


def test_secrets_are_not_shown():
    assert "secret" not in repr(StorageSpec("s3://b", {"aws_secret_access_key": "secret"}))


@pytest.mark.parametrize("text", ["checkpointstorage/minio", "S3Bucket/x", "s3_bucket/x", "Checkpoint Storage/x"])
def test_a_slip_in_a_block_s_type_makes_no_folder_but_one_that_exists_is_used(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_block_slug(text)
    assert parse_location(text) is None
    (tmp_path / text).mkdir(parents=True)
    assert not is_block_slug(text)
    assert parse_location(text) == StorageSpec(str(tmp_path / text))


@pytest.mark.parametrize(
    ("url", "written"),
    [
        ("s3://b//x", "s3://b/x"),
        ("s3://b/a//x/", "s3://b/a/x"),
        ("s3://b/a/../x", "s3://b/a/x"),
        ("gs://b/./x", "gs://b/x"),
        ("az://c/%2e%2e/x", "az://c/x"),
    ],
)
def test_a_name_in_a_url_that_no_key_can_have_is_refused_by_what_to_write(url, written):
    """object_store refuses the first in its own words, and makes another directory of the others."""
    with pytest.raises(ValueError, match=rf"has a name that is empty.*: write {written}$"):
        open_storage(url)


@pytest.mark.parametrize(("name", "shown"), [("caf\udce9", r"caf\\udce9"), ("a\0b", r"a\\x00b")])
def test_a_name_that_prefect_cannot_store_is_refused_in_a_path_and_in_a_url(name, shown):
    for text in (f"/data/{name}", Path("/data", name), f"s3://bucket/{name}"):
        with pytest.raises(ValueError, match=rf"^storage .*/{shown} has a byte that is not UTF-8, or a NUL: rename"):
            parse_location(text)


@pytest.mark.parametrize("scheme", ["blockcache", "cached", "dir", "filecache", "generic", "simplecache"])
def test_a_wrapper_of_fsspec_is_refused_at_once(scheme):
    with pytest.raises(ValueError, match=rf"^{scheme}:// is fsspec's wrapper of another filesystem"):
        open_storage(f"{scheme}://x")


@pytest.mark.parametrize(
    ("one", "other", "variable", "is_one"),
    [
        ({}, {}, None, True),
        ({"aws_endpoint_url": "http://a:9000"}, {"endpoint": "http://a:9000/", "aws_access_key_id": "other"}, None, True),
        ({"aws_endpoint_url": "http://a:9000"}, {"endpoint_url": "http://b:9000"}, None, False),
        ({}, {"endpoint": "http://a:9000"}, None, True),  # a profile may name it
        ({}, {"endpoint": "http://a:9000"}, "http://variable:9000", False),
        ({}, {"endpoint": "http://variable:9000"}, "http://variable:9000", True),
        ({"aws_region": "us-east-1"}, {"aws_region": "eu-west-1"}, None, True),
    ],
)
def test_buckets_of_one_name_on_two_servers_are_two_places(monkeypatch, one, other, variable, is_one):
    for name in ENDPOINT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", variable)
    assert is_one_place(StorageSpec("s3a://bucket/x", one), StorageSpec("s3://bucket/x", other)) == is_one
    assert not is_one_place(StorageSpec("s3://bucket/x", one), StorageSpec("s3://bucket/y", one))


def test_containers_of_one_name_in_two_accounts_are_two_places():
    one, other = (StorageSpec("az://container", {"azure_storage_account_name": name}) for name in ("one", "other"))
    assert is_one_place(one, one)
    assert not is_one_place(one, other)
    assert is_one_place(one, StorageSpec("az://container"))  # the environment may name the account
