"""Training goes on from a checkpoint as if it never stopped: bit by bit on as many ranks, within rounding on others."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerostd
from checkpoints.across import SAVED, WORLDS, begin, go_on, reference, target_of, too_far, whole
from checkpoints.runs import PLACEMENTS, RULES, Job, Run, compared, unlike
from support.agreement import agree
from support.processes import doing
from support.side_by_side import seeded
from zerostd import CheckpointError, CommunicationError, MisuseError
from zerostd.checkpointing.storage.manifest import seal

STEPS = 4  # before and after; some use a parameter that others do not


# -- as many ranks: every bit --


def goes_on(job: Job, folder: str, rank: int = 0) -> list[str]:
    """What differs between a training that was saved and loaded and one that was not."""
    run = Run(job, folder, rank=rank)
    run.train(STEPS)
    path = f"{folder}/{job}"
    run.save(path)
    losses, tensors, facts = run.train(STEPS), run.tensors(), run.facts()
    run.release()
    other = Run(job, folder, rank=rank, seed=7)
    other.train(1)  # all of it must go
    other.load(path)
    found = other.train(STEPS)
    wrong = compared(other.tensors(), tensors) + unlike(other.facts(), facts)
    other.release()
    return wrong if found == losses else [f"losses {found}, not {losses}", *wrong]


ONE_RANK = [
    *(Job(rules) for rules in RULES),
    *(Job("momentum", placement=name) for name in ("host", "all tiers")),
    *(Job(precision=precision) for precision in ("bf16", "fp16")),
    *(Job(precision="bf16", placement=name) for name in PLACEMENTS if name != "device"),
    *(Job(precision="fp16", placement=name) for name in ("host", "all tiers", "parameters on disk")),
    Job("tensor lr", placement="host"),
    Job("own", placement="all tiers"),
    Job(passes=3, accumulate=3, max_grad_norm=0.1, placement="host"),
    Job(passes=2, precision="fp16", max_grad_norm=0.1),
    Job(stage=0),
]
TWO_RANKS = [
    Job(stage=0),
    Job(stage=1, precision="bf16"),
    Job(stage=2, precision="fp16", placement="host"),
    Job(precision="bf16", placement="all tiers", passes=2),
    Job(placement="parameters on disk"),
    Job(stage=2, rules="tensor lr", precision="bf16"),
    Job(placement="different shares", rules="own", max_grad_norm=0.1),
]


@pytest.mark.parametrize("job", ONE_RANK, ids=str)
def test_one_rank_goes_on_bit_by_bit(job: Job, tmp_path: Path) -> None:
    assert not goes_on(job, str(tmp_path))


def jobs_go_on(rank: int, jobs: list[Job], folder: str) -> list[str]:
    failures = []
    for job in jobs:
        doing(str(job))
        failures += [f"{job}, rank {rank}: {text}" for text in goes_on(job, folder, rank)]
    return failures


def test_two_ranks_go_on_bit_by_bit(ranks: Any, tmp_path: Path) -> None:
    agree(ranks(2, jobs_go_on, TWO_RANKS, str(tmp_path)))


def test_saving_changes_nothing(tmp_path: Path) -> None:
    found = []
    for saves in (False, True):
        run = Run(Job(precision="bf16", placement="host"), tmp_path)
        losses = run.train(2)
        if saves:
            run.save(tmp_path / "saved")
        found.append((losses + run.train(2), run.tensors(), run.facts()))
    (losses, tensors, facts), (others, more, said) = found
    assert losses == others and not compared(more, tensors) and not unlike(said, facts)


@pytest.mark.parametrize("placement", ["device", "host", "all tiers"])
def test_before_the_first_step(placement: str, tmp_path: Path) -> None:
    """What the other had learned is forgotten, where it rests too."""
    job = Job(precision="bf16", placement=placement)
    run = Run(job, tmp_path)
    run.save(tmp_path / "saved")
    losses, tensors = run.train(3), run.tensors()
    other = Run(job, tmp_path, seed=7)
    other.train(2)
    other.load(tmp_path / "saved")
    assert other.train(3) == losses and not compared(other.tensors(), tensors)


def test_no_load_in_the_middle_of_a_step(tmp_path: Path) -> None:
    run = Run(Job(passes=2), tmp_path)
    run.save(tmp_path / "saved")
    run.model(torch.ones(6, 8), True).sum().backward()
    with pytest.raises(MisuseError, match=r"zerostd.load after 1 backward pass"):
        run.load(tmp_path / "saved")
    assert os.listdir(tmp_path) == ["saved"]
    other = Run(Job(), tmp_path)
    with zerostd.gathered(other.model), pytest.raises(MisuseError, match="leave the context first"):
        other.load(tmp_path / "saved")


# -- any number of ranks, stage and placement --


@pytest.fixture(scope="module")
def saved(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Checkpoints of all of SAVED after ten steps, and what each was of, joined from its ranks."""
    folder, found = tmp_path_factory.mktemp("saved"), {}
    for world_size in WORLDS:
        mine = [one for one in SAVED if one.world_size == world_size]
        answers = ranks(world_size, begin, mine, str(folder))
        for number, one in enumerate(mine):
            found[str(one)] = (answers[0][number][0], whole([answer[number][1] for answer in answers]))
    return folder, found


