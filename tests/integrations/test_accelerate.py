"""A loop under accelerate trains with zerostd as without, and its calls do the right thing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

import zerostd
from support.processes import doing

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")
small = pytest.importorskip("integrations.small")
hf = pytest.importorskip("zerostd.integrations.accelerate")

ACCUMULATE = 2
BATCH = 2
ITEMS = 20  # five passes of two ranks: the last step of an epoch is one pass
HOST = zerostd.Placement(optimizer_states="host")
ZEROS: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2, "placement": HOST},
    "stage 3": {"stage": 3},
}
LIMIT = 1e-5  # two ranks: only the order of sums may differ


class Parts(NamedTuple):
    """What a script has in its hands."""

    accelerator: Any
    model: nn.Module
    optimizer: Any
    loader: Any
    scheduler: Any


class Outcome(NamedTuple):
    """What one training came to."""

    losses: list[float]
    norms: list[float]
    rates: list[float]
    state: dict[str, Tensor]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    with small.fresh_accelerate():
        yield


def make(zero: Any = None, model: nn.Module | None = None, **options: Any) -> Parts:
    """The same script, but for the class of its Accelerator. Without `zero`: accelerate's own."""
    torch.manual_seed(0)
    by_epoch = accelerate.DataLoaderConfiguration(use_seedable_sampler=True)
    arguments = {"gradient_accumulation_steps": ACCUMULATE, "cpu": True, "dataloader_config": by_epoch, **options}
    accelerator = accelerate.Accelerator(**arguments) if zero is None else hf.Accelerator(**arguments, zero=zero)
    model = small.gpt2() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=small.EPS)
    loader = DataLoader(small.texts(ITEMS), batch_size=BATCH, shuffle=True)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=8)
    return Parts(accelerator, *accelerator.prepare(model, optimizer, loader, scheduler))


