"""The plain values of a state: compared by digest, kept as they were, written as torch.load(weights_only=True) reads them."""

import codecs
import io
import marshal
import pickle
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import xxhash
from prefect_torch.ckpt.state.plan import Step
from prefect_torch.ckpt.state.staging.buffer import memory_of
from prefect_torch.ckpt.state.staging.device_copies import copied_to_host, sums_of_words

from .flatten import Leaf
from .tensors import DTYPE_NAMES, why_unstorable

_PLAIN = {type(None), bool, float, str}
# Torch's message without its advice, in either of its forms: for a type that it does not allow, and for a blocked module.
_UNREADABLE = re.compile(r"(?:WeightsUnpickler error:\s*|^(?=Trying to load ))(.+?)(?: was not an allowed|\n|$)", re.MULTILINE)
_LONGEST_INT_BITS = 2040  # torch.load(weights_only=True) does not read longer ones


@dataclass(frozen=True, slots=True)
class Value:
    """One value as it was when it was reported.

    Attributes:
        name: Its name.
        path: Its path in the state.
        digest: Equal on two ranks if their values and forms are.
        encode: Returns its bytes from torch.save.
        tensor: The dtype and shape of a small tensor, else None.

    """

    name: str
    path: tuple[Step, ...]
    digest: str
    encode: Callable[[], bytes]
    tensor: tuple[str, tuple[int, ...]] | None = None


def capture_values(leaves: Sequence[Leaf]) -> list[Value]:
    """Return the values of `leaves` as they are now.

    Costs microseconds for numbers, strings and containers of them, one copy for all tensors of a device, and one for each
    tensor in a tuple, all of which are encoded later; other values are encoded and read back immediately.

    Raises:
        ValueError: Naming the leaf, if torch.load(weights_only=True) could not read it.

    """
    remote = [place for place, leaf in enumerate(leaves) if isinstance(leaf.value, torch.Tensor) and not leaf.value.is_cpu]
    kept = dict(zip(remote, copied_to_host([leaves[place].value for place in remote]), strict=True))
    return [_captured(leaf, kept.get(place)) for place, leaf in enumerate(leaves)]


def _captured(leaf: Leaf, kept: torch.Tensor | None) -> Value:
    try:
        return _capture_value(leaf, kept)
    except RecursionError as exc:
        raise ValueError(f"{leaf.name!r} in the state holds itself, or is nested too deeply to be stored") from exc


def _capture_value(leaf: Leaf, kept: torch.Tensor | None) -> Value:
    value = leaf.value
    if isinstance(value, torch.Tensor):
        return _hold_tensor(leaf, value.detach().to("cpu", copy=True).contiguous() if kept is None else kept)
    if _is_marshalled(value):
        marshalled = _marshalled(value)
        return Value(leaf.name, leaf.path, _digest(leaf, marshalled), lambda: _saved(marshal.loads(marshalled)))  # noqa: S302 - our own bytes
    if _is_marshalled(_mapped(value, _nothing)):
        return _hold_tensors(leaf)
    saved = _checked(leaf)
    return Value(leaf.name, leaf.path, _digest(leaf, saved), lambda: saved)


def read_value(data: bytes) -> Any:
    """Return the value that `Value.encode` encoded."""
    # Only files are mapped, which may be the user's default.
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True, mmap=False)


def why_unreadable(exc: Exception) -> str:
    """Return the reason in an exception of `read_value`, without torch's advice to load the file unsafely."""
    found = _UNREADABLE.search(str(exc))
    reason = str(exc).partition("\n")[0] if found is None else found[1]
    return f"{type(exc).__name__}: {reason}"


def digest_tensors(leaves: Sequence[Leaf]) -> dict[str, str]:
    """Return a digest of each leaf's tensor by the leaf's name: of its form, dtype, shape and bytes.

    Digests are equal on two ranks if these are and both tensors are on CPUs, or both on devices. Each tensor is read once, on
    its own device, and one copy for each device brings the sums of its tensors to the host.
    """
    remote = [leaf for leaf in leaves if not leaf.value.is_cpu]
    sums = copied_to_host([sums_of_words(leaf.value.detach()) for leaf in remote])
    digests = {leaf.name: _digest_tensor(leaf, leaf.value) for leaf in leaves if leaf.value.is_cpu}
    for leaf, of_leaf in zip(remote, sums, strict=True):
        digests[leaf.name] = "multilinear:" + _digest_bytes(leaf, of_leaf)
    return digests


def _digest_tensor(leaf: Leaf, tensor: torch.Tensor) -> str:
    return _digest_bytes(leaf, tensor.detach().resolve_conj().resolve_neg().contiguous())


