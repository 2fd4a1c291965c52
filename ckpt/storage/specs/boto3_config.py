"""boto3's `Config`, by which a block says where, as whom and how S3 is requested, as options of the object store."""

from collections.abc import Mapping
from typing import Any

from botocore import UNSIGNED  # type: ignore[import-untyped]  # ships no types

from .aws import virtual_hosts

_HOSTS = ("use_dualstack_endpoint", "use_fips_endpoint")
_SIGNATURES = (None, "s3v4", "v4")
# By these, requests would go elsewhere, come from another client, or be signed otherwise. Settings that are named nowhere here
# change nothing that is stored, such as boto3's own retries, connections and checksums.
_WITHOUT_EFFECT = (
    "client_cert",
    "client_context_params",
    "ignore_configured_endpoint_urls",
    "proxies_config",
    "sigv4a_signing_region_set",
)


def client_options(config: Mapping[str, Any], bucket: str, endpoint: str | None) -> dict[str, str]:
    """Return the options for boto3's addressing style, proxies, timeouts (seconds) and unsigned requests.

    Raises:
        ValueError: If another setting would have to change how S3 is requested, and cannot.

    """
    _refuse_ignored(config)
    is_virtual = _of_s3(config).get("addressing_style") == "virtual"
    times = {name: f"{1000 * float(config[name]):.0f}ms" for name in ("connect_timeout", "read_timeout") if config.get(name)}
    proxies: Mapping[str, str] = config.get("proxies") or {}
    proxy = proxies.get((endpoint or "https").partition(":")[0].lower())
    return {
        **(virtual_hosts(bucket, endpoint) if is_virtual else {}),
        **times,
        **({} if proxy is None else {"proxy_url": proxy}),
        **({"aws_skip_signature": "true"} if is_unsigned(config) else {}),
    }


def is_unsigned(config: Mapping[str, Any]) -> bool:
    """Return whether requests are sent without a login, as to a public bucket."""
    return config.get("signature_version") in ("unsigned", UNSIGNED)


def hosts_of(config: Mapping[str, Any]) -> dict[str, bool]:
    """Return which of AWS' other hosts are asked for: those for FIPS, and those for IPv6, too."""
    return {name: True for name in _HOSTS if config.get(name) or _of_s3(config).get(name)}


def _refuse_ignored(config: Mapping[str, Any]) -> None:
    ignored = [name for name in _WITHOUT_EFFECT if config.get(name)]
    if not is_unsigned(config) and config.get("signature_version") not in _SIGNATURES:
        ignored.append("signature_version")
    if _of_s3(config).get("use_accelerate_endpoint"):
        ignored.append("s3.use_accelerate_endpoint")
    if ignored:
        raise ValueError(
            f"checkpoints are not stored through boto3, so the settings {', '.join(ignored)} of its config have no effect: "
            "remove them from the block"
        )


def _of_s3(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("s3") or {}
