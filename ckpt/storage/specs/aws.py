"""The search of AWS' own tools for the login, region and endpoint of S3: variables, and the profile with its sections."""

import os
import re
from typing import Any

from prefect_torch.ckpt.storage.retry import LoginError

_OF_CONTAINER = ("AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI")
_FIX = "fix ~/.aws/config, the file that AWS_CONFIG_FILE names, or the AWS_… variables"

# AWS has names for its FIPS endpoints outside GovCloud with a bucket in them alone (https://aws.amazon.com/compliance/fips/).
_FIPS = re.compile(r"https://s3-fips\.", re.IGNORECASE)
_ADDRESS = re.compile(r"\[|\d+\.\d+\.\d+\.\d+(?:[:/]|$)")


def find_s3(session: Any, region: str | None, endpoint: str | None, **hosts: bool) -> tuple[str | None, str | None]:
    """Return the region and the endpoint at which a botocore session would request S3; sends no request.

    Args:
        session: The session, which from now on requests all services in this region, or in us-east-1 if there is none.
        region: The region if it is given; None if the session is to find it.
        endpoint: The endpoint if it is given; None if the session is to find it.
        hosts: botocore's `use_dualstack_endpoint` and `use_fips_endpoint`, if they are given.

    Returns:
        The region, or None if there is none; the endpoint, or None if it is AWS' usual one for the region.

    Raises:
        ValueError: If the profile does not exist, or it or a variable is invalid.

    """
    import botocore.exceptions  # type: ignore[import-untyped]  # noqa: PLC0415 - ships no types, takes a while to import
    from botocore import UNSIGNED  # noqa: PLC0415 - takes a while to import
    from botocore.config import Config  # type: ignore[import-untyped]  # noqa: PLC0415 - ships no types, takes a while to import

    try:
        # botocore takes an empty AWS_DEFAULT_REGION for the name of a region.
        region = region or session.get_config_variable("region") or session.get_scoped_config().get("region")
        session.set_config_variable("region", region or "us-east-1")
        if endpoint is not None:
            return region, endpoint
        found = session.create_client("s3", config=Config(signature_version=UNSIGNED, **hosts)).meta
    except botocore.exceptions.ProfileNotFound as exc:
        raise ValueError(f"{exc}: fix AWS_PROFILE or the block's profile_name, or add the profile to ~/.aws/config") from exc
    except botocore.exceptions.BotoCoreError as exc:
        raise ValueError(f"{exc}: {_FIX}") from exc
    except ValueError:  # of an endpoint
        # The error shows the whole endpoint, which may hold a password.
        raise ValueError(
            f"the endpoint_url {_of_profile(session)} is no address of a server: write http://HOST:PORT or https://HOST; {_FIX}"
        ) from None
    usual = ("https://s3.amazonaws.com", f"https://s3.{found.region_name}.amazonaws.com")
    return region, None if found.endpoint_url in usual else found.endpoint_url


def virtual_hosts(bucket: str, endpoint: str | None) -> dict[str, str]:
    """Return the options for a bucket as a part of its host's name; object_store adds it to the names of AWS' own hosts only.

    Args:
        bucket: The bucket.
        endpoint: The endpoint, which may have the bucket already; None for AWS' usual one, or one that is still to be found.

    """
    scheme, slashes, host = (endpoint or "").partition("://")
    if _ADDRESS.match(host):  # as in boto3: an IP address has no subdomains
        return {}
    options = {"aws_virtual_hosted_style_request": "true"}
    if slashes and not host.startswith(f"{bucket}."):
        options["aws_endpoint_url"] = f"{scheme}://{bucket}.{host}"
    return options


def has_virtual_hosts_alone(bucket: str, endpoint: str | None) -> bool:
    """Return whether an endpoint is one of AWS' for FIPS; a bucket with a dot is no part of their names, as in boto3."""
    return "." not in bucket and _FIPS.match(endpoint or "") is not None


def has_credentials(session: Any) -> bool:
    """Return whether a botocore session has credentials, which it caches; may run the profile's `credential_process`.

    An agent of the container (EKS, ECS) that does not answer may not have started yet: it is asked again with each request.

    Raises:
        LoginError: If the login of the profile is incomplete, or its `credential_process` fails.

    """
    import botocore.exceptions  # noqa: PLC0415 - takes a while to import

    try:
        return session.get_credentials() is not None
    except botocore.exceptions.BotoCoreError as exc:
        if exc.kwargs.get("provider") == "container-role":
            return True
        reason = str(exc).strip()
    except Exception as exc:  # noqa: BLE001 - botocore passes on whatever the start of a process and its output raise
        reason = f"{type(exc).__name__}: {exc}"
        if not any(map(os.environ.get, _OF_CONTAINER)):
            reason = f"credential_process must write JSON as the AWS CLI expects it ({reason})"
    # Without the error itself, which may hold the output of the process: keys.
    raise LoginError(f"the login {_of_profile(session)} cannot be used: {reason}; {_FIX}")


def _of_profile(session: Any) -> str:
    return f"of the AWS profile {session.profile or 'default'!r}"