def _digest_bytes(leaf: Leaf, data: torch.Tensor) -> str:
    digest = xxhash.xxh3_64(f"{leaf.form} {leaf.value.dtype} {tuple(leaf.value.shape)}".encode())
    digest.update(memory_of(data))
    return digest.hexdigest()


def _hold_tensor(leaf: Leaf, kept: torch.Tensor) -> Value:
    form = DTYPE_NAMES[kept.dtype], tuple(kept.shape)
    return Value(leaf.name, leaf.path, _digest_tensor(leaf, kept), lambda: _saved(kept), form)


def _hold_tensors(leaf: Leaf) -> Value:
    """Return a value of tensors in containers of numbers and strings, with a copy of each tensor, to be encoded later."""
    copies: dict[int, torch.Tensor] = {}  # one that is there twice is copied once

    def copied_once(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = _copied(tensor)
        return copies[id(tensor)]

    held = _mapped(leaf.value, copied_once)
    numbers = {id(copy): number for number, copy in enumerate(copies.values())}
    form = _mapped(held, lambda it: f"{numbers[id(it)]} {it.dtype} {tuple(it.shape)} {it.stride()} {it.requires_grad}".encode())
    digest = xxhash.xxh3_64(_marshalled(form))
    for copy in copies.values():
        digest.update(memory_of(copy.detach().contiguous()))
    return Value(leaf.name, leaf.path, leaf.form + digest.hexdigest(), lambda: _saved(held))


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.detach().resolve_conj().resolve_neg().to("cpu", copy=True)
    return copy.requires_grad_(tensor.requires_grad)


def _nothing(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return nothing for a tensor that can be copied and read back as any other; else the tensor."""
    return None if tensor.dtype in DTYPE_NAMES and why_unstorable(tensor) is None else tensor


def _is_marshalled(value: Any) -> bool:
    kind = type(value)
    if kind in _PLAIN:
        return True
    if kind is int:
        return bool(value.bit_length() < _LONGEST_INT_BITS)
    if kind in (list, tuple, set):
        return all(_is_marshalled(item) for item in value)
    return kind is dict and all(_is_marshalled(key) and _is_marshalled(item) for key, item in value.items())


def _marshalled(value: Any) -> bytes:
    try:
        return marshal.dumps(value, 2)  # without references: equal values are equal bytes
    except ValueError as exc:  # for thousands of levels
        raise RecursionError(str(exc)) from exc


def _checked(leaf: Leaf) -> bytes:
    try:
        value = _mapped(leaf.value, _compact)
        try:
            saved = _saved(value)
            read_value(saved)
        except pickle.UnpicklingError:
            saved = _saved(value, _EmptyBytes)
            read_value(saved)
    except RecursionError:
        raise
    except Exception as exc:
        raise ValueError(
            f"{leaf.name!r} in the state is a {type(leaf.value).__name__} that torch.load(weights_only=True) cannot read: give "
            "tensors, Python's own numbers and strings, containers of them, an object with state_dict(), or a random generator "
            "outside of lists, tuples and the states of objects "
            f"({why_unreadable(exc)})"
        ) from exc
    return saved


def _mapped(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Return `value` in new containers, with what `change` returns for each tensor in them.

    A defaultdict becomes a dict, since torch.load does not allow its class.
    """
    kind = type(value)
    if kind is torch.Tensor and value.layout is torch.strided:
        return change(value)
    if kind in (list, tuple):
        return kind(_mapped(item, change) for item in value)
    if kind in (dict, defaultdict):
        return {key: _mapped(item, change) for key, item in value.items()}
    return {*value} if kind is set else value


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor that is a part of larger memory, all of which torch.save would write.

    Tensors of devices are copied to the host: torch.save writes the device's number, which is another one on each rank.
    """
    is_part = not tensor.is_cpu or tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
    return _copied(tensor) if is_part else tensor


def _saved(value: Any, how: Any = pickle) -> bytes:
    archive = io.BytesIO()
    torch.save(value, archive, how)
    return archive.getvalue()


class _EmptyBytes:
    """A pickle module that writes `b""` like other bytes; Python's writes a call of `bytes`, which torch.load forbids."""

    class Pickler(pickle._Pickler):  # noqa: SLF001 - the pickler in C cannot be changed
        """The pickler in Python, which takes ten times as long as the one in C."""

        def _save_bytes(self, value: bytes) -> None:
            self.save_reduce(codecs.encode, (value.decode("latin-1"), "latin-1"), obj=value)  # type: ignore[attr-defined]  # not in its stub

        dispatch: ClassVar[dict[Any, Any]] = {**pickle._Pickler.dispatch, bytes: _save_bytes}  # noqa: SLF001 - the pickler in C cannot be changed


def _digest(leaf: Leaf, data: bytes) -> str:
    return leaf.form + xxhash.xxh3_64_hexdigest(data)
