"""Names of a package that are imported when they are used."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def lazy_names(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return the `__getattr__` and `__dir__` of a package whose names are imported when they are used.

    An editor completes those that are not imported yet, too, and Prefect registers the blocks among them.

    Args:
        package: The package's `__name__`.
        modules: The module of each name; relative to the package if it begins with a dot.

    """

    def find(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules[name], package), name)

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return find, names
