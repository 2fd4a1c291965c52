"""Translation of object_store's errors, without the secrets that their texts may contain."""

import re
from datetime import datetime, timezone
from http import HTTPStatus

import obstore.exceptions
from prefect_torch.ckpt.errors import StorageError, full_storage
from prefect_torch.ckpt.storage.retry import ClockSkewError, CredentialsExpiredError, NoCredentialsError, classify
from prefect_torch.ckpt.storage.server_codes import (
    ARCHIVED,
    FULL,
    FULL_STATUS,
    PASSING,
    PASSING_STATUSES,
    REFUSED,
    REFUSED_STATUSES,
    REQUEST_REFUSED_STATUSES,
    SKEWED,
)
from prefect_torch.ckpt.text import show_age, without_login, without_secrets

_METADATA_HOST = "169.254.169.254"  # the clouds' address for a machine's role: the last source of credentials
# A request to EC2's for a token that was sent and not answered, as through a container's bridge; elsewhere there is not even a
# connection (https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/instancedata-data-retrieval.html#imds-considerations).
_UNANSWERED_TOKEN = re.compile(r"/latest/api/token\b.*\bsource: TimedOut\b", re.DOTALL)
_HOPS = (
    "; for the role of the machine, in a container, its metadata service must answer over two hops: "
    "`aws ec2 modify-instance-metadata-options --http-put-response-hop-limit 2`"
)
_PROVIDER = "External AWS credential provider"  # obstore's name for boto3's search for credentials
_GOOGLE_LOGIN = (
    "a GcsBucket block, a service account's key in GOOGLE_APPLICATION_CREDENTIALS, or the login of "
    "`gcloud auth application-default login`"
)
_S3_LOGIN = "a block, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile; for a public bucket aws_skip_signature"
_AZURE_LOGIN = "an AzureBlobStorageContainer block, or AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY"
_LOGINS = {"gs": _GOOGLE_LOGIN, "gcs": _GOOGLE_LOGIN, "s3": _S3_LOGIN, "s3a": _S3_LOGIN}  # Azure has many schemes
_NOT_ENCRYPTED, _OF_STS = "source: BadScheme", "performing POST REDACTED"  # only requests to STS hide the address
# object_store's text, and the names of boto3's errors that no server caused, with the remedy.
_UNUSABLE_LOGINS = {
    "Failed to read token file": "fix AWS_WEB_IDENTITY_TOKEN_FILE",
    f"{_PROVIDER}: FileNotFoundError": "fix AWS_WEB_IDENTITY_TOKEN_FILE, or the profile that names this file",
    f"{_PROVIDER}: ParamValidationError": "fix AWS_ROLE_ARN, the file that AWS_WEB_IDENTITY_TOKEN_FILE names, or the profile",
    f"{_PROVIDER}: SSOTokenLoadError": "log in with `aws sso login`",
    f"{_PROVIDER}: RefreshWithMFAUnsupportedError": "give a login for which nobody has to type a code",
}
_STATUS = re.compile(r"\b(?:status|status code|response)\D{0,12}(?P<status>[1-5]\d\d)\b", re.IGNORECASE)
_STATUS_OF_ONE = re.compile(r"\(code: (?P<status>[1-5]\d\d)\)")  # of one of many deletions, at Azure
# Azure's 409 for a blob under a policy of immutability; of one of many deletions there is only the text.
_IMMUTABLE = re.compile(r"\bBlobImmutableDueToPolicy\b|\bimmutable due to a policy\b")
_NAMES = re.compile(r"https?://[^\s\"<>]+|location \S+|path: \"[^\"]*\"|for key .*?: ")  # they may contain any words
_LONG_NAME = re.compile(r"(\S{100})\S+")  # a key, which comes twice, before the status
_NO_UPLOAD = re.compile(r"NoSuchUpload|InvalidBlockList|InvalidPart\b")
# The code in a response, of one object of many, and of botocore, which fetches the credentials of a role.
_CODE = re.compile(r"(?:<Code>|\(code: |An error occurred \()(?P<code>[A-Za-z]\w*)")
_TIME = re.compile(r"<(?P<whose>Request|Server)Time>(?P<time>[^<]*)<")
_ANSWER = re.compile(r"<(?P<name>Code|Message)>(?P<text>[^<]*)<")
_DETAIL = re.compile(r"<AuthenticationErrorDetail>(?P<text>[^<:'\n]{1,80})")  # Azure's; the rest may quote what was signed
# Azure's, Google's and AWS' STS' refusals of another time than theirs: their codes are those for wrong credentials.
_OTHER_TIME = re.compile(
    r"<AuthenticationErrorDetail>Request date header|Check your iat and exp values|: Signature (?:expired|not yet current): "
)
# Found below the first line of object_store's text, which is the same for every failed connection.
_CERTIFICATE = re.compile(r"\bInvalidCertificate\(\s*(?:Other\(\s*OtherError\(\s*)?(?P<why>\w+)")
_CERTIFICATE_REMEDIES = {  # by the beginning of rustls' name for the reason (https://docs.rs/rustls/latest/rustls/enum.CertificateError.html)
    "CaUsedAsEndEntity": "it says that it is an authority's own: have it made with basicConstraints=CA:FALSE",
    "Expired": "have it renewed, or set this machine's clock",
    "NotValidYet": "have it renewed, or set this machine's clock",
    "NotValidForName": "write the endpoint with the name that is in it",
    "": "give that of its authority, in AWS_CA_BUNDLE, the option root_certificate or the block",
}
_NO_TLS = "InvalidContentType"
_INVALID = re.compile(r"ParamValidationError: [^\n]*\n(?P<text>[^\n]*)")  # the second line names the parameter
_UNSENT = re.compile(r'source: reqwest::Error \{.*?\b(?:message|error): "(?P<text>[^"\n]{1,200})"', re.DOTALL)


