"""The parameters of flow runs and deployments, as far as Prefect's API can hold them."""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from prefect.exceptions import PrefectException, PrefectHTTPStatusError
from prefect_torch.ckpt.text import encodable, show_class
from prefect_torch.flows.monitoring.parameters import API_INTEGERS
from prefect_torch.tasks.rank.errors import RankFailedError
from pydantic_core import to_jsonable_python

_TOO_LARGE = re.compile(r"parameters must be less than ([\d,]+) bytes when serialized \(got ([\d,]+) bytes\)")
# The ends of Pydantic's errors, the second of older versions; deeper still, Prefect meets Python's own limit.
_TOO_DEEP = (
    "Maximum serialization depth exceeded",
    "Circular reference detected (depth exceeded)",
    "Circular reference detected (id repeated)",
)


def check_stored(config: Mapping[str, Any], name: str = "config") -> None:
    """Raise ValueError if Prefect's API cannot hold a config, or returns another number or key than was stored.

    Args:
        config: The config.
        name: The argument that it is, for the error.

    Raises:
        ValueError: Naming the place.

    """
    left: list[tuple[str, Any]] = [(f"{name}[{key!r}]", value) for key, value in config.items()]
    seen: set[int] = set()  # of containers: one may hold itself, which Prefect refuses
    while left:
        place, value = left.pop()
        problem = None
        if isinstance(value, (Mapping, list, tuple)):
            if id(value) in seen:
                continue
            seen.add(id(value))
            items = value.items() if isinstance(value, Mapping) else enumerate(value)
            left += [(f"{place}[{key!r}]", item) for key, item in items]
            if isinstance(value, Mapping):
                problem = next((f"has the key {key!r}" for key in value if not isinstance(key, str)), None)
        elif isinstance(value, float) and not math.isfinite(value):
            problem = f"is {value}"
        elif isinstance(value, int):
            problem = None if int(value) in API_INTEGERS else "is an integer of more than 64 bits"
        elif isinstance(value, str):
            problem = None if encodable(value) == value else "has a lone surrogate or a NUL"
        elif not _is_stored(value):
            problem = f"is a {show_class(value)}"
        if problem is not None:
            raise ValueError(
                f"{place} {problem}, which Prefect's API does not return as it is: give text, for example, and convert it in "
                "your function"
            )


def _is_stored(value: object) -> bool:
    try:
        to_jsonable_python(value)
    except ValueError:  # PydanticSerializationError, or of bytes that are no text
        return False
    return True


@contextmanager
def large_parameters_explained() -> Iterator[None]:
    """Replace the error about parameters that are too large, or nested too deeply, for Prefect by one sentence.

    Raises:
        ValueError: In place of such an error, with both sizes if it has them, and what to do.

    """
    try:
        yield
    except (PrefectHTTPStatusError, RuntimeError) as exc:  # RuntimeError: raised for a deployment
        sizes = _TOO_LARGE.search(str(exc))
        if sizes is None:
            raise
        raise ValueError(
            f"the parameters have {sizes[2]} bytes, and Prefect's server takes less than {sizes[1]}: put data of the config "
            "into a file or the storage, and its path into the config"
        ) from None
    except (PrefectException, ValueError) as exc:
        is_of_rank = isinstance(exc.__cause__, RankFailedError)  # which may serialize something of its own
        if is_of_rank or not (isinstance(exc.__cause__, RecursionError) or str(exc).endswith(_TOO_DEEP)):
            raise
        raise ValueError(
            "a parameter is nested too deeply for Prefect, or holds itself: put such data into a file or the storage, and its "
            "path into the config"
        ) from None
