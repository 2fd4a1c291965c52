"""The states of a rank's random generators as one value of its state."""

import random
import sys
from collections.abc import Mapping
from typing import Any

from prefect_torch.ckpt.errors import StateMismatchError

from .rank_local import RankLocal


class RandomState(RankLocal):
    """Hold each rank's random generators in a state: `state={"model": model, "random": RandomState()}`.

    A report stores them as they are when it is called; a load sets them as its last action. These are Python's `random`,
    NumPy's global generator, torch's for the CPU, and that of the rank's GPU (torch's accelerator) once it is in use. A resumed
    training then draws the numbers that an uninterrupted one would have drawn. Generators that a program made itself (a
    `torch.Generator`, a `numpy.random.Generator`, a `numpy.random.RandomState`, a `random.Random`) are not among them, and go
    into a state as they are: `state={"generator": generator}`. They are stored and set in the same way; `RankLocal(generator)`
    keeps equal ones apart.

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


def is_generator(value: object) -> bool:
    """Return whether `value` is a random generator of Python, torch or NumPy with a state that can be set."""
    import torch  # noqa: PLC0415 - importing ckpt must not import torch

    if isinstance(value, (torch.Generator, random.Random)):
        return not isinstance(value, random.SystemRandom)
    numpy_random = getattr(sys.modules.get("numpy"), "random", None)
    return numpy_random is not None and isinstance(value, (numpy_random.Generator, numpy_random.RandomState))


def generator_state(generator: Any) -> Any:
    """Return a copy of the state of a generator: a tensor, a tuple or a dict."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    # A numpy.random.RandomState has a dict only on request; its tuple fits the Mersenne Twister alone.
    return generator.get_state(legacy=False) if hasattr(generator, "random_sample") else generator.get_state()


def set_generator(generator: Any, state: Any, name: str) -> None:
    """Set a generator to a state of `generator_state`.

    Raises:
        StateMismatchError: Naming `name`, if it is the state of another kind of generator.

    """
    try:
        if isinstance(generator, random.Random):
            generator.setstate(state)
        elif hasattr(generator, "bit_generator"):
            generator.bit_generator.state = state
        else:
            generator.set_state(state)
    except (TypeError, ValueError, RuntimeError, KeyError) as exc:
        kind = f"{type(generator).__module__}.{type(generator).__qualname__}"
        raise StateMismatchError(f"{name!r} in the checkpoint is not the state of a {kind} like the one to set: {exc}") from exc


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
