"""References to training functions by name: checked without an import, and imported in a rank."""

import importlib.util
import inspect
import os
import re
import symtable
import sys
import threading
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import cloudpickle
from prefect_torch.ckpt.text import name_of

from .shadowing import standard_library

TrainFunction: TypeAlias = Callable[..., Any]
_LAZY = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
_REFERENCE = re.compile(r"(?P<place>.+):(?P<name>[A-Za-z_]\w*)", re.ASCII)
_STAR_IMPORT = re.compile(rb"\bimport[\s\\(]*\*")
_searching = threading.Lock()  # trainings may begin in several threads
_added: list[str] = []  # what `search` has added to `sys.path`: these strings, since others may add equal ones


def search(working_dir: str | Path | None) -> None:
    """Let this process, too, find modules in `working_dir`, then in its own working directory, before those of earlier calls.

    They come after the search path that the process has without them, and stay: what ranks return or raise is found there.
    """
    directories = [] if working_dir is None else [str(Path(working_dir).expanduser().resolve())]
    if "" not in sys.path:  # the process of a worker does not search its working directory
        directories.append(str(Path.cwd()))
    with _searching:
        end = next((number for number, entry in enumerate(sys.path) if _is_added(entry)), len(sys.path))
        first = [it for it in directories if it not in sys.path[:end]]
        sys.path[end:] = [*first, *(it for it in sys.path[end:] if not (it in first and _is_added(it)))]
        _added[:] = [*first, *(it for it in _added if it not in first)]


def _is_added(entry: str) -> bool:
    return any(entry is it for it in _added)


def check_reference(reference: str, parameter: str = "train_fn", working_dir: str | Path | None = None) -> str:
    """Return `reference`, with the path of a file made absolute; its module is not imported.

    Nor are the packages that it is in, unless one of them itself says where its modules are (`__path__`).

    Args:
        reference: "module:function" or "path/to/file.py:function".
        parameter: The name of the flow's parameter that it was given as, for errors.
        working_dir: The directory whose copy ranks run in; None if they run in the process's own.

    Raises:
        ValueError: If there is no such module, file or function.

    """
    search(working_dir)
    match, given = _REFERENCE.fullmatch(reference), f"{parameter} {reference!r}"
    if match is None:
        raise ValueError(f"{given}: give 'module:function' or 'path/to/file.py:function'")
    place, name = match["place"], match["name"]
    source: Path | None
    if place.endswith(".py"):
        source = Path(place).expanduser().absolute()
        if not source.is_file():
            raise ValueError(f"{given}: there is no file {source}")
        place = str(source)
    else:
        source = _find_module(place, given)
    known = _top_level_names(source)
    if known is not None and name not in known:
        advice = f" (for a file of yours, give {place}.py:{name})" if place in sys.stdlib_module_names else ""
        raise ValueError(f"{given}: {source} defines no {name!r}{advice}")
    return f"{place}:{name}"


def _find_module(name: str, given: str) -> Path | None:
    try:
        spec = _find_afresh(name) or importlib.util.find_spec(name)
    except Exception as exc:  # a package that is imported may raise anything
        raise ValueError(f"{given}: module {name!r} cannot be found: {type(exc).__name__}: {exc}") from exc
    if spec is None:
        raise ValueError(
            f"{given}: there is no module {name!r} in {Path.cwd()} or among the installed: give 'path/to/file.py:function', or "
            "start in the directory of the module"
        )
    source = Path(spec.origin or "")
    return source if source.suffix == ".py" and source.is_file() else None  # that of a module in a zip archive is no file


def _top_level_names(source: Path | None) -> set[str] | None:
    """Return the names that the file binds, or None if only running it would show them."""
    if source is None:
        return None
    text = source.read_bytes()
    if _STAR_IMPORT.search(text):
        return None
    # Not ast.parse: before CPython 3.11.8, it fails in two threads at the same time (https://github.com/python/cpython/issues/106905).
    try:
        table = symtable.symtable(text, str(source), "exec")  # type: ignore[arg-type]  # bytes are accepted, with their own encoding
    except (SyntaxError, ValueError) as exc:  # ValueError: a null byte
        raise ValueError(f"{source} is not valid Python: {exc}") from exc
    symbols = table.get_symbols()
    names = {one.get_name() for one in symbols if one.is_assigned() or one.is_imported() or one.is_declared_global()}
    return None if "__getattr__" in names else names  # which imports names when they are used


def reference_to(function: str | TrainFunction) -> str:
    """Return "module:function", or "path/to/file.py:function" of a program's own function; a reference stays as it is.

    Raises:
        ValueError: If only this process has the function.
        TypeError: If it is not a function that a rank can call.

    """
    if isinstance(function, str):
        return function
    if not callable(function):
        raise TypeError(f"train_fn must be a function or 'module:function', not {type(function).__name__}")
    check_signature(function)
    name = name_of(function)
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if module is not None and getattr(module, name, None) is function:
        if module.__name__ != "__main__" and is_importable(module):
            return f"{module.__name__}:{name}"
        file = Path(module.__file__ or "").absolute()
        if file.suffix == ".py":
            return f"{file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file}:{name}"
    raise ValueError(f"train_fn {name} exists in this process only: define it at the top level of a module or a file")


