"""Prefect's own server as a library of this process: acted on when it is imported, since with a remote API it never is."""

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
    """Call `act` with the module of Prefect's embedded server as soon as anybody imports it, or now if it has been.

    Importing it here would cost every process a second, and fail where only a remote API is used and the server's
    libraries do not fit. Where they do not fit and it is wanted, the import raises an ImportError that says what to install.
    """
    if SERVER_MODULE in sys.modules:
        act(importlib.import_module(SERVER_MODULE))  # waits for another thread that imports it
    else:
        sys.meta_path.insert(0, _Finder(act))


class _Finder(MetaPathFinder):
    """Finds the server's module as anybody would, and acts on it once it has been executed."""

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
                raise ImportError(_refusal(exc)) from exc
            self._act(module)

        spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]  # of this one loader, which is the module's own
        return spec


def _refusal(exc: Exception) -> str:
    fitting = [Requirement(line) for line in requires("prefect-torch") or () if 'extra == "server"' in line]
    installed = " and ".join(f"{one.name} {version(one.name)}" for one in fitting)
    wanted = " ".join(f"'{one.name}{one.specifier}'" for one in fitting)
    return (
        f"the server of prefect {version('prefect')}, which a flow starts unless PREFECT_API_URL names another, does not run "
        f"with {installed} ({type(exc).__name__}: {exc}): pip install {wanted}, or set PREFECT_API_URL"
    )
