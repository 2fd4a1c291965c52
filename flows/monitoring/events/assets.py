"""Committed checkpoints as Prefect assets, in the events that Prefect's own `@materialize` emits."""

from collections.abc import Mapping, Sequence
from typing import Any

import xxhash
from prefect.assets import Asset, AssetProperties
from prefect.context import AssetContext
from prefect.events import Event, RelatedResource, Resource
from prefect.types.names import MAX_ASSET_KEY_LENGTH, RESTRICTED_ASSET_CHARACTERS

MATERIALIZED_BY = "prefect-torch"


def asset_key(location: str) -> str:
    """Return the asset key of a run or checkpoint: its URL, or file:// and its path.

    Prefect allows no "%" in a key, so a character that it refuses is written "~20" where a URL has "%20". A location that is
    longer than the longest key is replaced by its digest and its end.
    """
    url = location if "://" in location else f"file://{location}"
    key = "".join(f"~{ord(letter):02x}" if letter in RESTRICTED_ASSET_CHARACTERS else letter for letter in url)
    if len(key) <= MAX_ASSET_KEY_LENGTH:
        return key
    beginning = f"{key.partition('://')[0]}://{xxhash.xxh3_128_hexdigest(key.encode())}-"
    return beginning + key[len(beginning) - MAX_ASSET_KEY_LENGTH :]


def referenced(upstream: str) -> Event:
    """Return the event that the asset `upstream`, a run's or checkpoint's path or URL, is used."""
    return Event(
        event="prefect.asset.referenced", resource=Resource(AssetContext.asset_as_resource(Asset(key=asset_key(upstream))))
    )


def materialized(checkpoint: str, name: str, upstream: Sequence[str], metadata: Mapping[str, Any]) -> Event:
    """Return the event that a checkpoint was committed.

    Args:
        checkpoint: Its path or URL.
        name: The asset's name.
        upstream: The paths or URLs that it was made from.
        metadata: The event's payload, JSON-serializable.

    """
    asset = Asset(key=asset_key(checkpoint), properties=AssetProperties(name=name, url=checkpoint))
    related = [AssetContext.asset_as_related(Asset(key=asset_key(location))) for location in upstream]
    related.append(AssetContext.related_materialized_by(MATERIALIZED_BY))
    return Event(
        event="prefect.asset.materialization.succeeded",
        resource=Resource(AssetContext.asset_as_resource(asset)),
        related=[RelatedResource(it) for it in related],
        payload=dict(metadata),
    )
