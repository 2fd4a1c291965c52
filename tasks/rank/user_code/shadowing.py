"""Files of the user's that are imported instead of a package, such as a torch.py or torch/ beside the program; imports none."""

import sysconfig
from importlib.machinery import PathFinder

_PARTS = {"torch": "distributed", "numpy": "linalg", "prefect": "flows"}  # of each package, one that it has in every version


def check_is_package(name: str) -> None:
    """Raise if a file or directory would be imported instead of the package `name`, but not if neither exists. Imports nothing.

    Raises:
        ImportError: Naming the file or directory.

    """
    spec = PathFinder.find_spec(name)  # not that of `sys.modules`, in which a test may have put anything
    if spec is None or spec.origin is None:  # a directory without an __init__.py is imported only if there is no package
        return
    folders = spec.submodule_search_locations
    if folders is None or PathFinder.find_spec(f"{name}.{_PARTS[name]}", folders) is None:
        place = spec.origin if folders is None else folders[0]
        raise ImportError(f"{place} is imported instead of the package {name!r}: rename it", name=name, path=spec.origin)


def standard_library() -> set[str]:
    """Return the directories of the search path that contain the standard library."""
    return {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), sysconfig.get_config_var("DESTSHARED")}