@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.full)], ids=["", "rest"])
@pytest.mark.parametrize("world_size", WORLDS)
def test_any_ranks_go_on(
    world_size: int, part: int, ranks: Any, saved: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """In `make test` each checkpoint goes on with every second number of ranks."""
    folder, expected = saved
    some = SAVED[(world_size + part) % 2 :: 2]
    answers = ranks(world_size, go_on, some, str(folder), str(tmp_path), timeout=200)
    failures = []
    for number, one in enumerate(some):
        label = f"{one} to {target_of(one, world_size)}"
        (state, _, end), parts = answers[0][number], [answer[number][1] for answer in answers]
        before, states = expected[str(one)]
        failures += [f"{label}: {text}" for text in compared(state, before) + compared(whole(parts), states)]
        failures += [f"{label}: {text}" for text in too_far(one, end, reference(one, tmp_path))]
    agree([failures])


# -- all ranks must come --

LIMIT_S, LATEST_S = 3.0, 23.0  # after the latter, something else than the limit ended it


def impatient(folder: str) -> Run:
    os.environ["ZEROSTD_TIMEOUT_S"] = str(LIMIT_S)
    try:
        return Run(Job(), folder, rank=dist.get_rank())
    finally:
        del os.environ["ZEROSTD_TIMEOUT_S"]


def lonely(rank: int, folder: str) -> list[tuple[str, float]]:
    """Only one rank calls, each in turn; the other waits until that has its error."""
    said = []
    first = Run(Job(), folder, rank=rank)
    first.save(f"{folder}/saved")
    for call in ("save", "load"):
        for caller in (0, 1):
            doing(f"{call} by rank {caller} only")
            run, sign = impatient(folder), Path(folder, f"{call} {caller}")
            dist.barrier()
            if rank != caller:
                while not sign.exists():
                    time.sleep(0.05)
                continue
            started = time.monotonic()
            try:
                getattr(run, call)(f"{folder}/{'second' if call == 'save' else 'saved'}")
            except CommunicationError as error:
                said.append((str(error), time.monotonic() - started))
            sign.touch()
    return said


def test_a_rank_that_does_not_come_is_named_in_time(ranks: Any, tmp_path: Path) -> None:
    for caller, said in enumerate(ranks(2, lonely, str(tmp_path), timeout=60)):
        assert len(said) == 2
        for call, (text, seconds) in zip(("save", "load"), said, strict=True):
            assert f"zerostd.{call}()" in text and f"rank {1 - caller} made its last call" in text, text
            assert LIMIT_S - 0.5 < seconds < LATEST_S
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["saved"]  # nothing of the others is left


def refused_on_one(rank: int, folder: str) -> list[tuple[str, float]]:
    """What one rank cannot do is an error on all at once, and the next save works."""
    run, said = Run(Job(), folder, rank=rank), []

    def strange(text: str) -> Any:
        return {"lambda": lambda: None} if text == "extra" else 1

    for text in ("extra", "option"):
        if text == "option" and rank == 1:
            run.optimizer.param_groups[0]["of mine"] = object()
        started = time.monotonic()
        try:
            zerostd.save(f"{folder}/{text}", run.model, run.optimizer, strange(text) if rank == 0 else object())
        except CheckpointError as error:
            said.append((str(error), time.monotonic() - started))
    run.optimizer.param_groups[0].pop("of mine", None)
    run.save(f"{folder}/last")
    return said


def test_what_one_rank_cannot_save_is_told_to_all(ranks: Any, tmp_path: Path) -> None:
    for said in ranks(2, refused_on_one, str(tmp_path)):
        assert [("extra['lambda'] is a function" in said[0][0]), ("of mine" in said[1][0])] == [True, True]
        assert max(seconds for _, seconds in said) < 30
    assert os.listdir(tmp_path) == ["last"]


# -- extra --


def small(folder: Path) -> Run:
    return Run(Job(rules="sgd"), folder)


def test_extra_of_every_kind(tmp_path: Path) -> None:
    tensors = [
        torch.arange(6).view(2, 3).t(),
        torch.empty(0, 3),
        torch.tensor([1 + 2j, 3j], dtype=torch.complex64).conj(),
        torch.tensor([True, False]),
        torch.tensor(7, dtype=torch.int16),
        torch.tensor(math.pi, dtype=torch.float64),
        torch.tensor(1 + 1j, dtype=torch.complex64),
        torch.tensor(float("nan"), dtype=torch.bfloat16),
        torch.tensor([0.5, -2.0]).to(torch.float8_e4m3fn),
        torch.ones(3, requires_grad=True),
    ]
    plain = {
        "none": None,
        "numbers": [True, 0, -1, 2**200, 1.5, -0.0, 1e-320, math.inf, -math.inf],
        "text": "ä \ud800 \0 \n",
        "nested": [[], {}, (), [1, (2, {"a": (3,)})]],
        "keys": {1: "a", (2, "b"): 1, None: 0, "$tensor": 3, 1.5: True},
        "$odd": {"$tensor": 0},
        "": {"$float": "nan", "$items": []},
    }
    run = small(tmp_path)
    extra = {**plain, "tensors": tensors, "ordered": OrderedDict(b=1, a=2), "nan": math.nan}
    zerostd.save(tmp_path / "saved", run.model, run.optimizer, extra)
    found = zerostd.load(tmp_path / "saved", run.model, run.optimizer)
    assert {key: found[key] for key in plain} == plain and list(found) == list(extra)
    assert str(found["numbers"]) == str(plain["numbers"])  # -0.0 and types
    assert found["ordered"] == {"b": 1, "a": 2} and math.isnan(found["nan"])
    for one, expected in zip(found["tensors"], tensors, strict=True):
        assert one.dtype == expected.dtype and one.shape == expected.shape
        assert one.device.type == "cpu" and not one.requires_grad
        assert torch.equal(torch.view_as_real(one) if one.is_complex() else one.double(), _real(expected)) or _nan(one)


def _real(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().resolve_conj()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor.double()


def _nan(tensor: Tensor) -> bool:
    return tensor.dtype == torch.bfloat16 and bool(tensor.isnan())


class Own:
    pass


def holds_itself() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "object": (lambda: {"a": [1, Own()]}, r"extra\['a'\]\[1\] is a Own"),
    "set": (lambda: {1, 2}, "extra is a set"),
    "bytes": (lambda: [b"x"], r"extra\[0\] is a bytes"),
    "function": (lambda: {"f": print}, r"extra\['f'\] is a builtin"),
    "numpy": (lambda: {"x": torch.ones(2).numpy()}, r"extra\['x'\] is a ndarray"),
    "size": (lambda: torch.ones(2).shape, "extra is a Size"),
    "key": (lambda: {Own(): 1}, "a key of extra is a Own"),
    "complex": (lambda: 1j, "extra is a complex"),
    "dtype": (lambda: {"x": torch.ones(2, dtype=torch.complex128)}, "complex128 cannot be saved"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "extra is a tensor of torch.sparse_coo"),
    "meta": (lambda: torch.empty(3, device="meta"), "on meta"),
    "itself": (holds_itself, "nested too deeply, or contains itself"),
    "long": (lambda: 10**5000, "a number of 16610 bits"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_extra_that_is_refused(name: str, tmp_path: Path) -> None:
    make, words = REFUSED[name]
    run = small(tmp_path)
    with pytest.raises(CheckpointError, match=words):
        zerostd.save(tmp_path / "saved", run.model, run.optimizer, make())
    assert os.listdir(tmp_path) == []
    zerostd.save(tmp_path / "saved", run.model, run.optimizer)
    assert zerostd.load(tmp_path / "saved", run.model, run.optimizer) is None


# -- where it goes, and what stays --


def test_a_path_is_written_once(tmp_path: Path) -> None:
    run = small(tmp_path)
    run.save(tmp_path / "a/b/saved")
    before = (tmp_path / "a/b/saved/manifest.json").read_bytes()
    with pytest.raises(CheckpointError, match="already exists and is not overwritten"):
        run.save(tmp_path / "a/b/saved")
    assert (tmp_path / "a/b/saved/manifest.json").read_bytes() == before
    assert os.listdir(tmp_path / "a/b") == ["saved"]


@pytest.mark.parametrize("name", ["a.incomplete-0123456789ab", "x" * 250, "", "nul\0"])
def test_names_that_cannot_be(name: str, tmp_path: Path) -> None:
    run = small(tmp_path)
    with pytest.raises(CheckpointError, match=r"cannot be (the name of a checkpoint|created)|must be a path"):
        run.save(Path(tmp_path, name) if name else "")
    assert os.listdir(tmp_path) == []
    run.save(tmp_path / "saved")


def test_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = small(tmp_path)
    run.save("saved")
    assert zerostd.latest(".") == "saved"
    run.load("saved")
    assert os.listdir(tmp_path) == ["saved"]


def test_keep(tmp_path: Path) -> None:
    run = small(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "notes.incomplete-2020").mkdir()
    (tmp_path / "mine" / "file").touch()
    for step in range(5):
        run.save(tmp_path / f"step-{step}", keep=2)
        assert zerostd.latest(tmp_path) == str(tmp_path / f"step-{step}")
    assert sorted(os.listdir(tmp_path)) == ["mine", "notes.incomplete-2020", "step-3", "step-4"]
    run.save(tmp_path / "step-5")
    run.save(tmp_path / "step-6", keep=1)
    assert sorted(os.listdir(tmp_path)) == ["mine", "notes.incomplete-2020", "step-6"]
    for wrong in (0, -1, True, 1.5, "2"):
        with pytest.raises(CheckpointError, match="keep="):
            run.save(tmp_path / "step-7", keep=wrong)


def test_a_clock_that_went_back_does_not_cost_the_new_one(tmp_path: Path) -> None:
    run = small(tmp_path)
    for step in range(2):
        run.save(tmp_path / f"step-{step}")
        edit(tmp_path / f"step-{step}", lambda data: data.update(saved=data["saved"] + 1e6))
    run.save(tmp_path / "step-2", keep=2)
    assert sorted(os.listdir(tmp_path)) == ["step-1", "step-2"]


def test_keep_warns_if_the_directory_cannot_be_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = small(tmp_path)
    for step in range(3):
        run.save(tmp_path / f"step-{step}")

    def failing(path: object) -> list[str]:
        raise OSError(errno.EIO, "planted")

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, logger="zerostd"):
        patched.setattr(os, "listdir", failing)
        run.save(tmp_path / "step-3", keep=1)
    assert sorted(os.listdir(tmp_path)) == [f"step-{step}" for step in range(4)]
    (record,) = caplog.records
    assert record.getMessage() == f"old checkpoints stay, because {tmp_path} cannot be listed: EIO: planted"


def test_a_neighbour_that_cannot_be_read_stops_neither_keep_nor_latest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as lost+found, at the top of a file system."""
    run = small(tmp_path)
    private = tmp_path / "lost+found"
    private.mkdir()
    true = os.stat

    def refusing(path: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(f"{private}{os.sep}"):
            raise PermissionError(errno.EACCES, "planted")
        return true(path, **options)

    monkeypatch.setattr(os, "stat", refusing)
    for step in range(3):
        run.save(tmp_path / f"step-{step}", keep=1)
    assert sorted(os.listdir(tmp_path)) == ["lost+found", "step-2"]
    with caplog.at_level(logging.WARNING, logger="zerostd"):
        assert zerostd.latest(tmp_path) == str(tmp_path / "step-2")
    assert [record.getMessage() for record in caplog.records] == [
        f"{private} is skipped: it cannot be read: EACCES: planted"
    ]


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "manifest.json"
    data = json.loads(path.read_text())
    del data["crc32"]
    change(data)
    path.write_text(seal(data))


def test_latest_takes_the_newest_that_is_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert zerostd.latest(tmp_path / "nowhere") is None and zerostd.latest(tmp_path) is None
    run = small(tmp_path)
    for step in range(8):
        run.save(tmp_path / f"step-{step}")
    file = "rank-00000-of-00001.safetensors"
    (tmp_path / "step-7").rename(tmp_path / "step-7.incomplete-0123456789ab")
    with open(tmp_path / "step-6" / file, "r+b") as shard:
        shard.truncate(1000)
    (tmp_path / "step-5" / file).unlink()
    edit(tmp_path / "step-4", lambda data: data.update(version=4))
    (tmp_path / "step-3" / "manifest.json").write_text('{"mine": 1}')
    (tmp_path / "step-2" / "manifest.json").unlink()
    (tmp_path / "logs").mkdir()
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING, logger="zerostd"):
        assert zerostd.latest(tmp_path) == str(tmp_path / "step-1")
    said = {record.getMessage().split(" is skipped: ")[0]: record.getMessage() for record in caplog.records}
    assert sorted(Path(name).name for name in said) == [
        "step-3",
        "step-4",
        "step-5",
        "step-6",
        "step-7.incomplete-0123456789ab",
    ]
    for name, words in {
        "step-3": "format is not",
        "step-4": "use a newer zerostd",
        "step-5": "ENOENT",
        "step-6": "has 1000 bytes",
        "step-7.incomplete-0123456789ab": "never completed",
    }.items():
        assert words in said[str(tmp_path / name)]
    run.load(tmp_path / "step-1")


# -- without the optimizer, and models that do not fit --


def test_parameters_only(tmp_path: Path) -> None:
    run = Run(Job(precision="bf16"), tmp_path)
    run.train(3)
    zerostd.save(tmp_path / "bare", run.model)
    run.save(tmp_path / "full")
    weights = zerostd.full_state_dict(run.model)
    for name in ("bare", "full"):
        other = Run(Job("momentum", precision="fp32", placement="host"), tmp_path, seed=7)
        before = other.optimizer.state_dict()
        assert zerostd.load(tmp_path / name, other.model) == (None if name == "bare" else run.extra())
        assert not compared(zerostd.full_state_dict(other.model), weights)
        assert str(other.optimizer.state_dict()) == str(before)
        assert all(math.isfinite(loss) for loss in other.train(2))
    with pytest.raises(CheckpointError, match="it has no optimizer: load it with optimizer=None"):
        zerostd.load(tmp_path / "bare", run.model, run.optimizer)
    with pytest.raises(MisuseError, match="not the original one"):
        zerostd.load(tmp_path / "bare", run.model, torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))


class Other(nn.Module):
    def __init__(self, width: int = 5, names: str = "ab", buffers: int = 3) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(5, width))
        self.register_buffer("seen", torch.zeros(buffers))


def other(rules: type[torch.optim.Optimizer] = torch.optim.SGD, groups: int = 1, **options: Any) -> tuple[Any, Any]:
    model = seeded(lambda: Other(**options))
    parameters = list(model.parameters())
    parts = [parameters] if groups == 1 else [parameters[:1], parameters[1:]]
    optimizer = rules([{"params": part} for part in parts], lr=0.1)
    return zerostd.prepare(model, optimizer)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"width": 6}, r"parameter 'a.weight' has shape \(5, 5\) in the checkpoint, but \(6, 5\) in the model"),
        ({"names": "abc"}, "parameter 'c.weight' is not in the checkpoint"),
        ({"names": "a"}, "parameter 'b.weight' is not in the model"),
        ({"buffers": 4}, r"buffer 'seen' has shape \(3,\)"),
        ({"rules": torch.optim.AdamW}, "its optimizer is 'SGD', but this one is 'AdamW'"),
        ({"groups": 2}, r"its param_groups have \[4\] parameters"),
    ],
)
def test_a_checkpoint_of_another_model(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    model, optimizer = other()
    zerostd.save(tmp_path / "saved", model, optimizer)
    model, optimizer = other(**options)
    before = zerostd.full_state_dict(model)
    with pytest.raises(CheckpointError, match=f"{words}.*Nothing was changed"):
        zerostd.load(tmp_path / "saved", model, optimizer)
    assert not compared(zerostd.full_state_dict(model), before)


def test_states_that_have_no_place(tmp_path: Path) -> None:
    """Off the device states have homes from the beginning: ones that the optimizer did not say have none."""
    run = Run(Job("tensor lr"), tmp_path)  # amsgrad
    run.train(2)
    run.save(tmp_path / "saved")
    found = Run(Job(placement="host"), tmp_path)
    edit(tmp_path / "saved", lambda data: data["optimizer"].update(groups=_groups(found)))
    before = found.tensors()
    with pytest.raises(CheckpointError, match=r"\(max_exp_avg_sq\) cannot be loaded"):
        found.load(tmp_path / "saved")
    assert not compared(found.tensors(), before)


def _groups(run: Run) -> list[dict[str, Any]]:
    from zerostd.checkpointing.saving import describe_optimizer

    entry = describe_optimizer(run.model.__dict__["_zerostd"], run.optimizer)
    groups: list[dict[str, Any]] = msgspec.to_builtins(entry.groups)
    return groups


def test_a_clock_that_is_set_back_changes_no_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = small(tmp_path)
    now = time.time()
    for number in range(4):
        monkeypatch.setattr(time, "time", lambda number=number: now - 3600 * number)
        run.save(tmp_path / f"save-{number}", keep=2)
        assert zerostd.latest(tmp_path) == str(tmp_path / f"save-{number}")
    monkeypatch.undo()
    assert sorted(os.listdir(tmp_path)) == ["save-2", "save-3"]


def test_keep_leaves_links_of_the_user_alone(tmp_path: Path) -> None:
    run = small(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    folder = tmp_path / "checkpoints"
    run.save(elsewhere / "best")
    run.save(folder / "step-0")
    (folder / "best").symlink_to(elsewhere / "best")
    (folder / "last").symlink_to("step-0")
    for step in range(1, 4):
        run.save(folder / f"step-{step}", keep=2)
    assert sorted(os.listdir(folder)) == ["best", "last", "step-2", "step-3"]
    assert (folder / "best").is_symlink() and (elsewhere / "best" / "manifest.json").exists()


def test_checkpoints_of_the_first_version_load_and_are_older(tmp_path: Path) -> None:
    run = small(tmp_path)
    run.save(tmp_path / "new")
    run.save(tmp_path / "old")
    data = json.loads((tmp_path / "old" / "manifest.json").read_text())
    del data["crc32"], data["sequence"]
    (tmp_path / "old" / "manifest.json").write_text(json.dumps({**data, "version": 1}))
    assert zerostd.latest(tmp_path) == str(tmp_path / "new")
    zerostd.load(tmp_path / "old", run.model, run.optimizer)