def import_function(reference: str, *, evaluates: bool = False) -> TrainFunction:
    """Return the function of a checked reference; imports the user's code.

    Raises:
        ValueError: If the module has no such function.
        TypeError: If it is not a function that a rank can call.

    """
    place, _, name = reference.rpartition(":")
    try:
        module = _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except ImportError as exc:
        if place.endswith(".py") and "attempted relative import with no known parent package" in str(exc):
            exc.msg = f"{exc}: a file is no part of a package: give '{_module_of(Path(place))}:{name}'"
            exc.args = (exc.msg,)
        raise
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"function {reference!r}: {place} has no function {name!r}")  # noqa: TRY004 - the reference is wrong
    return check_signature(function, evaluates=evaluates)


def _module_of(path: Path) -> str:
    """Return the name by which the file is imported as a part of its package, from the directory that contains the package."""
    package = path.parent
    while (package.parent / "__init__.py").is_file():
        package = package.parent
    return ".".join(path.relative_to(package.parent).with_suffix("").parts)


def takes_config(function: TrainFunction) -> bool:
    """Return whether `function` takes its configuration as an argument."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function in C without a signature
        return True
    return _can_bind(signature, {})


def needs_no_argument(function: TrainFunction) -> bool:
    """Return whether `function` can be called without an argument."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function in C without a signature
        return False
    return _can_bind(signature)


def takes_checkpoint(function: TrainFunction) -> bool:
    """Return whether `function` has the form of Ray's `ValidationFn`: the checkpoint, and the config's items by name."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # a function in C without a signature
        return False
    return next(iter(parameters), None) == "checkpoint"


def check_signature(function: TrainFunction, *, evaluates: bool = False) -> TrainFunction:
    """Return `function` if calling it with one argument, or with none, runs it to its end.

    Args:
        function: The function.
        evaluates: Whether it evaluates a checkpoint, which it may take as its first argument.

    Raises:
        TypeError: If it is a class, a coroutine or a generator function, or needs more arguments.

    """
    name = name_of(function)
    if inspect.isclass(function):
        raise TypeError(f"function {name} is a class: give a function")
    if any(is_lazy(function) or is_lazy(function.__call__) for is_lazy in _LAZY):  # type: ignore[operator]  # any callable has it
        raise TypeError(f"function {name} is async or a generator, so calling it would run nothing: give a plain function")
    if evaluates and takes_checkpoint(function):
        return function
    if not takes_config(function) and not _can_bind(inspect.signature(function)):
        other = "; or the checkpoint, as a first argument of that name, and the config's items" if evaluates else ""
        raise TypeError(f"function {name}{inspect.signature(function)} must take one argument, the config, or none{other}")
    return function


def _can_bind(signature: inspect.Signature, *arguments: object) -> bool:
    try:
        signature.bind(*arguments)
    except TypeError:
        return False
    return True


def is_importable(module: ModuleType) -> bool:
    """Return whether a new interpreter with the same path imports the same file under the name of `module`."""
    found = _find_afresh(module.__name__)
    if found is None:
        return False
    return found.origin in ("built-in", "frozen") or found.origin == getattr(module, "__file__", None)


def _find_afresh(name: str) -> ModuleSpec | None:
    """Find a module as a new interpreter would, without an import of its packages; None where they must be imported for that.

    `importlib.util.find_spec` would answer from `sys.modules`.
    """
    spec: ModuleSpec | None = None
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        full = ".".join(parts[:depth])
        path = None if spec is None else spec.submodule_search_locations
        found = (finder.find_spec(full, path, None) for finder in sys.meta_path if hasattr(finder, "find_spec"))
        try:
            spec = next((candidate for candidate in found if candidate is not None), None)
        except KeyError:  # a namespace package in another one, whose path is looked up among the imported modules
            return None
        if spec is None:
            return None
    return spec


def _load_file(path: Path) -> ModuleType:
    """Run the file as a module of its name, with its directory first on the search path, as `python path` does.

    A file that is named as a module of the standard library (queue.py) must not replace that: its module gets another name, and
    its directory comes after the standard library.
    """
    directory, name = str(path.parent), path.stem
    if name in sys.stdlib_module_names or name == "__main__":
        name = f"training_file_{name}"
        sys.path[:] = [entry for entry in sys.path if not _is_same_directory(entry, directory)]
        sys.path.insert(_end_of_standard_library(), directory)
    else:
        sys.path.insert(0, directory)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # needed to pickle what the file defines
    cloudpickle.register_pickle_by_value(module)  # the leader unpickles what the function returns or raises
    spec.loader.exec_module(module)
    return module


def _is_same_directory(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def _end_of_standard_library() -> int:
    directories = standard_library()
    return max((number + 1 for number, entry in enumerate(sys.path) if entry in directories), default=len(sys.path))
