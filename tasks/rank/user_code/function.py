"""Packing a training function in the process that starts a training, and unpacking it in a rank."""

import os
import pickle
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
from prefect_torch.ckpt.context import context_or_none
from prefect_torch.ckpt.text import name_of

from .code_pickle import dump
from .function_reference import TrainFunction, check_reference, check_signature, import_function, is_importable, search
from .shadowing import check_is_package

_unpacking: list[str] = []  # names of the functions whose module this rank is importing
_packing = threading.Lock()  # cloudpickle's list of modules by value is that of the whole process


@dataclass(frozen=True, slots=True)
class PackedFunction:
    """A training function and its configuration, for a new interpreter.

    Attributes:
        reference: "module:function" or "path/to/file.py:function"; None when `payload` carries the function.
        payload: The function, or None, and its configuration, pickled.
        sys_path: Its search path for modules.
        cwd: Its working directory.
        name: The name of the function in messages.
        evaluates: Whether it evaluates a checkpoint, which it may take as its first argument.

    """

    reference: str | None
    payload: bytes
    sys_path: tuple[str, ...]
    cwd: str
    name: str
    evaluates: bool = False


def check_is_no_rank() -> None:
    """Raise if this process is a rank, which must not start ranks.

    Raises:
        RuntimeError: If it is importing a function: the ranks that it starts would import it as well, and so on. Or if it is
            running one: each rank would start ranks of its own.

    """
    if _unpacking:
        raise RuntimeError(
            f"a rank that imports {_unpacking[0]} would start ranks itself, and these theirs: put the call that starts the "
            'training below `if __name__ == "__main__":`, or into another file'
        )
    if (context := context_or_none()) is not None:
        raise RuntimeError(
            f"rank {context.world_rank} of run {context.run_name!r} would start ranks itself, as would each of the "
            f"{context.world_size}: call this from a flow or a program, before that training or after it"
        )


def pack_function(
    function: str | TrainFunction,
    config: dict[str, Any] | None,
    working_dir: str | Path | None = None,
    *,
    evaluates: bool = False,
) -> PackedFunction:
    """Return `function` and `config` in a form that pickles; a reference is looked up, not imported.

    Args:
        function: "module:function", "path/to/file.py:function", or the function itself. A function that a new interpreter
            can import is pickled by name, any other by value (cloudpickle), with the globals of its module that it uses.
        config: The argument of the function, if it takes one.
        working_dir: The directory whose copy ranks run in; None if they run in the process's own.
        evaluates: Whether it evaluates a checkpoint.

    Raises:
        ValueError: If there is no such module, file or function.
        TypeError: If the function or its configuration cannot be pickled, or ranks cannot call it.
        RuntimeError: As by `check_is_no_rank`.
        ImportError: If ranks would import a file of the user's as torch.

    """
    check_is_no_rank()
    reference, parameter = None, "eval_fn" if evaluates else "train_fn"
    value: TrainFunction | None = None
    if isinstance(function, str):
        name = reference = check_reference(function, parameter, working_dir)
    elif callable(function):
        search(working_dir)
        value = check_signature(function, evaluates=evaluates)
        name = name_of(value)
    else:
        raise TypeError(f"{parameter} must be a function or 'module:function', not {type(function).__name__}")
    for package in ("torch", "numpy"):  # torch imports numpy, if there is one
        check_is_package(package)
    return PackedFunction(
        reference=reference,
        payload=_dump(value, config, f"{parameter} {name}"),
        sys_path=tuple(os.path.abspath(path) for path in [*sys.path, ""] if not path or Path(path).exists()),  # noqa: PTH100 - "" is the working directory
        cwd=str(Path.cwd()),
        name=name,
        evaluates=evaluates,
    )


def unpack_function(packed: PackedFunction) -> tuple[TrainFunction, dict[str, Any] | None]:
    """Return the function and its configuration; imports the user's code.

    Raises:
        ValueError: If the module has no such function.
        TypeError: If it is not a function that a rank can call.

    """
    _unpacking.append(packed.name)
    try:
        value, config = pickle.loads(packed.payload)  # noqa: S301 - from the process that started this one
        if packed.reference is not None:
            value = import_function(packed.reference, evaluates=packed.evaluates)
        return value, config
    finally:
        _unpacking.pop()


def _dump(function: TrainFunction | None, config: dict[str, Any] | None, given: str) -> bytes:
    try:
        with _packing, _by_value(sys.modules.get(getattr(function, "__module__", None) or "")):
            return dump((function, config))
    except Exception as exc:
        raise TypeError(
            f"{given} and its config cannot travel to the ranks: {exc}. "
            "Define the function in a module and give 'module:function', open files, locks and connections inside it, "
            "and keep the config to plain values"
        ) from exc


@contextmanager
def _by_value(module: ModuleType | None) -> Iterator[None]:
    """Have the functions of a module that a new interpreter cannot import pickled by value in the body."""
    registered = cloudpickle.list_registry_pickle_by_value()  # by the user, for good
    if module is None or module.__name__ == "__main__" or module.__name__ in registered or is_importable(module):
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)
