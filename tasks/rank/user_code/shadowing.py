"""Files of the user's that are imported in the place of a package, such as a torch.py beside the program."""

from importlib.machinery import PathFinder


def check_is_package(name: str) -> None:
    """Raise if a file would be imported instead of the package `name`, but not if neither exists. Imports nothing.

    Raises:
        ImportError: Naming the file.

    """
    spec = PathFinder.find_spec(name)  # not that of `sys.modules`, in which a test may have put anything
    if spec is not None and spec.submodule_search_locations is None:
        raise ImportError(f"{spec.origin} is imported instead of the package {name!r}: rename it", name=name, path=spec.origin)
