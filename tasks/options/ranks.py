"""The number of ranks: one number, or the fewest and the most."""

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, PlainSerializer, ValidatorFunctionWrapHandler, WithJsonSchema, WrapValidator
from pydantic_core import PydanticCustomError

_MOST = 65_536  # each is described in memory before anything starts


def _check(value: Any, check_one: ValidatorFunctionWrapHandler) -> int | tuple[int, int]:
    if not isinstance(value, (list, tuple)):
        if isinstance(value, int) and value == 0:  # as in Ray's local mode
            raise PydanticCustomError(
                "ranks", "Input should be greater than 0: each rank is a process, and there is no mode without processes"
            )
        one: int = check_one(value)
        return one
    if len(value) != 2:  # noqa: PLR2004 - the fewest and the most
        raise PydanticCustomError("ranks", "Input should be one number, or two: the fewest ranks and the most")
    fewest, most = map(check_one, value)
    if fewest > most:
        raise PydanticCustomError("ranks", "The fewest ranks should not be more than the most")
    return fewest, most


if TYPE_CHECKING:
    Ranks = int | tuple[int, int]
else:
    _ONE = {"type": "integer", "minimum": 1, "maximum": _MOST}
    _RANGE = {"type": "array", "title": "From, to", "items": _ONE, "minItems": 2, "maxItems": 2}
    # Not a union, whose errors would name the choices; the first choice is the one that a form shows.
    Ranks = Annotated[
        int,
        Field(ge=1, le=_MOST),
        WrapValidator(_check),
        PlainSerializer(lambda value: value),
        WithJsonSchema({"anyOf": [{**_ONE, "title": "Number"}, _RANGE]}),
    ]
