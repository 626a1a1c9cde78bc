"""What goes wrong off the device is said at once, in words, and leaves nothing behind: no hang, no file, no thread."""

from __future__ import annotations

import gc
import os
import re
import signal
import textwrap
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerostd
from support import mounts, warm
from support.compare import assert_bitwise
from support.files import opened
from support.memory import pss
from support.side_by_side import data, seeded
from zerostd import Budget, NotSupportedError, Placement, PrepareError
from zerostd.errors import StorageError
from zerostd.policy import Kind, Tier

pytestmark = pytest.mark.timeout(60)  # every one of these could hang

MIB = 2**20
WIDTH = 96
NUMEL = 3 * WIDTH * WIDTH  # of the model; its three groups need no padding

HOST = Placement(optimizer_states="host")
DISK = Placement(optimizer_states="disk")
HALVES = Placement(optimizer_states={"device": 0.5, "host": 0.5})
ROUTES = {
    "cpu": Placement(optimizer_states="host", cpu_share=1.0),
    "streamed": Placement(optimizer_states="host", cpu_share=0.0),
    "disk": Placement(optimizer_states="disk", cpu_share=1.0),
    "disk-streamed": Placement(optimizer_states="disk", cpu_share=0.0),
}


class Net(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def loss_of(model: nn.Module, number: int = 0) -> Tensor:
    return model(data(4, WIDTH, number=number)).square().mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for step in range(steps):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def stepped() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer that have trained a step, so that there is something to spoil."""
    model = seeded(Net)
    optimizer = adamw(model)
    train(model, optimizer, 1)
    return model, optimizer


def prepared(rules: Callable[[nn.Module], Any] = adamw, **options: Any) -> tuple[nn.Module, Any]:
    model = seeded(Net)
    return zerostd.prepare(model, rules(model), groups=["layers.*"], **options)


def files_in(folder: Path) -> list[str]:
    """What lies in a folder or is open from it, named or not."""
    return [*os.listdir(folder), *opened(folder)]


def threads() -> set[threading.Thread]:
    return set(threading.enumerate())


def ended(started: set[threading.Thread]) -> bool:
    """Whether threads end when nobody holds what they work for; they may be in the middle of something."""
    deadline = time.monotonic() + 10
    while any(thread.is_alive() for thread in started) and time.monotonic() < deadline:
        gc.collect()
        for thread in started:
            thread.join(timeout=0.05)
    return not any(thread.is_alive() for thread in started)


# -- refused at prepare --


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Import what `prepare` imports when it is first called, which counts as memory of the process."""
    model, _ = prepared(placement=HOST)
    zerostd.release(model)


def trace(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Everything about a model and its optimizer that a refusal must leave alone."""
    found: dict[str, Any] = {
        f"{name}.{key}": (type(value), list(value) if isinstance(value, dict) else None)
        for name, module in model.named_modules()
        for key, value in module.__dict__.items()
    }
    found |= {name: (id(p), p.data_ptr(), p.grad is None) for name, p in model.named_parameters()}
    found |= {f"hooks of {n}": bool(p._post_accumulate_grad_hooks) for n, p in model.named_parameters()}
    found["optimizer"] = [sorted(vars(optimizer)), id(optimizer.param_groups), list(map(id, optimizer.state))]
    return found


def refused(*words: str, error: type[Exception] = PrepareError, **options: Any) -> None:
    """prepare raises `error` with all of `words`; model, optimizer, memory and threads are as they were."""
    model, optimizer = stepped()
    before, weights = trace(model, optimizer), {name: t.detach().clone() for name, t in model.state_dict().items()}
    moments = [state["exp_avg"].clone() for state in optimizer.state.values()]
    running, held = threads(), pss()
    with pytest.raises(error) as caught:
        zerostd.prepare(model, optimizer, **options)
    started = threads() - running
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in {caught.value}"
    assert trace(model, optimizer) == before
    assert_bitwise(model.state_dict(), weights)
    assert all(torch.equal(state["exp_avg"], m) for state, m in zip(optimizer.state.values(), moments, strict=True))
    assert not started, f"{started} still run, although prepare has given up"
    assert pss() - held < 4 * MIB
    train(model, optimizer, 1)


NEED = 8 * NUMEL + -(-2 * NUMEL // 4096) * 4096  # bf16: two moments, the lower half of a master; whole pages


@pytest.mark.parametrize(
    ("placement", "budget", "words"),
    [
        (HOST, {"host": "1000TiB"}, ("Budget(host='1000TiB')", "1024000.00 GiB", "free")),
        (HOST, {"host": "100KiB"}, (str(NEED), "102400 bytes", "optimizer_states", "Budget(host=...)")),
        (HOST, {"device": 1000}, ("Budget(device=1000)", "parameters", "gradients", "Placement(")),
        (Placement(), {"device": 12 * NUMEL}, (f"Budget(device={12 * NUMEL})", "optimizer_states", "'host'")),
        (DISK, {"disk": "1000TiB"}, ("wanted", "1024000.00 GiB", "free")),
        (DISK, {"disk": "100KiB"}, (str(NEED), "102400 bytes", "Budget(disk=...)")),
    ],
    ids=["no-host", "host", "device", "device-states", "no-disk", "disk"],
)
def test_more_than_the_budget(placement, budget, words, tmp_path):
    budget = Budget(**budget, disk_path=str(tmp_path))
    refused(*words, precision="bf16", placement=placement, budget=budget)
    assert files_in(tmp_path) == []


@pytest.mark.parametrize("placement", [HOST, DISK, Placement(parameters="host")], ids=["host", "disk", "parameters"])
def test_more_than_the_machine_has(placement, tmp_path):
    """A model of 13 TB of states is refused before a byte is taken, and can be prepared otherwise afterwards."""
    with zerostd.empty_init():
        model = nn.Linear(2**20, 2**20, bias=False)
    optimizer, held, running = adamw(model), pss(), threads()
    num_bytes = (4 if placement.parameters == "host" else 12) * 2**40
    with pytest.raises(PrepareError, match=rf"{num_bytes} bytes.*free"):
        zerostd.prepare(model, optimizer, placement=placement, budget=Budget(disk_path=str(tmp_path)))
    assert model.weight.is_meta and optimizer.param_groups[0]["params"][0] is model.weight and not model._forward_hooks
    assert files_in(tmp_path) == [] and threads() == running and pss() - held < 4 * MIB


@pytest.mark.parametrize("budget", [{}, {"disk": "1MiB"}], ids=["", "budget"])
def test_no_folder(budget, tmp_path):
    missing, file = tmp_path / "missing", tmp_path / "file"
    file.write_bytes(b"")
    for path in (missing, file):
        refused(str(path), "directory", placement=DISK, budget=Budget(disk_path=str(path), **budget))
    assert os.listdir(tmp_path) == ["file"] and file.read_bytes() == b""


START = """
import os, signal, sys, torch, warnings
from torch import nn
import zerostd
warnings.simplefilter("ignore", RuntimeWarning)
path = sys.argv[1]
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512))
"""


def test_full_file_system(tmp_path):
    code = """
    optimizer = torch.optim.AdamW(model.parameters())
    before = [(id(p), p.data_ptr()) for p in model.parameters()]
    for kind in ("optimizer_states", "parameters", "gradients"):
        placement = zerostd.Placement(**{kind: "disk"})
        try:
            zerostd.prepare(model, optimizer, placement=placement, budget=zerostd.Budget(disk_path=path))
        except zerostd.PrepareError as error:
            print(error)
    print(os.listdir(path), [(id(p), p.data_ptr()) for p in model.parameters()] == before, len(model._forward_hooks))
    """
    states, parameters, gradients, rest = on_a_drive_of_its_own(code, tmp_path, "1m")
    assert f"({12 * 2 * 512 * 513} bytes) wanted in {tmp_path}" in states and "(1048576 bytes) free" in states
    for line in (parameters, gradients):
        assert f"({4 * 2 * 512 * 513} bytes) wanted in {tmp_path}" in line
    assert rest == "[] True 0"


def on_a_drive_of_its_own(code: str, folder: Path, size: str) -> list[str]:
    """Run a program that is given a folder on a new drive of that size; return its lines."""
    mount = f"from support.mounts import mount\nmount('tmpfs', {str(folder)!r}, 'size={size}')\n"
    done = warm.run(mount + START + textwrap.dedent(code), folder)
    if done.returncode == mounts.NOT_ALLOWED:
        pytest.skip(f"this machine lets no user mount: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_gradients_that_grow_on_a_full_file_system_are_refused_and_training_goes_on(tmp_path):
    """Of two passes that nobody announced, gradients are fp32 sums, twice as long as those that space was taken for."""
    code = """
    def train(is_full):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512))
        model, optimizer = zerostd.prepare(
            model, torch.optim.AdamW(model.parameters()), precision="bf16", groups=["0", "2"],
            placement=zerostd.Placement(gradients="disk"), budget=zerostd.Budget(disk_path=path),
        )
        losses = []
        for passes in (1, 2, 2):
            if is_full and passes == 2:
                file = os.open(path + "/full", os.O_CREAT | os.O_WRONLY)
                os.posix_fallocate(file, 0, os.statvfs(path).f_bavail * os.statvfs(path).f_frsize)
            while True:
                try:
                    for _ in range(passes):
                        loss = model(torch.ones(2, 512)).square().mean()
                        loss.backward()
                    break
                except zerostd.PrepareError as error:
                    print(error)
                    os.truncate(path + "/full", 0)
                    is_full = False
                    optimizer.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        zerostd.release(model)
        return losses

    print(train(False) == train(True))
    """
    refusal, is_same = on_a_drive_of_its_own(code, tmp_path, "4m")
    assert re.search(r"\(\d+ bytes\) wanted in .*, but its file system has .*make room, name another", refusal)
    assert is_same == "True"


SPECULATE = {"placement": Placement(optimizer_states="host", speculate=True), "accumulate": 1, "max_grad_norm": 1.0}


@pytest.mark.parametrize(
    ("options", "words", "error"),
    [
        ({"placement": Placement(activations={"tape*": "host"})}, ("no group matches 'tape*'",), PrepareError),
        ({"placement": Placement(same_activations="all")}, ("same_activations='all'", "new_group"), PrepareError),
        ({**SPECULATE, "accumulate": None}, ("speculate=True", "accumulate= (now None)"), PrepareError),
        ({**SPECULATE, "max_grad_norm": None}, ("speculate=True", "max_grad_norm= (now None)"), PrepareError),
        ({**SPECULATE, "precision": "fp16"}, ("speculate=True", "precision='fp16'"), PrepareError),
        (
            {**SPECULATE, "placement": Placement(parameters="host", optimizer_states="host", speculate=True)},
            ("speculate=True", "parameters='device'"),
            NotSupportedError,
        ),
    ],
    ids=["activations", "same-activations", "accumulate", "norm", "fp16", "parameters"],
)
def test_what_cannot_be_honoured(options, words, error):
    refused(*words, error=error, **options)


@pytest.mark.parametrize("share", ["host", "disk", {"device": 0.5, "host": 0.5}], ids=str)
def test_states_of_an_unknown_optimizer(share):
    model = seeded(Net)
    with pytest.raises(PrepareError, match=r"optimizer_states=.*pass it to prepare"):
        zerostd.prepare(model, placement=Placement(optimizer_states=share))
    assert not model._forward_pre_hooks and "_zerostd" not in model.__dict__


# -- during training --


def raises_from_now_on(model: nn.Module, optimizer: Any, *words: str) -> None:
    """Nothing that needs the states works any more, and each call says why."""
    calls = [lambda: loss_of(model), optimizer.step, optimizer.state_dict, lambda: zerostd.full_state_dict(model)]
    for call in (*calls, *calls):
        with pytest.raises(StorageError) as caught:
            call()
        told = " ".join(map(str, causes(caught.value)))
        assert all(word in told for word in words), told


def causes(error: BaseException | None) -> list[BaseException]:
    """An error and what it came from."""
    found = []
    while error is not None:
        found.append(error)
        error = error.__cause__
    return found


@pytest.fixture
def folder(tmp_path):
    """For files. When the test is over its model goes, with every thread and file, whatever state it is in."""
    running = threads()
    yield tmp_path
    assert ended(threads() - running)
    assert files_in(tmp_path) == []


class Planted(Exception):
    """What the user's optimizer raises."""


