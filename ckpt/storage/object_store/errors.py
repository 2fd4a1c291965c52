"""Translation of object_store's errors, without the secrets that their texts may contain."""

import errno
import os
import re
from datetime import datetime, timezone

import obstore.exceptions
from prefect_torch.ckpt.errors import StorageError
from prefect_torch.ckpt.storage.retry import ClockSkewError, CredentialsExpiredError, classify
from prefect_torch.ckpt.text import show_age

_PASSING = {408, 409, 425, 429}  # HTTP statuses of a temporary condition, not of the request
_METADATA_HOST = "169.254.169.254"  # the clouds' address for a machine's role: the last source of credentials
_STATUS = re.compile(r"\b(?:status|status code|response)\D{0,12}(?P<status>[1-5]\d\d)\b", re.IGNORECASE)
_SKEWED = "<Code>RequestTimeTooSkewed<"
_TIME = re.compile(r"<(?P<whose>Request|Server)Time>(?P<time>[^<]*)<")
_ANSWER = re.compile(r"<(?P<name>Code|Message)>(?P<text>[^<]*)<")


def translate(error: Exception, where: str) -> Exception:
    """Return the error of the Storage protocol for object_store's `error`."""
    text, reason = str(error), first_reason(error)
    if "NoSuchBucket" in text or "ContainerNotFound" in text:
        return FileNotFoundError(f"the bucket of {where} does not exist: create it, or fix the storage's URL")
    if isinstance(error, (obstore.exceptions.NotFoundError, FileNotFoundError)):
        return FileNotFoundError(f"{where} does not exist")
    if _SKEWED in text:
        return ClockSkewError(
            f"this machine's clock differs from that of {where} by {_show_skew(text)}, so every request is refused: set it"
        )
    if classify(error) == "credentials":
        return CredentialsExpiredError(f"the credentials for {where} have expired: {reason}")
    if _METADATA_HOST in text:
        return PermissionError(
            f"no credentials were found for {where}: give a block, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile; "
            "for a public bucket aws_skip_signature"
        )
    return _translate_status(error, where, reason)


def _translate_status(error: Exception, where: str, reason: str) -> Exception:
    status = _STATUS.search(str(error))
    code = int(status["status"]) if status else 0
    refused = (obstore.exceptions.PermissionDeniedError, obstore.exceptions.UnauthenticatedError)
    if isinstance(error, refused) or code in (401, 403):
        return PermissionError(f"access to {where} is refused: check the credentials and their policy ({reason})")
    if code == 507 or "StorageFull" in str(error):  # noqa: PLR2004 - "Insufficient Storage", and MinIO's code
        return OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {reason}", where)
    if (300 <= code < 500 and code not in _PASSING) or code == 501:  # noqa: PLR2004 - HTTP's classes of status codes
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
        return "more than the 15 minutes that S3 allows"
    return f"{show_age(abs(behind_s))} (it is {'behind' if behind_s > 0 else 'ahead'})"


def _parse_time(text: str) -> datetime:
    form = "%Y-%m-%dT%H:%M:%SZ" if "-" in text else "%Y%m%dT%H%M%SZ"
    return datetime.strptime(text, form).replace(tzinfo=timezone.utc)


def first_reason(error: Exception) -> str:
    """Return the first line without its URL's query, which may be signed, and the code and message of the server's response."""
    text = str(error).strip()
    line = re.sub(r"\?\S*", "", text.partition("\n")[0].partition("<")[0])[:500].rstrip(": ")
    answer = {found["name"]: found["text"] for found in reversed(list(_ANSWER.finditer(text)))}
    return ": ".join([line, *(answer[name][:300] for name in ("Code", "Message") if name in answer)])