def run(parts: Parts, epochs: Sequence[int] = (0, 1), clip: float | None = small.CLIP) -> Outcome:
    """The loop, as accelerate's own documentation has it."""
    outcome = Outcome([], [], [], {})
    accelerator, model, optimizer, loader, scheduler = parts
    for epoch in epochs:
        loader.set_epoch(epoch)
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients and clip is not None:
                    outcome.norms.append(float(accelerator.clip_grad_norm_(model.parameters(), clip)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            outcome.losses.append(float(accelerator.gather(loss.detach()).mean()))
            outcome.rates.append(optimizer.param_groups[0]["lr"])
    return outcome._replace(state=whole(parts))


def whole(parts: Parts) -> dict[str, Tensor]:
    is_ours = isinstance(parts.accelerator, hf.Accelerator)
    state = (
        zerostd.full_state_dict(parts.model) if is_ours else parts.accelerator.unwrap_model(parts.model).state_dict()
    )
    return {name: value.clone() for name, value in state.items()}


# -- one rank --


def test_one_rank_is_bitwise_plain_without_clipping() -> None:
    plain = run(make(), clip=None)
    ours = run(make({"stage": 3}), clip=None)
    assert ours.losses == plain.losses and ours.rates == plain.rates and len(set(plain.rates)) > 5
    assert small.farthest(ours.state, plain.state) == 0.0
    assert small.farthest(plain.state, small.gpt2().state_dict()) > 1e-2


def test_a_loop_that_clips_speculates_if_prepare_knows_the_norm() -> None:
    """As many steps as there are batches, so that the number of passes does not vary."""
    placement = zerostd.Placement(optimizer_states="host", cpu_share=1.0, speculate=True)
    zero = {"placement": placement, "groups": ["transformer.h.*"], "accumulate": 1, "max_grad_norm": 1e6}
    plain = run(make(gradient_accumulation_steps=1), clip=1e6)
    parts = make(zero, gradient_accumulation_steps=1)
    ours = run(parts, clip=1e6)
    assert ours.losses == plain.losses and small.farthest(ours.state, plain.state) == 0.0
    assert ours.norms == pytest.approx(plain.norms, rel=1e-5)
    assert parts.optimizer.optimizer.backward_updates.num_committed == len(ours.norms) - 2


@pytest.mark.parametrize("zero", ZEROS.values(), ids=ZEROS)
def test_clipping_is_the_accelerators_own_call(zero: Any) -> None:
    plain = run(make())
    ours = run(make(zero))
    assert ours.losses == pytest.approx(plain.losses, rel=1e-6)
    assert ours.norms == pytest.approx(plain.norms, rel=1e-5) and min(plain.norms) > small.CLIP
    assert small.farthest(ours.state, plain.state) < 1e-6


def test_mixed_precision_is_autocast_as_ever() -> None:
    plain = run(make(mixed_precision="bf16"), [0], clip=None)
    with small.fresh_accelerate():
        ours = run(make({"stage": 3}, mixed_precision="bf16"), [0], clip=None)
    with small.fresh_accelerate():
        exact = run(make(), [0], clip=None)
    assert ours.losses == plain.losses != exact.losses
    assert small.farthest(ours.state, plain.state) == 0.0


def test_part_of_the_parameters_can_be_clipped() -> None:
    """Not the whole of an optimizer's: torch's own arithmetic, through gradients that are handles."""
    states = []
    for zero in (None, {"stage": 3}):
        parts = make(zero, gradient_accumulation_steps=1)
        batch = next(iter(parts.loader))
        parts.accelerator.backward(parts.model(**batch).loss)
        norm = parts.accelerator.clip_grad_norm_(parts.model.transformer.wte.parameters(), 0.1)
        parts.optimizer.step()
        states.append({"norm": torch.as_tensor(float(norm)), **whole(parts)})
    assert small.farthest(*states) < 1e-6 and states[0]["norm"] > 0.1


def test_a_state_that_is_saved_goes_on(tmp_path: Path) -> None:
    parts = make(ZEROS["stage 2"])
    run(parts, [0])
    for _ in range(2):  # the second in place of the first
        parts.accelerator.save_state(str(tmp_path / "state"))
    expected = run(parts, [1])
    again = make(ZEROS["stage 3"], small.gpt2(seed=7))
    again.accelerator.load_state(str(tmp_path / "state"))
    resumed = run(again, [1])
    assert resumed.rates == expected.rates
    assert resumed.losses == expected.losses and small.farthest(resumed.state, expected.state) == 0.0
    assert [path.name for path in (tmp_path / "state" / "zerostd").iterdir()] == ["2"]


def test_states_are_named_and_found_by_accelerate(tmp_path: Path) -> None:
    """With automatic names load_state finds the newest by itself; objects of the user's own are in it."""
    naming = accelerate.utils.ProjectConfiguration(
        project_dir=str(tmp_path), automatic_checkpoint_naming=True, total_limit=2
    )
    parts = make({"stage": 3}, project_config=naming)
    counter = nn.BatchNorm1d(2)
    parts.accelerator.register_for_checkpointing(counter)
    for number in range(3):
        run(parts, [0])
        counter.num_batches_tracked.fill_(number)
        parts.accelerator.save_state()
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    expected = whole(parts)
    assert kept == ["checkpoint_1", "checkpoint_2"]
    run(parts, [0])
    counter.num_batches_tracked.fill_(9)
    parts.accelerator.load_state()
    assert small.farthest(whole(parts), expected) == 0.0 and counter.num_batches_tracked == 2


def test_a_saved_model_is_an_ordinary_one(tmp_path: Path) -> None:
    parts = make({"stage": 3})
    accelerator = parts.accelerator
    model = parts.model
    run(parts, [0])
    assert accelerator.unwrap_model(model) is model
    accelerator.save_model(model, tmp_path / "plain")
    loaded = small.gpt2(seed=7)
    accelerate.load_checkpoint_in_model(loaded, tmp_path / "plain")
    assert small.farthest(loaded.state_dict(), whole(parts)) == 0.0
    model.save_pretrained(tmp_path / "hf", state_dict=accelerator.get_state_dict(model))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert small.farthest(loaded.state_dict(), whole(parts)) == 0.0


def test_two_models_and_a_frozen_one(tmp_path: Path) -> None:
    """Each model with its own optimizer, in any order; one without training is placed and left as it is."""
    accelerator = hf.Accelerator(cpu=True, zero={"stage": 3})
    first = nn.Linear(4, 4)
    second = nn.Linear(4, 2)
    teacher = nn.Linear(4, 2).requires_grad_(False)
    of_second = torch.optim.SGD(second.parameters(), lr=0.1)
    of_first = torch.optim.SGD(first.parameters(), lr=0.1)
    of_second, given_teacher, of_first, given_first, given_second = accelerator.prepare(
        of_second, teacher, of_first, first, second
    )
    assert (given_first, given_second, given_teacher) == (first, second, teacher)
    assert (accelerator.optimizer_of(first), accelerator.optimizer_of(second)) == (of_first, of_second)
    accelerator.save_state(str(tmp_path / "state"))
    before = zerostd.full_state_dict(second)
    accelerator.backward(second(first(torch.ones(3, 4))).square().sum())
    of_first.step()
    of_second.step()
    assert small.farthest(zerostd.full_state_dict(second), before) > 0
    accelerator.load_state(str(tmp_path / "state"))
    assert small.farthest(zerostd.full_state_dict(second), before) == 0.0


def test_a_step_that_overflows_is_told_to_the_schedule() -> None:
    """precision='fp16' leaves the step out, and accelerate's scheduler waits."""
    parts = make({"stage": 3, "precision": "fp16"}, gradient_accumulation_steps=1)
    batch = next(iter(parts.loader))
    before = parts.optimizer.param_groups[0]["lr"]
    parts.accelerator.backward(parts.model(**batch).loss * torch.inf)
    parts.optimizer.step()
    parts.scheduler.step()
    assert parts.accelerator.optimizer_step_was_skipped
    assert parts.optimizer.param_groups[0]["lr"] == before
    parts.optimizer.zero_grad()
    for _ in range(8):  # until the loss scale has come down
        parts.accelerator.backward(parts.model(**batch).loss)
        parts.optimizer.step()
        parts.scheduler.step()
        parts.optimizer.zero_grad()
    assert not parts.accelerator.optimizer_step_was_skipped
    assert parts.optimizer.param_groups[0]["lr"] < before


# -- what cannot be honoured --


def test_what_would_be_done_twice_is_refused() -> None:
    for options, error, message in (
        ({"zero": {"stages": 3}}, zerostd.PrepareError, "'stages'"),
        ({"zero": {"precision": "bf16"}, "mixed_precision": "bf16"}, zerostd.PrepareError, "one of the two"),
        ({"zero": {"stage": 3}, "mixed_precision": "fp16"}, zerostd.NotSupportedError, "scales the loss automatically"),
        (
            {"kwargs_handlers": [accelerate.DistributedDataParallelKwargs()]},
            zerostd.NotSupportedError,
            "does not use DDP",
        ),
        ({"zero": {"stage": 3}, "dynamo_backend": "eager"}, zerostd.NotSupportedError, "torch.compile"),
    ):
        with small.fresh_accelerate(), pytest.raises(error, match=message):
            hf.Accelerator(cpu=True, **options)


def test_processes_that_accelerate_does_not_see_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without accelerators and without cpu=True accelerate takes each for a world of its own."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(zerostd.PrepareError, match=r"started 2 processes.*cpu=True"):
        hf.Accelerator(zero={"stage": 3})


def test_a_model_or_an_optimizer_alone_is_refused() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator = hf.Accelerator(cpu=True, zero={"stage": 3})
    for alone in ((model,), (optimizer,), (model, torch.optim.SGD(nn.Linear(2, 2).parameters()))):
        with pytest.raises(zerostd.MisuseError, match="one call"):
            accelerator.prepare(*alone)
    with pytest.raises(zerostd.NotSupportedError, match="param_groups of one optimizer"):
        accelerator.prepare(model, optimizer, torch.optim.SGD(model.parameters()))
    for call, argument in ((accelerator.prepare_model, model), (accelerator.prepare_optimizer, optimizer)):
        with pytest.raises(zerostd.MisuseError, match="one call"):
            call(argument)
    accelerator.prepare(model, optimizer)  # nothing was changed by what was refused


def test_a_state_without_shards_is_refused(tmp_path: Path) -> None:
    plain = make()
    plain.accelerator.save_state(str(tmp_path / "state"))
    ours = make({"stage": 3})
    run(ours, [0])
    before = ours.scheduler.state_dict()
    with pytest.raises(zerostd.CheckpointError, match="without zerostd"):
        ours.accelerator.load_state(str(tmp_path / "state"))
    assert ours.scheduler.state_dict() == before  # nothing was changed


# -- two ranks --


def on_two_ranks(rank: int, folder: Path) -> dict[str, Any]:
    """Every scenario, since importing accelerate is what takes long."""
    outcomes: dict[str, Any] = {}
    for name, zero in {"plain": None, **ZEROS}.items():
        with small.fresh_accelerate():
            doing(name)
            parts = make(zero)
            outcomes[name] = run(parts)
            outcomes[f"{name} wrapped"] = type(parts.model).__name__
    with small.fresh_accelerate():
        doing("saving")
        parts = make({"stage": 3})
        run(parts, [0])
        parts.accelerator.save_state(str(folder / "state"))
        outcomes["expected"] = run(parts, [1])
        parts.accelerator.save_model(parts.model, folder / "plain")
        state = parts.accelerator.get_state_dict(parts.model)
        outcomes["keys"] = len(state)
        parts.model.save_pretrained(folder / "hf", is_main_process=parts.accelerator.is_main_process, state_dict=state)
        doing("resuming")
        again = make(ZEROS["stage 2"], small.gpt2(seed=7))
        again.accelerator.load_state(str(folder / "state"))
        outcomes["resumed"] = run(again, [1])
        dist.barrier()
    return outcomes


@pytest.fixture(scope="module")
def of_two(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("two")
    return folder, ranks(2, on_two_ranks, folder)


@pytest.mark.parametrize("name", ZEROS)
def test_two_ranks_train_as_ddp(name: str, of_two: Any) -> None:
    for outcomes in of_two[1]:
        plain = outcomes["plain"]
        ours = outcomes[name]
        assert (outcomes["plain wrapped"], outcomes[f"{name} wrapped"]) == (
            "DistributedDataParallel",
            "GPT2LMHeadModel",
        )
        assert ours.losses == pytest.approx(plain.losses, rel=LIMIT) and ours.rates == plain.rates
        assert ours.norms == pytest.approx(plain.norms, rel=LIMIT) and min(plain.norms) > small.CLIP
        assert len(plain.norms) == 6  # two epochs of five passes: 2 + 2 + 1
        assert small.farthest(ours.state, plain.state) < LIMIT
    assert small.farthest(plain.state, small.gpt2().state_dict()) > 100 * LIMIT


def test_two_ranks_go_on_from_what_they_saved(of_two: Any) -> None:
    for outcomes in of_two[1]:
        assert outcomes["resumed"].losses == pytest.approx(outcomes["expected"].losses, rel=1e-6)
        assert outcomes["resumed"].rates == outcomes["expected"].rates
        assert small.farthest(outcomes["resumed"].state, outcomes["expected"].state) < 1e-6


def test_what_two_ranks_saved_is_an_ordinary_model(of_two: Any) -> None:
    folder, outcomes = of_two
    assert outcomes[0]["keys"] == len(small.gpt2().state_dict()) and outcomes[1]["keys"] == 0
    merged = small.gpt2(seed=7)
    accelerate.load_checkpoint_in_model(merged, folder / "plain")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf")
    for model in (merged, loaded):
        assert small.farthest(model.state_dict(), outcomes[0]["expected"].state) == 0.0
