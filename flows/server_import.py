"""A hook on the import of Prefect's server, which a process with a remote API never imports."""

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import requires, version
from types import ModuleType

from packaging.requirements import Requirement

SERVER_MODULE = "prefect.server.api.server"


def when_server_is_imported(act: Callable[[ModuleType], None]) -> None:
    """Call `act` with the module of Prefect's embedded server once it is imported, or immediately if it has been.

    An import here would cost every process a second, and fail where only a remote API is used and the server's libraries are
    incompatible. Where an embedded server is needed and they are, the import raises an ImportError that says what to install.
    """
    if SERVER_MODULE in sys.modules:
        act(importlib.import_module(SERVER_MODULE))  # waits for another thread that imports it
    else:
        sys.meta_path.insert(0, _Finder(act))


class _Finder(MetaPathFinder):
    """Finds the server's module as Python does, and calls `act` once the module has been executed."""

    def __init__(self, act: Callable[[ModuleType], None]) -> None:
        self._act = act

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname == SERVER_MODULE else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_act(module: ModuleType) -> None:
            try:
                execute(module)
            except Exception as exc:
                raise ImportError(_advice(exc)) from exc
            self._act(module)

        spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]  # of this one loader, which is the module's own
        return spec


def _advice(exc: Exception) -> str:
    fitting = [Requirement(line) for line in requires("prefect-torch") or () if 'extra == "server"' in line]
    installed = " and ".join(f"{one.name} {version(one.name)}" for one in fitting)
    wanted = " ".join(f"'{one.name}{one.specifier}'" for one in fitting)
    return (
        f"the server of prefect {version('prefect')}, which a flow starts unless PREFECT_API_URL names another, does not run "
        f"with {installed} ({type(exc).__name__}: {exc}): pip install {wanted}, or set PREFECT_API_URL"
    )
