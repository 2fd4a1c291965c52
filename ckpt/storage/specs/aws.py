"""The search of AWS' own tools for the region and the endpoint of S3: variables, and the profile with its sections."""

from typing import Any


def find_s3(session: Any, region: str | None, endpoint: str | None) -> tuple[str | None, str | None]:
    """Return the region and the endpoint at which a botocore session would request S3; sends no request.

    Args:
        session: The session, which from now on requests all services in this region, or in us-east-1 if there is none.
        region: The region if it is given; None if the session is to find it.
        endpoint: The endpoint if it is given; None if the session is to find it.

    Returns:
        The region, or None if there is none; the endpoint, or None if it is AWS' usual one for the region.

    Raises:
        ValueError: If the profile does not exist, or it or a variable is invalid.

    """
    import botocore.exceptions  # type: ignore[import-untyped]  # noqa: PLC0415 - ships no types, takes a while to import
    from botocore import UNSIGNED  # noqa: PLC0415 - as above
    from botocore.config import Config  # type: ignore[import-untyped]  # noqa: PLC0415 - as above

    try:
        # botocore takes an empty AWS_DEFAULT_REGION for the name of a region.
        region = region or session.get_config_variable("region") or session.get_scoped_config().get("region")
        session.set_config_variable("region", region or "us-east-1")
        if endpoint is not None:
            return region, endpoint
        found = session.create_client("s3", config=Config(signature_version=UNSIGNED)).meta
    except botocore.exceptions.ProfileNotFound as exc:
        raise ValueError(f"{exc}: fix AWS_PROFILE or the block's profile_name, or add the profile to ~/.aws/config") from exc
    except botocore.exceptions.BotoCoreError as exc:
        raise ValueError(f"{exc}: fix ~/.aws/config, the file that AWS_CONFIG_FILE names, or the AWS_… variables") from exc
    usual = ("https://s3.amazonaws.com", f"https://s3.{found.region_name}.amazonaws.com")
    return region, None if found.endpoint_url in usual else found.endpoint_url
