"""What a disk can do to a training: each scenario trains a small model whose states and parameters are on disk, with a
fault in the middle. Run by test_disk.py in a process of its own, under the shim; prints what came of each as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import zerostd
from faults.io_shim import EIO, ENOSPC, fault
from zerostd.monitoring.ledger import Ledger
from zerostd.policy import Kind, Tier
from zerostd.tiers.disk import Disk
from zerostd.tiers.extents import Extent, Fallback
from zerostd.tiers.host import Host

FOLDER = sys.argv[1]
HOST_BYTES = 221_536  # of host memory that the model takes when all is well
EVERYTHING = zerostd.Placement(parameters="disk", optimizer_states="disk")
GRADIENTS = zerostd.Placement(gradients="disk", optimizer_states="host")
STATES = zerostd.Placement(optimizer_states="disk")


def prepared(
    placement: zerostd.Placement = EVERYTHING, precision: str | None = None, *, is_one: bool = False, **budget: Any
) -> tuple[nn.Module, Any]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(24, 96), nn.Tanh(), nn.Linear(96, 24))
    if placement is GRADIENTS:  # more of them than pass through host memory at once
        model = nn.Sequential(*(nn.Sequential(nn.Linear(24, 96), nn.Tanh(), nn.Linear(96, 24)) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    disk = zerostd.Budget(disk_path=FOLDER, **budget)
    if is_one:  # group: nothing else is read or written between its update and what follows
        model = nn.Sequential(model)
    groups = [name for name, module in model.named_children() if any(True for _ in module.parameters())]
    return zerostd.prepare(model, optimizer, placement=placement, budget=disk, groups=groups, precision=precision)


def train(model: nn.Module, optimizer: Any, steps: int, *, seed: int = 0, waits: bool = True) -> list[float]:
    losses = []
    for step in range(steps):
        x = torch.randn(4, 24, generator=torch.Generator().manual_seed(seed + step))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if waits:
        optimizer.synchronize()
    return losses


def edited(placement: zerostd.Placement, precision: str, *, is_slow: bool) -> dict[str, Any]:
    """Write to all parameters behind each step, while the step's states are on their way to a slow drive or not."""
    model, optimizer = prepared(placement, precision, is_one=True)
    result: dict[str, Any] = {"losses": []}
    runtime = model.__dict__["_zerostd"]
    (shard,) = (shard for group in runtime.groups for flat in group.flats for shard in flat.state_shards)
    # The writes of the first step are late, and not those behind it, which could overtake them.
    num_writes = sum(tensor.tier is Tier.DISK for tensor in shard.tensors.values())
    with fault(FOLDER, "write", "delay", 150, count=num_writes) if is_slow else contextlib.nullcontext():
        for step in range(3):
            result["losses"] += train(model, optimizer, 1, seed=step, waits=False)
            with torch.no_grad():
                for parameter in model.parameters():
                    torch.mul(parameter, 0.5, out=parameter)
    states = optimizer.state_dict()["state"].values()  # masters, too, where parameters are rounded
    values = [value for named in states for value in named.values()] + list(zerostd.full_state_dict(model).values())
    result["values"] = [torch.as_tensor(value).double().sum().item() for value in values]
    result["retries"] = runtime.ledger.retries.counts
    runtime.resources.allocator.close()
    return result


def extents(model: nn.Module) -> list[Extent]:
    return sorted(model.__dict__["_zerostd"].resources.allocator.disk._extents, key=lambda extent: extent.file)


def flip(extent: Extent, offset: int) -> None:
    """Change a byte of a file behind the library's back."""
    with open(f"/proc/self/fd/{extent.scratch_file.fd}", "r+b") as file:
        file.seek(extent.start + offset)
        byte = file.read(1)[0]
        file.seek(extent.start + offset)
        file.write(bytes([byte ^ 1]))
        file.flush()
        os.fsync(file.fileno())


def run(damage: Callable[[nn.Module], Any], **options: Any) -> dict[str, Any]:
    """Train 2 steps, then 2 more after or under a fault; return what happened."""
    model, optimizer = prepared(**options)
    result: dict[str, Any] = {"losses": train(model, optimizer, 2), "error": None, "type": None}
    try:
        given = damage(model)
        if given is None:
            result["losses"] += train(model, optimizer, 2)
        else:
            with given as rule:
                result["losses"] += train(model, optimizer, 2)
            result["taken"] = rule.taken
    except Exception as error:
        result["error"] = str(error)
        result["type"] = type(error).__name__
    ledger = model.__dict__["_zerostd"].ledger
    result["retries"] = ledger.retries.counts
    result["text"] = str(zerostd.memory(model))
    result["on_disk"] = sum(size for (tier, _), size in ledger.now.items() if tier is Tier.DISK)
    result["extents"] = [[extent.file, extent.label] for extent in extents(model)]
    model.__dict__["_zerostd"].resources.allocator.close()
    return result


def unreadable_page() -> dict[str, Any]:
    """Write the first half of a page that cannot be read, with room for it in host memory; then on a healthy drive."""
    ledger = Ledger()
    host = Host(torch.device("cpu"), ledger, num_threads=1)
    disk = Disk(FOLDER, ledger, fallback=Fallback(host, ledger))
    extent = disk.allocate(2 * 4096, Kind.OPTIMIZER_STATES, "weight")
    page = host.allocate(4096, Kind.BUFFERS)
    disk.write(extent, 0, page.fill_(1)).wait()
    result: dict[str, Any] = {"error": None}
    with fault(FOLDER, "read", "fail", EIO):
        try:
            disk.write(extent, 0, page[:2048].fill_(2)).wait()
        except zerostd.StorageError as error:
            result["error"] = str(error)
    result["is_on_disk"] = extent.memory is None
    disk.write(extent, 0, page[:2048]).wait()
    disk.read(extent, 0, page).wait()
    result["bytes"] = [int(page[:2048].unique()), int(page[2048:].unique())]
    disk.close()
    return result


def damage_first(kind: str, offset: int) -> Callable[[nn.Module], None]:
    def damage(model: nn.Module) -> None:
        flip(next(extent for extent in extents(model) if extent.kind.value == kind), offset)

    return damage


def cut(model: nn.Module) -> None:
    os.ftruncate(extents(model)[0].scratch_file.fd, 4096)


def of_gradients(*rule: Any, **when: int) -> Callable[[], dict[str, Any]]:
    """Gradients on disk, which are written in every pass and read in every step."""
    return lambda: run(lambda model: fault(FOLDER, *rule, **when) if rule else None, placement=GRADIENTS)


SCENARIOS: dict[str, Callable[[], dict[str, Any]]] = {
    "nothing": lambda: run(lambda model: None),
    "byte of states": lambda: run(damage_first("optimizer_states", 4096 + 17)),
    "byte of parameters": lambda: run(damage_first("parameters", 3)),
    "cut file": lambda: run(cut),
    "EIO once, reading": lambda: run(lambda model: fault(FOLDER, "read", "fail", EIO, first=2, count=1)),
    "EIO twice, writing": lambda: run(lambda model: fault(FOLDER, "write", "fail", EIO, first=3, count=2)),
    "EIO for ever, reading": lambda: run(lambda model: fault(FOLDER, "read", "fail", EIO, first=2)),
    "EIO for ever, writing": lambda: run(lambda model: fault(FOLDER, "write", "fail", EIO)),
    "ENOSPC for ever": lambda: run(lambda model: fault(FOLDER, "write", "fail", ENOSPC, first=5)),
    "ENOSPC, no room on the host": lambda: run(
        lambda model: fault(FOLDER, "write", "fail", ENOSPC), host=HOST_BYTES + 4096
    ),
    "short reads": lambda: run(lambda model: fault(FOLDER, "read", "short")),
    "short writes": lambda: run(lambda model: fault(FOLDER, "write", "short")),
    "flipped once, reading": lambda: run(lambda model: fault(FOLDER, "read", "flip", first=4, count=1)),
    "flipped, writing": lambda: run(lambda model: fault(FOLDER, "write", "flip", first=4, count=1)),
    "page of a write cannot be read": unreadable_page,
    "slow": lambda: run(lambda model: fault(FOLDER, "read", "delay", 20)),
    **{
        f"{name}, {precision}, {drive}": partial(edited, placement, precision, is_slow=drive == "slow")
        for name, placement in {"states": STATES, "everything": EVERYTHING}.items()
        for precision in ("fp32", "bf16")
        for drive in ("slow", "fast")
    },
    "gradients: nothing": of_gradients(),
    "gradients: EIO once, reading": of_gradients("read", "fail", EIO, count=1),
    "gradients: EIO twice, writing": of_gradients("write", "fail", EIO, count=2),
    "gradients: flipped once, reading": of_gradients("read", "flip", count=1),
    "gradients: flipped, writing": of_gradients("write", "flip", count=1),
    "gradients: EIO for ever, reading": of_gradients("read", "fail", EIO),
    "gradients: EIO for ever, writing": of_gradients("write", "fail", EIO),
    "gradients: ENOSPC for ever": of_gradients("write", "fail", ENOSPC, first=3),
}

if __name__ == "__main__":
    warnings.simplefilter("ignore", RuntimeWarning)
    torch.set_num_threads(1)
    print(json.dumps({name: scenario() for name, scenario in SCENARIOS.items()}))
