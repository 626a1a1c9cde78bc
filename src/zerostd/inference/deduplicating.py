"""Store equal frozen parameters of several models once: `zerostd.deduplicate`.

flats off the device -> equal length and checksum -> equal bytes -> one memory, copied when it is written to

For preference training, whose reference model begins as the policy, for adapters on several copies of one base, and for
copies of a model that serve different callers. Each rank decides about its own shards.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import ExitStack

import torch
from torch import nn

from zerostd.engine.runtime import Runtime, runtime_of
from zerostd.errors import MisuseError
from zerostd.parameters import Flat
from zerostd.policy import Tier
from zerostd.tiers.shared_tensors import SharedTensor, are_equal, checksum


@torch.no_grad()
def deduplicate(*models: nn.Module) -> int:
    """Keep equal frozen parameters of prepared or dispatched models once, between models or inside one.

    Buffers of frozen parameters on the host or on disk, one for each group, are compared: a checksum finds candidates,
    and then all bytes are compared. Equal buffers share memory from then on. A write to a shared parameter copies its
    group's buffer first, so the other models keep their values. Memory is freed with the last model that uses it.
    Call it again after a load. Parameters that train, and parameters on the device, are never shared.

    Each rank compares its own shards. Models share if their groups, dtypes, devices and tiers are the same, and the
    disk's directory; use the same `groups=` for all of them. Each model still counts as a whole for its own budget.

    Args:
        models: Modules that prepare or dispatch was called on, in this process.

    Returns:
        The bytes that were freed on this rank. `zerostd.memory(model).shared` has the bytes that a model shares.

    Raises:
        MisuseError: A forward or a backward of a model is under way, or it sleeps.
    """
    if not models:
        raise MisuseError("zerostd.deduplicate() needs models: zerostd.deduplicate(policy, reference)")
    runtimes = list(dict.fromkeys(runtime_of(model, "deduplicate") for model in models))
    with ExitStack() as turns:
        for runtime in sorted(runtimes, key=id):  # in one order in all threads
            turns.enter_context(runtime.turn)
            _wait(runtime)
        candidates = [flat for runtime in runtimes for flat in _frozen_flats(runtime)]
        candidates.sort(key=_num_holders, reverse=True)  # a memory with many holders is joined, not left
        kept: dict[Hashable, list[Flat]] = {}
        num_freed = 0
        for flat in candidates:
            same = kept.setdefault(_key(flat), [])
            if any(_is_same_memory(flat, other) for other in same):
                continue
            equal = next((other for other in same if are_equal(flat.rest, other.rest)), None)
            if equal is None:
                same.append(flat)
                continue
            is_alone = _num_holders(flat) == 1
            _share(equal, flat)
            num_freed += flat.rest.num_bytes if is_alone and isinstance(flat.rest, SharedTensor) else 0
        return num_freed


def _wait(runtime: Runtime) -> None:
    """Return when nobody reads or writes parameters at their home."""
    if runtime.backward.is_running or runtime.hooks.is_running:
        raise MisuseError("zerostd.deduplicate inside a forward or a backward pass: call it when that has returned")
    runtime.finish_updates()
    runtime.gatherer.wait_all(on_host=True)


def _frozen_flats(runtime: Runtime) -> Iterator[Flat]:
    """Yield the flats that may be shared."""
    for flat in runtime.flats:
        is_kept = flat.rest.tier is not Tier.DEVICE and flat.rest.numel > 0
        has_moved = flat.rest.extent is not None and flat.rest.extent.memory is not None  # its disk has failed
        if flat.gradient is None and not flat.state_shards and is_kept and not has_moved:
            yield flat


def _key(flat: Flat) -> Hashable:
    """Return a key that is equal for flats that may have equal bytes."""
    rest = flat.rest
    item_bytes = 0 if rest.extent is None else rest.extent.item_bytes
    path = None if rest.disk is None else rest.disk.path
    return rest.tier, path, item_bytes, flat.allocator.device, rest.dtype, rest.numel, checksum(rest)


def _num_holders(flat: Flat) -> int:
    return flat.rest.holders.num if isinstance(flat.rest, SharedTensor) else 1


def _is_same_memory(flat: Flat, other: Flat) -> bool:
    if flat.rest.tensor is not None and other.rest.tensor is not None:
        return flat.rest.tensor.data_ptr() == other.rest.tensor.data_ptr()
    return flat.rest.extent is other.rest.extent


def _share(holder: Flat, other: Flat) -> None:
    """Keep another flat in the memory of one with the same bytes, until one of them is written to."""
    holder.rest = SharedTensor.of(holder.rest, holder.allocator, holder.layout.intervals[0].name)
    other.rest = holder.rest.shared_with(other.rest, other.allocator, other.layout.intervals[0].name)
