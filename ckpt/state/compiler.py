"""Leaving functions out of what torch's compiler compiles; imports torch no earlier than the user does."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """Let `torch.compile` of a caller leave out `function`, with all that it calls.

    Compiled, the first report takes half a minute, and the steps after it have no gradients. Whether a caller is compiled is
    unknown here: the compiler may have left out the frame of the call, and then compiles the functions below it.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        disable = getattr(sys.modules.get("torch._dynamo"), "disable", None)  # imported where anything is compiled
        chosen: Callable[P, R] = function if disable is None else disable(function)
        return chosen(*args, **kwargs)

    return call
