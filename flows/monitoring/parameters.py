"""The parameters of a call, as Prefect and a training's pages show them: a person reads them, and nothing is made of them."""

import math
from argparse import Namespace
from array import array
from collections.abc import Mapping, MutableSequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any
from uuid import UUID

from prefect.blocks.core import Block
from prefect_torch.ckpt import Checkpoint
from prefect_torch.ckpt.runs.metrics import has_item
from prefect_torch.ckpt.storage.specs.location import without_password
from prefect_torch.ckpt.text import encodable, in_partials, show_class
from prefect_torch.tasks.options.storage import masked
from pydantic import BaseModel

# Those that Prefect's API returns; another makes each list with it an error. Ask for an `int` itself: for an object of a
# subclass, such as an IntEnum or ruamel.yaml's, Python compares one number after the other.
API_INTEGERS = range(-(2**63), 2**64)
_ENCODED = (BaseModel, PurePath, date, time, timedelta, UUID, Decimal)  # by Prefect
_LISTS = (MutableSequence, tuple, set, frozenset)  # a list of OmegaConf, too; other sequences may be columns of a dataset
_BUFFERS = (bytearray, array)
_WRITTEN = {"complex", "range", "torch.device", "torch.dtype"}
_MOST_LEVELS = 100
_MOST_BITS = 4096  # that are shown as a decimal number: Python refuses far longer ones


def as_shown(value: Any, above: tuple[int, ...] = ()) -> Any:
    """Return `value` as what JSON and Prefect's API can hold: a function as "module:function", an object as "<its class>".

    A checkpoint is shown as its path, and a block or a URL without its password: Prefect stores the parameters before the flow
    refuses them. Nothing is asked for its items but dicts, lists (any mutable sequence), tuples, sets and dataclasses: a
    dataset would read all of its samples.

    Args:
        value: The value.
        above: The ids of the containers around it; one that holds itself is shown as its class.

    """
    if isinstance(value, Enum):
        value = value.value
    if value is None or isinstance(value, bool):
        return value
    if issubclass(type(value), _ENCODED):  # Pydantic's isinstance asks the value for an attribute
        return _as_encoded(value)
    if isinstance(value, (str, int, float)):
        return _plain(value)
    if id(value) not in above and len(above) < _MOST_LEVELS:
        inside = (*above, id(value))
        with suppress(Exception):  # for example of an OmegaConf, where a value is missing
            if isinstance(value, _LISTS) and not isinstance(value, _BUFFERS):
                return [as_shown(item, inside) for item in value]
            if (items := _items(value)) is not None:
                return {str(as_shown(name)): as_shown(item, inside) for name, item in items.items()}
    return _by_name(value)


def _plain(value: str | float) -> str | float:
    if isinstance(value, str):
        return encodable(without_password(value))
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if int(value) in API_INTEGERS:
        return int(value)
    return str(value) if value.bit_length() <= _MOST_BITS else hex(value)


def _as_encoded(value: Any) -> Any:
    """Return an object that Prefect itself encodes: a model without its secrets, say; by its class if that fails."""
    from fastapi.encoders import jsonable_encoder  # noqa: PLC0415 - as Prefect does, which calls it next

    try:
        encoded = jsonable_encoder(value)
    except Exception:  # noqa: BLE001 - whatever a model's serializers raise, for example at a tensor in it
        return f"<{show_class(value)}>"
    shown = as_shown(masked(encoded) if issubclass(type(value), Block) else encoded)
    return value if shown == encoded else shown


def _items(value: Any) -> Mapping[Any, Any] | None:
    if isinstance(value, Mapping):
        return value
    if isinstance(value, (Namespace, SimpleNamespace)):
        return vars(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name, None) for field in fields(value) if field.repr}  # others may be secret
    return None


def _by_name(value: Any) -> Any:
    if isinstance(value, Checkpoint):
        return encodable(value.path)
    with suppress(Exception):  # for example a tensor on the meta device, or whatever a `__getattr__` raises
        function = in_partials(value)
        if (name := getattr(function, "__qualname__", None)) is not None:
            return encodable(f"{getattr(function, '__module__', None)}:{name}")
        if has_item(value) and isinstance(item := value.item(), (bool, int, float, str)):
            return as_shown(item)
    kind = show_class(value)
    return str(value) if kind in _WRITTEN else f"<{kind}>"
