"""Files of the user's that are imported instead of a package, such as a torch.py beside the program; imports no package."""

import sysconfig
from importlib.machinery import PathFinder


def check_is_package(name: str) -> None:
    """Raise if a file would be imported instead of the package `name`, but not if neither exists. Imports nothing.

    Raises:
        ImportError: Naming the file.

    """
    spec = PathFinder.find_spec(name)  # not that of `sys.modules`, in which a test may have put anything
    if spec is not None and spec.submodule_search_locations is None:
        raise ImportError(f"{spec.origin} is imported instead of the package {name!r}: rename it", name=name, path=spec.origin)


def standard_library() -> set[str]:
    """Return the directories of the search path that contain the standard library."""
    return {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), sysconfig.get_config_var("DESTSHARED")}