def translate(error: Exception, where: str, *, has_answered: bool) -> Exception:
    """Return the error of the Storage protocol for object_store's `error`.

    Args:
        error: The error of a request.
        where: The object's URL.
        has_answered: Whether a request of this client has succeeded before, so that credentials were found.

    """
    text, reason = str(error), first_reason(error)
    if "NoSuchBucket" in text or "ContainerNotFound" in text:
        return FileNotFoundError(f"the bucket of {where} does not exist: create it, or fix the storage's URL")
    if isinstance(error, (obstore.exceptions.NotFoundError, FileNotFoundError)):
        return _translate_missing(error, where, reason)
    return (
        _translate_refused(error, where, reason)
        or (None if has_answered else _translate_tls(error, where))
        or _translate_login(error, where, reason, has_answered=has_answered)
        or _translate_status(error, where, reason)
    )


def _translate_missing(error: Exception, where: str, reason: str) -> Exception:
    if is_unexplained(error):
        return _not_its_answer(where, reason)
    return FileNotFoundError(f"{where} does not exist")


def _not_its_answer(where: str, reason: str) -> StorageError:
    return StorageError(f"{where}: something in front of the object store answers that nothing exists ({reason})")


def _translate_refused(error: Exception, where: str, reason: str) -> Exception | None:
    text = str(error)
    if "object with invalid path" in text:
        return OSError(f"{where}: {reason}; no listing continues past such a key: delete or rename that object")
    if "redirect without LOCATION" in text:
        return OSError(f"{where} is in another region: set aws_region, or AWS_REGION ({reason})")
    if _code(error) in SKEWED or _OTHER_TIME.search(text) is not None:
        return ClockSkewError(
            f"this machine's clock differs from that of {where} by {_show_skew(text)}, so every request is refused: set it"
        )
    if classify(error) == "credentials":
        return CredentialsExpiredError(f"the credentials for {where} have expired, or are unknown there: renew them ({reason})")
    return None


def _translate_login(error: Exception, where: str, reason: str, *, has_answered: bool) -> Exception | None:
    """Return the error of a request that was not sent because no credentials were obtained for it; None for any other.

    A role's credentials are fetched again every hour: a service that does not answer then may do so a moment later.
    """
    text, status = str(error), _status(error)
    if _NOT_ENCRYPTED in text and _OF_STS in text:
        return OSError(
            f"the credentials for {where} cannot be fetched: the address of AWS' STS must begin with https://, as object_store "
            "demands: change AWS_ENDPOINT_URL_STS, or unset AWS_WEB_IDENTITY_TOKEN_FILE for another login"
        )
    remedy = next((remedy for words, remedy in _UNUSABLE_LOGINS.items() if words in text), None)
    if not has_answered and remedy is not None:
        return OSError(f"the credentials for {where} cannot be fetched: {reason}; {remedy}")
    is_away = has_answered or status in PASSING_STATUSES or status >= 500  # noqa: PLR2004 - HTTP's errors of the server
    if _METADATA_HOST in text and not is_away:
        scheme = where.partition("://")[0].lower()
        hint = _HOPS if _UNANSWERED_TOKEN.search(text) is not None else ""
        return NoCredentialsError(f"no credentials were found for {where}: give {_LOGINS.get(scheme, _AZURE_LOGIN)}{hint}")
    if _METADATA_HOST in text or (_PROVIDER in text and _code(error) in {"", *PASSING}):
        return StorageError(f"the credentials for {where} cannot be fetched at the moment: {reason}")
    return None


