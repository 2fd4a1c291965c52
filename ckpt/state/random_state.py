"""The states of a rank's random generators as one value of its state."""

import random
from collections.abc import Mapping
from typing import Any

from .rank_local import RankLocal


class RandomState(RankLocal):
    """Hold each rank's random generators in a state: `state={"model": model, "random": RandomState()}`.

    A report stores them as they are when it is called; a load sets them as its last action. These are Python's `random`,
    NumPy's global generator, torch's for the CPU, and that of the rank's GPU (torch's accelerator) once it is in use. A resumed
    training then draws the numbers that an uninterrupted one would have drawn. Generators that a program made itself are not
    among them: `torch.Generator.get_state()` is a tensor, `numpy.random.Generator.bit_generator.state` a dict, and both can be
    in a state.

    It is each rank's own, like a `RankLocal`, and loads on the same number of ranks. On another number, the function
    `load_state(..., rank_local=)` is called for each part with the values of all former ranks; without that function, the load
    raises RankLocalStateError. If it is not in the state to load into, the generators stay as the new ranks have seeded them.
    """

    def __init__(self) -> None:
        super().__init__(ProcessGenerators())


class ProcessGenerators:
    """The random generators of this process, which this object reads and sets; it holds nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all states, by generator: NumPy's only if it is installed, a device's only if it is in use."""
        import torch  # noqa: PLC0415 - importing ckpt must not import torch

        states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        if (numpy := _numpy()) is not None:
            states["numpy"] = numpy.random.get_state(legacy=False)
        if (device := _device()) is not None and _is_in_use(device):
            states[device.type] = torch.get_device_module(device).get_rng_state()
        return states

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Set the generators of `states`, except for those that this machine does not have, such as a GPU's."""
        import torch  # noqa: PLC0415 - importing ckpt must not import torch

        random.setstate(states["python"])
        torch.set_rng_state(states["torch"])
        if "numpy" in states and (numpy := _numpy()) is not None:
            numpy.random.set_state(states["numpy"])
        if (device := _device()) is not None and states.get(device.type) is not None:
            torch.get_device_module(device).set_rng_state(states[device.type])


def _device() -> Any:
    """Return this machine's accelerator, such as "cuda", whose module uses the current device; None if there is none."""
    import torch  # noqa: PLC0415 - importing ckpt must not import torch

    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def _is_in_use(device: Any) -> bool:
    """Return whether this process may have drawn numbers on `device`: reading an unused device's state creates a context."""
    import torch  # noqa: PLC0415 - importing ckpt must not import torch

    module = torch.get_device_module(device)
    return bool(module.is_initialized()) if hasattr(module, "is_initialized") else True


def _numpy() -> Any:
    try:
        import numpy as np  # noqa: PLC0415 - torch works without NumPy
    except ImportError:
        return None
    return np
