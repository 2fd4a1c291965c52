"""Committed checkpoints as Prefect assets, in the events that Prefect's own `@materialize` emits."""

from collections.abc import Mapping, Sequence
from typing import Any

import xxhash
from prefect.assets import Asset, AssetProperties
from prefect.context import AssetContext
from prefect.events import Event, RelatedResource, Resource
from prefect.types.names import MAX_ASSET_KEY_LENGTH, RESTRICTED_ASSET_CHARACTERS

MATERIALIZED_BY = "prefect-torch"


def asset_key(place: str) -> str:
    """Return the asset key of a run or checkpoint at `place`, a path or URL: the URL itself, or file:// and the path.

    Prefect allows no "%" in a key, so a character that it refuses is written "~20" where a URL would have "%20". A place that
    is longer than a key may be keeps its end, and a digest of all of it.
    """
    url = place if "://" in place else f"file://{place}"
    key = "".join(f"~{ord(letter):02x}" if letter in RESTRICTED_ASSET_CHARACTERS else letter for letter in url)
    if len(key) <= MAX_ASSET_KEY_LENGTH:
        return key
    beginning = f"{key.partition('://')[0]}://{xxhash.xxh3_128_hexdigest(key.encode())}-"
    return beginning + key[len(beginning) - MAX_ASSET_KEY_LENGTH :]


def referenced(upstream: str) -> Event:
    """Return the event that something is made from the asset `upstream`, a run's or checkpoint's path or URL."""
    return Event(
        event="prefect.asset.referenced", resource=Resource(AssetContext.asset_as_resource(Asset(key=asset_key(upstream))))
    )


def materialized(checkpoint: str, name: str, upstream: Sequence[str], metadata: Mapping[str, Any]) -> Event:
    """Return the event that a checkpoint was made.

    Args:
        checkpoint: Its path or URL.
        name: What the asset is called.
        upstream: What it was made from: paths or URLs.
        metadata: What is known of it, as JSON can hold it.

    """
    asset = Asset(key=asset_key(checkpoint), properties=AssetProperties(name=name, url=checkpoint))
    related = [AssetContext.asset_as_related(Asset(key=asset_key(place))) for place in upstream]
    related.append(AssetContext.related_materialized_by(MATERIALIZED_BY))
    return Event(
        event="prefect.asset.materialization.succeeded",
        resource=Resource(AssetContext.asset_as_resource(asset)),
        related=[RelatedResource(it) for it in related],
        payload=dict(metadata),
    )
