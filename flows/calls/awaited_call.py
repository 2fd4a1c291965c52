"""Refuses `await train(...)` before the training; the interpreter itself would refuse it only afterwards."""

import dis
import inspect
from types import FrameType

_ASYNC = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def check_not_awaited(caller: FrameType, name: str) -> None:
    """Raise TypeError if `caller` awaits the return value of its current call of the flow `name`.

    Only the caller's bytecode shows that: a blocking call in an event loop is allowed, and returns the same.
    """
    if not caller.f_code.co_flags & _ASYNC:
        return
    following = next((it for it in dis.get_instructions(caller.f_code) if it.offset > caller.f_lasti), None)
    if following is None or following.opname != "GET_AWAITABLE":
        return
    other = "; `await atrain(...)` takes the same arguments and leaves the event loop free" if name == "train" else ""
    raise TypeError(f"{name}() blocks until it has ended and returns nothing to await: call it without `await`{other}")