class Fused(torch.optim.SGD):
    """A user's own optimizer with a fuse: element-wise, and when the fuse is lit it fails, in our threads or here."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.01, momentum=0.9)
        self.fuse: dict[str, Exception] = {}  # shared by all copies of this object

    def step(self, closure: Any = None) -> Any:
        where = "here" if threading.current_thread() is threading.main_thread() else "in a thread"
        if where in self.fuse and self.param_groups[0]["params"][0].numel() > 24:
            raise self.fuse[where]
        return super().step(closure)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # jobs behind the failed one fail as well, and nobody asks them
@pytest.mark.parametrize("early", [False, True], ids=["", "early"])
@pytest.mark.parametrize("route", ROUTES)
def test_error_in_a_thread_reaches_the_loop(route, early, folder):
    made: list[Fused] = []

    def rules(model: nn.Module) -> Fused:
        made.append(Fused(model.parameters()))
        return made[0]

    budget = Budget(disk_path=str(folder))
    model, optimizer = prepared(rules, placement=ROUTES[route], budget=budget, accumulate=1 if early else None)
    train(model, optimizer)
    made[0].fuse["in a thread"] = Planted("planted")
    with pytest.raises(StorageError, match="planted") as caught:
        train(model, optimizer)
    assert any(isinstance(error, Planted) for error in causes(caught.value))
    raises_from_now_on(model, optimizer, "planted", "the update")


def cut_short(model: nn.Module, kind: Kind) -> str:
    """Truncate the file that holds one kind; what errors call it."""
    disk = model.__dict__["_zerostd"].resources.allocator.disk
    extent = next(extent for extent in disk._extents if extent.kind is kind)
    os.ftruncate(extent.scratch_file.fd, 0)
    return extent.file


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("cpu_share", [1.0, 0.0], ids=["cpu", "streamed"])
def test_states_cut_short_on_disk(cpu_share, folder):
    placement = Placement(optimizer_states="disk", cpu_share=cpu_share)
    model, optimizer = prepared(placement=placement, budget=Budget(disk_path=str(folder)))
    train(model, optimizer)
    optimizer.synchronize()
    file = cut_short(model, Kind.OPTIMIZER_STATES)
    loss_of(model).backward()  # needs no states
    with pytest.raises(StorageError, match=r"reading \d+ bytes at offset \d+ of .*ended early"):
        optimizer.step()
        loss_of(model)
    raises_from_now_on(model, optimizer, file, "at offset")


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::UserWarning")
@pytest.mark.parametrize("states", ["device", "host", "disk"])
def test_parameters_cut_short_on_disk(states, folder):
    placement = Placement(parameters="disk", optimizer_states=states)
    model, optimizer = prepared(placement=placement, budget=Budget(disk_path=str(folder)))
    train(model, optimizer)
    optimizer.synchronize()
    file = cut_short(model, Kind.PARAMETERS)
    for _ in range(3):
        with pytest.raises(StorageError, match=r"reading \d+ bytes at offset \d+ of .*ended early") as caught:
            loss_of(model)
        assert file in str(caught.value)


def test_kill_in_the_middle_of_a_step_leaves_nothing(tmp_path):
    """The process kills itself from inside the update of the second step, between reads and writes of states."""
    code = """
    class Deadly(torch.optim.SGD):
        is_armed = False

        def step(self, closure=None):
            if Deadly.is_armed and self.param_groups[0]["params"][0].numel() > 24:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().step(closure)

    optimizer = Deadly(model.parameters(), lr=0.1, momentum=0.9)
    placement = zerostd.Placement(parameters="disk", optimizer_states="disk")
    budget = zerostd.Budget(disk_path=path)
    model, optimizer = zerostd.prepare(model, optimizer, placement=placement, budget=budget, groups=["0", "2"])
    for number in range(3):
        model(torch.ones(2, 512)).square().mean().backward()
        Deadly.is_armed = number == 1
        optimizer.step()
        optimizer.zero_grad()
        optimizer.synchronize()
        links = [os.readlink(f"/proc/self/fd/{fd}") for fd in range(100) if os.path.islink(f"/proc/self/fd/{fd}")]
        print(number, sum(path in link for link in links), flush=True)
    """
    done = warm.run(START + textwrap.dedent(code), tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert done.stdout == "0 4\n"  # one step, with four files open there: parameters and states of two groups
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("placement", [Placement(), HALVES], ids=["device", "halves"])
@pytest.mark.parametrize("accumulate", [None, 1])
def test_out_of_device_memory_says_who_holds_what(placement, accumulate):
    made: list[Fused] = []

    def rules(model: nn.Module) -> Fused:
        made.append(Fused(model.parameters()))
        return made[0]

    model, optimizer = prepared(rules, placement=placement, accumulate=accumulate)
    train(model, optimizer)
    made[0].fuse["here"] = torch.OutOfMemoryError("planted: tried to allocate 20 GiB")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        train(model, optimizer)
    text = str(caught.value)
    assert all(word in text for word in ("planted", "device", "optimizer_states", "parameters", "MiB", "Placement"))
    assert "zerostd held" in text and ("\nhost" in text) == (placement != Placement())


@pytest.mark.parametrize("route", [*ROUTES, "all"])
def test_a_model_that_is_dropped_gives_everything_back(route, folder):
    everywhere = Placement(parameters="disk", gradients="disk", optimizer_states={"host": 0.5, "disk": 0.5})
    placement = everywhere if route == "all" else ROUTES[route]
    running = threads()
    model, optimizer = prepared(placement=placement, budget=Budget(disk_path=str(folder)))
    seen, ledger = weakref.ref(model), model.__dict__["_zerostd"].ledger
    train(model, optimizer)
    started = threads() - running
    tier = Tier.DISK if "disk" in str(placement) else Tier.HOST
    assert started and ledger.now[tier, Kind.OPTIMIZER_STATES] > 0
    assert bool(files_in(folder)) == (tier is Tier.DISK)
    del model, optimizer
    assert ended(started), f"{[thread.name for thread in started if thread.is_alive()]} still run"
    assert seen() is None
    assert files_in(folder) == []
    left = {key: size for key, size in ledger.now.items() if key[0] is not Tier.DEVICE and size}
    assert not left


def test_a_model_that_is_dropped_in_the_middle_of_an_update(folder):
    """Jobs still wait in the threads; nobody will ask for them."""
    running = threads()
    model, optimizer = prepared(placement=ROUTES["disk"], budget=Budget(disk_path=str(folder)))
    loss_of(model).backward()
    optimizer.step()
    seen, started = weakref.ref(model), threads() - running
    del model, optimizer
    assert ended(started) and seen() is None
