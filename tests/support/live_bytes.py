"""The bytes that operators have made and somebody still holds, autograd included."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Watches the storages that operators return inside the context. `peak` is the most that was alive after one."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}  # by address of the storage
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs)) if _is_plain(tensor)}
        for tensor in filter(_is_plain, tree_leaves(output)):
            storage = tensor.untyped_storage()
            if storage._cdata not in given:  # else a view, or written in place
                self._seen[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.now())
        return output

    def now(self) -> int:
        self._seen = {address: pair for address, pair in self._seen.items() if not pair[0].expired()}
        return sum(num_bytes for _, num_bytes in self._seen.values())


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided
