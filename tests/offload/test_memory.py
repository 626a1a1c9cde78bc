"""Bytes by tier, by closed form: in the ledger, in what prepare asks for beforehand, and in the process.

Mixed-precision AdamW keeps 10 bytes for each element beside 2 of parameter and 2 of gradient: two moments, and the
lower half of an fp32 master whose upper half is the parameter. It keeps 12 where parameters are on disk or updates are
tried in a second copy: there the upper half is a column of its own. The layers here have whole pages in every dtype, so
the forms hold to the byte; other models have a page of padding for each column at most.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerostd
from support.models import MODELS
from support.side_by_side import data, seeded
from zerostd import Budget, Placement
from zerostd.policy import Kind, Tier
from zerostd.preparing import building
from zerostd.preparing.accounting import reserved
from zerostd.sharding.layout import UNIT
from zerostd.tiers.disk import Disk
from zerostd.tiers.extents import Extent

MIB = 2**20
PAGE = 4096
WIDTH, DEPTH = 64, 8
NUMEL = WIDTH * WIDTH * DEPTH
STATE_KINDS = (Kind.PARAMETERS, Kind.GRADIENTS, Kind.OPTIMIZER_STATES)


class Tower(nn.Module):
    """Equal layers of `width` squared elements."""

    def __init__(self, width: int = WIDTH, depth: int = DEPTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + 0.1 * layer(x)
        return x


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def trained(rules: Any = adamw, *, passes: int = 1, **options: Any) -> nn.Module:
    """A prepared tower after two steps."""
    model = seeded(Tower)
    model, optimizer = zerostd.prepare(model, rules(model), groups=["layers.*"], **options)
    for _ in range(2):
        for _ in range(passes):
            model(data(2, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    return model


def held(model: nn.Module, kinds: tuple[Kind, ...] = STATE_KINDS) -> Counter[tuple[Tier, Kind]]:
    """Bytes now, by tier and kind."""
    now = model.__dict__["_zerostd"].ledger.now
    return Counter({key: size for key, size in now.items() if key[1] in kinds and size})


def widths(**by_tier: tuple[float, float, float]) -> Counter[tuple[Tier, Kind]]:
    """Bytes of a tower from bytes an element: (parameters, gradients, optimizer states) by tier."""
    sizes: Counter[tuple[Tier, Kind]] = Counter()
    for tier, row in by_tier.items():
        sizes |= {(Tier(tier), kind): NUMEL * size for kind, size in zip(STATE_KINDS, row, strict=True) if size}
    return sizes


HOST = Placement(optimizer_states="host")
ALL_HOST = Placement(parameters="host", gradients="host", optimizer_states="host")
ON_DISK = Placement(parameters="disk", gradients="host", optimizer_states="disk")
ALL_DISK = Placement(parameters="disk", gradients="disk", optimizer_states="disk")
SPECULATE = Placement(optimizer_states="host", speculate=True)
QUARTERS = Placement(optimizer_states={"device": 0.25, "host": 0.5, "disk": 0.25})
HALF_MOVED = Placement(
    parameters={"device": 0.5, "host": 0.5}, gradients={"device": 0.5, "host": 0.5}, optimizer_states="host"
)


@pytest.mark.parametrize(
    ("precision", "options", "expected"),
    [
        ("bf16", {"placement": Placement()}, widths(device=(2, 2, 10))),
        ("bf16", {"placement": HOST}, widths(device=(2, 2, 0), host=(0, 0, 10))),
        ("bf16", {"placement": Placement(optimizer_states="disk")}, widths(device=(2, 2, 0), disk=(0, 0, 10))),
        ("bf16", {"placement": ALL_HOST}, widths(host=(2, 2, 10))),
        ("bf16", {"placement": ON_DISK}, widths(host=(0, 2, 0), disk=(2, 0, 12))),
        ("bf16", {"placement": ALL_DISK}, widths(disk=(2, 2, 12))),
        ("bf16", {"placement": QUARTERS}, widths(device=(2, 2, 2.5), host=(0, 0, 5), disk=(0, 0, 2.5))),
        ("bf16", {"placement": HALF_MOVED}, widths(device=(1, 1, 0), host=(1, 1, 10))),
        ("bf16", {"placement": ALL_HOST, "accumulate": 2, "passes": 2}, widths(host=(2, 4, 10))),
        (
            "bf16",
            {"placement": SPECULATE, "accumulate": 1, "max_grad_norm": 1.0},
            widths(device=(2, 2, 0), host=(0, 0, 24)),
        ),
        ("fp32", {"placement": Placement()}, widths(device=(4, 4, 8))),
        ("fp32", {"placement": HOST}, widths(device=(4, 4, 0), host=(0, 0, 12))),
        ("fp32", {"placement": ALL_HOST}, widths(host=(4, 4, 8))),
        ("fp32", {"placement": Placement(parameters="host")}, widths(device=(0, 4, 12), host=(4, 0, 0))),
        ("fp32", {"placement": HOST, "rules": plain_sgd}, widths(device=(4, 4, 0), host=(0, 0, 4))),
        ("fp32", {"placement": ALL_HOST, "rules": plain_sgd}, widths(host=(4, 4, 0))),
    ],
    ids=lambda value: str(value.get("placement")) if isinstance(value, dict) and "placement" in value else None,
)
def test_every_byte_is_where_it_should_be(precision, options, expected, tmp_path):
    model = trained(precision=precision, budget=Budget(disk_path=str(tmp_path)), **options)
    assert held(model) == expected


@pytest.mark.parametrize("cpu_share", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("share", [0.1, 0.37, 0.999])
def test_fractions_are_cut_where_they_say(share, cpu_share):
    """Within half a unit of elements, whoever updates them."""
    parts = {"device": 1.0 - share, "host": share}
    model = trained(precision="bf16", placement=Placement(optimizer_states=parts, cpu_share=cpu_share))
    found = held(model)
    for tier, part in parts.items():
        assert abs(found[Tier(tier), Kind.OPTIMIZER_STATES] - 10 * part * NUMEL) <= 10 * UNIT / 2 + 1


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize(
    "options",
    [
        {"placement": HOST},
        {"placement": ALL_HOST, "accumulate": 2},
        {"placement": ON_DISK},
        {"placement": ALL_DISK},
        {"placement": Placement(gradients={"host": 0.5, "disk": 0.5}), "accumulate": 2},
        {"placement": SPECULATE, "accumulate": 1, "max_grad_norm": 1.0},
        {
            "placement": Placement(
                parameters={"device": 0.3, "host": 0.3, "disk": 0.4},
                gradients={"device": 0.6, "host": 0.4},
                optimizer_states={"device": 0.25, "host": 0.35, "disk": 0.4},
                cpu_share=0.4,
            )
        },
    ],
    ids=["host", "all-host", "disk", "all-disk", "gradients", "speculate", "mixed"],
)
def test_what_prepare_asks_for_is_what_it_takes(precision, options, tmp_path, monkeypatch):
    """A model of odd sizes: the bytes that are checked against what is free are those the ledger shows later."""
    asked: list[Counter[tuple[Tier, Kind]]] = []

    def spy(*args: Any) -> Counter[tuple[Tier, Kind]]:
        asked.append(reserved(*args))
        return asked[-1]

    monkeypatch.setattr(building, "reserved", spy)
    case = MODELS["gpt"]
    model = case.make(0)
    budget = Budget(disk_path=str(tmp_path))
    model, optimizer = zerostd.prepare(
        model, adamw(model), precision=precision, budget=budget, groups=list(case.groups), **options
    )
    for step in range(2):
        for _ in range(options.get("accumulate", 1)):
            case.loss(model, case.batch(step, 0, 1, torch.float32)).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    found, wanted = held(model), asked.pop()
    flats = sum(len(group.flats) for group in model.__dict__["_zerostd"].groups)
    for tier in (Tier.HOST, Tier.DISK):
        for kind in STATE_KINDS:
            spare = PAGE * flats if kind is Kind.GRADIENTS else 0  # gradients are no arena: theirs are rounded up
            assert 0 <= wanted[tier, kind] - found[tier, kind] <= spare, (tier, kind, wanted, found)
    assert sum(found[Tier.HOST, kind] + found[Tier.DISK, kind] for kind in STATE_KINDS) > 0


# -- in the process --

SCRIPT = '''
import ctypes, gc, json, sys, warnings
sys.path[:0] = [{tests!r}]
import torch
import zerostd
from offload.test_memory import PLACES, Tower, adamw, data
from zerostd.optimizers.streamed_updater import LANDING
from zerostd.policy import Tier
warnings.simplefilter("ignore", RuntimeWarning)
torch.set_num_threads(1)

def settled():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    # What is anonymous: pages of libraries count for more as soon as another process that has them too is gone.
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss_Anon:"))

def prepared(name, width, depth, path):
    precision, placement = PLACES[name]
    model = Tower(width, depth)
    budget = zerostd.Budget(disk_path=path)
    return zerostd.prepare(
        model, adamw(model), precision=precision, placement=placement, budget=budget, groups=["layers.*"]
    )

def train(model, optimizer, steps):
    x = data(2, model.layers[0].in_features)
    for _ in range(steps):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()

def booked(ledger, *tiers):
    return sum(size for (tier, _), size in ledger.now.items() if tier in tiers)

def untouched(optimizer):
    """Room on the device for what comes from the host: here both are one, and nobody writes to it. Its pages are there
    only if somebody had them before."""
    streamed = optimizer.updater.offload.updaters.get("streamed")
    return 0 if streamed is None else sum(slot.memory[LANDING].nbytes for slot in streamed._slots)
'''

LARGE = """
found = {}
for name in PLACES:
    for width, depth in ((64, 2), (1024, 20)):  # first a small one: what is loaded on first use is not ours
        before = settled()
        model, optimizer = prepared(name, width, depth, sys.argv[1])
        train(model, optimizer, 2)
        ledger = model.__dict__["_zerostd"].ledger
        grown, memory, spare = settled() - before, booked(ledger, Tier.HOST, Tier.DEVICE), untouched(optimizer)
        text = str(zerostd.memory(model))
        zerostd.release(model)
        del optimizer
        released = settled() - before
        left = booked(ledger, Tier.HOST, Tier.DISK)
        full = sum(p.nbytes for p in model.parameters())
        del model
        gone = settled() - before
    found[name] = dict(
        grown=grown, booked=memory, spare=spare, released=released, full=full, left=left, gone=gone, text=text
    )
print(json.dumps(found))
"""

LONG = """
found = {}
for name in ("halves, half streamed", "disk"):
    model, optimizer = prepared(name, 64, 8, sys.argv[1])
    ledger = model.__dict__["_zerostd"].ledger
    train(model, optimizer, 20)
    before, book = settled(), dict(ledger.now)
    train(model, optimizer, 200)
    found[name] = dict(grown=settled() - before, same=dict(ledger.now) == book)
print(json.dumps(found))
"""

PLACES = {
    "host": ("bf16", HOST),
    "host, streamed": ("bf16", Placement(optimizer_states="host", cpu_share=0.0)),
    "all on host": ("bf16", ALL_HOST),
    "all on host, fp32": ("fp32", ALL_HOST),
    "halves, half streamed": ("fp32", Placement(optimizer_states={"device": 0.5, "host": 0.5}, cpu_share=0.5)),
    "disk": ("bf16", ON_DISK),
}

needs_linux = pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists() or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc"
)


def run(code: str, path: Path) -> dict[str, dict[str, Any]]:
    """What a fresh process prints."""
    tests = Path(__file__).resolve().parents[1]
    environment = {**os.environ, "PYTHONPATH": str(tests.parent / "src"), "OMP_NUM_THREADS": "1"}
    environment["MALLOC_MMAP_THRESHOLD_"] = "65536"  # tensors as mappings of their own: no holes left in the heap
    command = [sys.executable, "-c", SCRIPT.format(tests=str(tests)) + code, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Models of 21 million parameters, one after another in a fresh process."""
    return run(LARGE, tmp_path_factory.mktemp("disk"))


@needs_linux
@pytest.mark.parametrize("name", PLACES)
def test_the_process_grows_by_what_the_ledger_says(name, measured):
    found = measured[name]
    assert found["booked"] > 50 * MIB
    slack = 0.02 * found["booked"] + 4 * MIB
    least, most = found["booked"] - found["spare"] - slack, found["booked"] + slack
    assert least <= found["grown"] <= most, f"grew by {found['grown'] / MIB:.1f} MiB\n{found['text']}"


@needs_linux
@pytest.mark.parametrize("name", PLACES)
def test_release_gives_everything_back(name, measured):
    """An ordinary model is left, then nothing."""
    found = measured[name]
    assert found["full"] == 4 * 20 * 1024 * 1024
    assert found["left"] == 0, "the ledger still shows bytes on host or disk"
    assert abs(found["released"] - found["full"]) <= 0.02 * found["full"] + 4 * MIB
    assert abs(found["gone"]) <= 8 * MIB


@needs_linux
def test_no_growth_over_200_steps(tmp_path):
    for name, found in run(LONG, tmp_path).items():
        assert found["same"], f"{name}: the ledger has changed"
        assert found["grown"] <= MIB, f"{name}: the process grew by {found['grown'] / MIB:.2f} MiB"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("states", ["host", "disk"])
def test_parameters_on_disk_take_no_memory_that_grows_with_them(precision, states, tmp_path):
    """Twice as many layers have checksums for twice as many pages, and pass through the same buffers."""
    placement = Placement(parameters="disk", optimizer_states=states)
    buffers = []
    for depth in (8, 16):
        model = seeded(lambda depth=depth: Tower(256, depth))
        budget = Budget(disk_path=str(tmp_path))
        model, optimizer = zerostd.prepare(
            model, adamw(model), precision=precision, placement=placement, budget=budget, groups=["layers.*"]
        )
        for number in range(2):
            model(data(2, 256, number=number)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        on_disk = sum(zerostd.memory(model).peak["disk"].values())
        buffers.append(zerostd.memory(model).peak["host"]["buffers"] - on_disk // 4096 * 4)
        zerostd.release(model)
    assert buffers[0] == buffers[1] > 0


def test_gradients_on_disk_are_written_once_a_step_and_read_once(tmp_path, monkeypatch):
    """But for the two that landed last, which are in memory still. Host memory is that of the two largest."""
    moved: Counter[str] = Counter()

    def counted(name: str) -> Any:
        move = getattr(Disk, name)

        def count(disk: Disk, extent: Extent, offset: int, memory: Tensor) -> Any:
            if extent.kind is Kind.GRADIENTS:
                moved[name] += memory.nbytes
            return move(disk, extent, offset, memory)

        return count

    for name in ("read", "write"):
        monkeypatch.setattr(Disk, name, counted(name))
    options = {"placement": Placement(gradients="disk", optimizer_states="disk"), "accumulate": 2, "passes": 2}
    model = trained(precision="fp32", max_grad_norm=1.0, budget=Budget(disk_path=str(tmp_path)), **options)
    num_steps = 2
    assert moved["write"] == num_steps * 2 * 4 * NUMEL
    assert moved["read"] == num_steps * (2 * DEPTH - 2) * 4 * WIDTH**2
    before = trained(precision="fp32", **options | {"placement": Placement(gradients="host", optimizer_states="disk")})
    saved = zerostd.memory(before).now["host"], zerostd.memory(model).now["host"]
    checksums = DEPTH * Extent.checksum_bytes(4 * WIDTH**2)
    assert sum(saved[0].values()) - sum(saved[1].values()) == (DEPTH - 2) * 4 * WIDTH**2 - checksums


def test_damaged_gradients_on_disk_are_an_error(tmp_path):
    model = seeded(Tower)
    placement = Placement(gradients="disk", optimizer_states="host")
    budget = Budget(disk_path=str(tmp_path))
    model, optimizer = zerostd.prepare(model, adamw(model), groups=["layers.*"], placement=placement, budget=budget)
    model(data(2, WIDTH)).square().mean().backward()
    extent = model.__dict__["_zerostd"].groups[-1].trainable[0].gradient.on_disk.extent  # that landed first
    os.pwrite(extent.scratch_file.fd, mmap.mmap(-1, PAGE), extent.start)
    with pytest.raises(zerostd.StorageError, match=r"gradients of the group of 'layers\.7"):
        optimizer.step()