def _translate_tls(error: Exception, where: str) -> Exception | None:
    """Return the error of a server that has never been reached, and cannot be with these TLS settings; None for any other."""
    text = str(error)
    if (found := _CERTIFICATE.search(text)) is not None:
        why = found["why"]
        remedy = next(remedy for begin, remedy in _CERTIFICATE_REMEDIES.items() if why.startswith(begin))
        return OSError(f"the certificate of the server of {where} is not accepted ({why}): {remedy}")
    if _NO_TLS in text:
        return OSError(f"the server of {where} does not speak TLS at this port: write its address as http://HOST:PORT")
    return None


def is_unexplained(error: Exception) -> bool:
    """Return whether a request failed with a status alone, without the code by which an object store names the reason.

    The response to a HEAD has no code. Other responses without one come from a gateway or a proxy, not from the object store.
    """
    return 400 <= _status(error) < 500 and _ANSWER.search(str(error)) is None  # noqa: PLR2004 - HTTP's client errors


def refuses_request(error: Exception) -> bool:
    """Return whether a server refused a whole request for good, and not one object of many."""
    return classify(error) == "final" and _status(error) in REQUEST_REFUSED_STATUSES


def denies_object(error: Exception) -> bool:
    """Return whether a server forbids a request, as S3 does for a missing object unless the user may list the whole bucket."""
    return classify(error) == "final" and _status(error) == HTTPStatus.FORBIDDEN


def has_no_upload(error: Exception) -> bool:
    """Return whether a server does not know a multipart upload: the upload may be complete, and its response lost."""
    text = str(error)
    return (_status(error) in (404, 405) or _NO_UPLOAD.search(text) is not None) and "NoSuchBucket" not in text


def _status(error: Exception, pattern: re.Pattern[str] = _STATUS) -> int:
    """Return the HTTP status of a response, or 0."""
    found = pattern.search(_NAMES.sub("", str(error)))
    return int(found["status"]) if found else 0


def _code(error: Exception) -> str:
    """Return the code by which a server names the reason, or ""."""
    found = _CODE.search(_NAMES.sub("", str(error)))
    return found["code"] if found else ""


def _translate_status(error: Exception, where: str, reason: str) -> Exception:
    status, code = _status(error) or _status(error, _STATUS_OF_ONE), _code(error)
    refused = (obstore.exceptions.PermissionDeniedError, obstore.exceptions.UnauthenticatedError)
    if code in PASSING:
        return StorageError(f"{where}: {reason}")
    if status == HTTPStatus.NOT_FOUND and is_unexplained(error):  # of a listing or a deletion, which is about no single object
        return _not_its_answer(where, reason)
    if code in FULL or status == FULL_STATUS:
        return full_storage(reason, where)
    is_immutable = _IMMUTABLE.search(_NAMES.sub("", str(error))) is not None
    if isinstance(error, refused) or code in REFUSED or status in REFUSED_STATUSES or is_immutable:
        return PermissionError(f"access to {where} is refused: check the credentials and their policy ({reason})")
    if (300 <= status < 500 and (status not in PASSING_STATUSES or code in ARCHIVED)) or status == 501:  # noqa: PLR2004 - HTTP's classes of status codes
        return OSError(f"{where}: {reason}")
    return StorageError(f"{where}: {reason}")


def _show_skew(answer: str) -> str:
    """Return the difference of the clocks, if the response contains it.

    https://docs.aws.amazon.com/AmazonS3/latest/userguide/RESTAuthentication.html#RESTAuthenticationTimeStamp
    """
    try:
        times = {it["whose"]: _parse_time(it["time"]) for it in _TIME.finditer(answer)}
        behind_s = (times["Server"] - times["Request"]).total_seconds()
    except (KeyError, ValueError):  # other servers send the code only
        return "more than is allowed"
    return f"{show_age(abs(behind_s))} (it is {'behind' if behind_s > 0 else 'ahead'})"


def _parse_time(text: str) -> datetime:
    form = "%Y-%m-%dT%H:%M:%SZ" if "-" in text else "%Y%m%dT%H%M%SZ"
    return datetime.strptime(text, form).replace(tzinfo=timezone.utc)


def first_reason(error: Exception) -> str:
    """Return the first line without its URL's login and query, which may be signed, and the code and message of the response.

    For a request that was not sent, the reason, such as "Connection refused", replaces the response.
    """
    text = without_login(str(error).strip())
    line = without_secrets(text.partition("\n")[0].partition("<")[0])
    line = _LONG_NAME.sub(r"\1…", line)[:500].rstrip(": ")
    answer = {found["name"]: found["text"] for found in reversed(list(_ANSWER.finditer(text)))}
    unsent = _UNSENT.search(text) or _INVALID.search(text)
    reasons = [answer[name][:300] for name in ("Code", "Message") if name in answer]
    reasons += [found["text"].strip() for found in [_DETAIL.search(text)] if found is not None]
    return ": ".join([line, *([unsent["text"]] if unsent is not None and not reasons else reasons)])
