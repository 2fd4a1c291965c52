"""Modules under the names that they had in version 0.1: what was pickled then, or names them in a deployment, still loads."""

import importlib
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any, cast

# Only modules whose classes and functions are pickled by reference: public ones, and those inside their pickles.
MOVED = {
    "prefect_torch.ckpt.history": "prefect_torch.ckpt.runs.history",
    "prefect_torch.ckpt.manifest": "prefect_torch.ckpt.runs.manifest",
    "prefect_torch.ckpt.rank_local": "prefect_torch.ckpt.state.rank_local",
    "prefect_torch.ckpt.retention": "prefect_torch.ckpt.runs.retention",
    "prefect_torch.ckpt.storage.blocks": "prefect_torch.ckpt.blocks",
    "prefect_torch.ckpt.store": "prefect_torch.ckpt.checkpoint_store",
    "prefect_torch.tasks.checkpoint_ref": "prefect_torch.tasks.rank.checkpoint_ref",
    "prefect_torch.tasks.config": "prefect_torch.tasks.options.config",
    "prefect_torch.tasks.data_loading": "prefect_torch.tasks.prepare.data_loader",
    "prefect_torch.tasks.errors": "prefect_torch.tasks.rank.errors",
    "prefect_torch.tasks.parallel_model": "prefect_torch.tasks.prepare.model",
    "prefect_torch.tasks.rank_device": "prefect_torch.tasks.prepare.device",
}


class MovedModules:
    """Finds a module of version 0.1 under its old name; asked only for names that nobody else finds.

    A finder and a loader without their base classes: importlib.abc would be a tenth of what importing `ckpt` costs.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the old module's specification; None for any other name."""
        del path, target
        return spec_from_loader(fullname, cast("Any", self)) if fullname in MOVED else None

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave the creation of the module to Python."""

    def exec_module(self, module: ModuleType) -> None:
        """Give `module` the attributes of the one that has taken its place."""
        present = importlib.import_module(MOVED[module.__name__])
        module.__getattr__ = lambda name: getattr(present, name)  # type: ignore[method-assign]
