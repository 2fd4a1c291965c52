"""The definition of a sweep in its storage: the same for every process that leads the sweep."""

import json
import reprlib
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, get_args

from prefect_torch.ckpt.errors import MalformedRecordError
from prefect_torch.ckpt.runs.metrics import to_json
from prefect_torch.ckpt.runs.records.fields import Count
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.storage.records import FORMAT_VERSION, check_depth
from prefect_torch.ckpt.storage.sizes import find_size
from prefect_torch.ckpt.text import utc_now
from prefect_torch.flows.sweeps.domains import as_stored, find_domain, parse_space
from prefect_torch.flows.sweeps.search_config import Mode, SearchConfig
from prefect_torch.flows.sweeps.space import is_same

_LARGEST_SEED = 2**32
_WHAT = "what a sweep searches"


@dataclass(frozen=True, slots=True)
class Definition:
    """The definition of a sweep: what it searches, and how.

    Attributes:
        function: The location of the training function.
        space: The space, as JSON.
        config: The config that all trials have.
        metrics: The metrics.
        modes: Whether a low ("min") or a high ("max") value of each is good.
        seed: The seed of all suggestions.
        search: The configuration of the search, as it was given last.
        created_at: When the sweep began (UTC, ISO 8601).

    """

    function: str
    space: dict[str, Any]
    config: dict[str, Any]
    metrics: list[str]
    modes: list[str]
    seed: Count
    search: dict[str, Any] = field(default_factory=dict)
    created_at: str = ""

    def __post_init__(self) -> None:
        """Refuse metrics without a mode each.

        Raises:
            ValueError: If there are none, or a mode is neither "min" nor "max".

        """
        modes = [mode for mode in self.modes if mode in get_args(Mode)]
        if not len(self.metrics) == len(self.modes) == len(modes) > 0:
            raise ValueError(
                f"its metrics {reprlib.repr(self.metrics)} have the modes {reprlib.repr(self.modes)}: one each, 'min' or 'max'"
            )


def define(function: str, space: dict[str, Any], config: dict[str, Any], search: SearchConfig) -> Definition:
    """Return the definition of a new sweep.

    Raises:
        ValueError: If a value of the config is no JSON, holds a domain, or is nested more than 100 levels deep, naming it.

    """
    for name, value in config.items():
        check_depth(value, f"config[{name!r}]")
        try:
            as_stored(value)
        except (TypeError, ValueError) as exc:
            raise ValueError(
                f"config[{name!r}]={value!r} is not JSON, as which a sweep stores its config: give numbers, texts, lists and "
                "dicts, and make the object in your function"
            ) from exc
        if place := find_domain(value, f"config[{name!r}]"):
            raise ValueError(f"{place} is a domain, from which nothing is chosen in the config: give it in the space")
    seed = secrets.randbelow(_LARGEST_SEED) if search.seed is None else search.seed
    given = search.model_dump(mode="json")
    return Definition(function, as_stored(space), as_stored(config), search.metrics, list(search.modes), seed, given, utc_now())


def config_of_trial(config: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a trial's function: the config of all trials, updated with the chosen values; dicts are merged."""
    merged = {**config, **chosen}
    for key in config.keys() & chosen.keys():
        if isinstance(config[key], Mapping) and isinstance(chosen[key], Mapping):
            merged[key] = config_of_trial(config[key], chosen[key])
    return merged


def read_definition(run: Run) -> Definition | None:
    """Return the definition of a sweep; None if there is no such sweep."""
    return run.records.get(Definition, run.layout.sweep, _WHAT)


def require_definition(run: Run) -> Definition:
    """Return the definition of an existing sweep.

    Raises:
        FileNotFoundError: If there is no such sweep.
        MalformedRecordError: If its definition is damaged.

    """
    known = read_definition(run)
    if known is not None:
        return known
    if find_size(run.storage, run.layout.sweep) is None:
        raise FileNotFoundError(f"there is no sweep {run.name!r} in {run.storage.url}")
    raise MalformedRecordError(
        f"{run.storage.url}/{run.layout.sweep} cannot be read, so what sweep {run.name!r} searches is unknown; "
        "start the sweep again as before, which stores it anew and goes on with its trials"
    )


def find_definition(run: Run, given: Definition, *, may_differ: bool = False) -> Definition | None:
    """Return the stored definition, with which a sweep continues; None if there is no such sweep.

    Args:
        run: The sweep.
        given: The definition that its caller gives.
        may_differ: Whether one with another space, other metrics or modes counts as none.

    Raises:
        ValueError: If the space, the metrics or the modes differ from the stored ones, and may not.

    """
    known = read_definition(run)
    for name in () if known is None else ("space", "metrics", "modes"):
        compare = _is_same_space if name == "space" else is_same
        if not compare(getattr(known, name), getattr(given, name)):
            if may_differ:
                return None
            raise ValueError(
                f"sweep {run.name!r} in {run.storage.url} has {name}={getattr(known, name)!r}, and this one "
                f"{getattr(given, name)!r}: give it another name, or resume='never' to begin it again"
            )
    return known


def _is_same_space(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two spaces are equal, however they are written: a domain as a dict may leave out a default.

    The order of keys says nothing: records are stored with sorted ones. A stored space of another version may not be parsed.
    """
    if is_same(one, other):
        return True
    try:
        return parse_space(_sorted(one)) == parse_space(_sorted(other))
    except ValueError:
        return False


def _sorted(space: dict[str, Any]) -> Any:
    return json.loads(json.dumps(space, sort_keys=True))


def settle_definition(given: Definition, known: Definition | None, *, has_seed: bool) -> Definition:
    """Return the definition with which a sweep continues.

    Args:
        given: The definition that its caller gives.
        known: The stored one; None if the sweep is new, or begins again.
        has_seed: Whether the caller chose the seed.

    """
    if known is None:
        return given
    return replace(given, seed=given.seed if has_seed else known.seed, created_at=known.created_at)


def store_definition(run: Run, settled: Definition) -> None:
    """Store the definition of a sweep."""
    record = to_json({"format": FORMAT_VERSION, **asdict(settled)})
    assert isinstance(record, dict)
    run.records.put(run.layout.sweep, record)
