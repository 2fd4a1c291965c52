"""Pickles that a rank hands to the flow's process, which must not touch a GPU: a tensor on it would keep a context there."""

import io
import sys
from typing import Any

from prefect_torch.tasks.rank.user_code.code_pickle import CodePickler


def dump_on_cpu(value: object) -> bytes:
    """Return `value` pickled, with a copy on the CPU in the place of every tensor on another device."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


class _Pickler(CodePickler):
    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")  # no module, no tensor
        if torch is not None:
            if type(obj) is torch.Tensor and _is_elsewhere(obj):
                return obj.detach().cpu().requires_grad_(obj.requires_grad).__reduce_ex__(self.proto)
            # The tensor of a parameter or another subclass, or the tensor's storage, is pickled here in turn.
            if type(obj) is torch.TypedStorage and _is_elsewhere(untyped := obj._untyped_storage):  # noqa: SLF001 - else it warns
                on_cpu = torch.TypedStorage(wrap_storage=untyped.cpu(), dtype=obj.dtype, _internal=True)
                return on_cpu.__reduce_ex__(self.proto)
        return super().reducer_override(obj)


def _is_elsewhere(data: Any) -> bool:
    return data.device.type not in {"cpu", "meta"}
