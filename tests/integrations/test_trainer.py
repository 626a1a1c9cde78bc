"""Trainer with zerostd trains as Trainer without: curves, clipping, accumulation, checkpoints, the best model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerostd
from support.processes import doing

transformers = pytest.importorskip("transformers")
small = pytest.importorskip("integrations.small")
hf = pytest.importorskip("zerostd.integrations.transformers")

HOST = zerostd.Placement(optimizer_states="host")
ZEROS: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2, "placement": HOST},
    "stage 3": {"stage": 3},
    "stage 3 on the host": {
        "placement": zerostd.Placement(parameters="host", gradients="host", optimizer_states="host")
    },
}
HALFWAY = small.STEPS // 2
SAVING = {"save_strategy": "steps", "save_steps": HALFWAY}
LIMIT = 1e-5  # two ranks: only the order of sums may differ


class Outcome(NamedTuple):
    """What one training came to."""

    losses: list[float]
    norms: list[float]
    rates: list[float]
    state: dict[str, Tensor]
    wrapped: str  # the class of what Trainer called
    memory: dict[str, dict[str, int]]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    with small.fresh_accelerate():
        yield


def make(folder: Path, model: nn.Module, data: Any, zero: Any = None, **options: Any) -> Any:
    """Without `zero`: the Trainer of transformers."""
    args = small.arguments(folder, **options)
    evaluation = small.texts(8, seed=3)
    if zero is None:
        return transformers.Trainer(model, args, train_dataset=data, eval_dataset=evaluation)
    return hf.Trainer(model, args, train_dataset=data, eval_dataset=evaluation, zero=zero)


def outcome(trainer: Any) -> Outcome:
    prepared = isinstance(trainer, hf.Trainer)
    state = zerostd.full_state_dict(trainer.model) if prepared else trainer.model.state_dict()
    curves = (small.logged(trainer, what) for what in ("loss", "grad_norm", "learning_rate"))
    memory = zerostd.memory(trainer.model).now if prepared else {}
    wrapped = type(trainer.model_wrapped).__name__
    return Outcome(*curves, {name: value.clone() for name, value in state.items()}, wrapped, memory)


def train(folder: Path, model: nn.Module, data: Any, zero: Any = None, resume: Any = None, **options: Any) -> Outcome:
    trainer = make(folder, model, data, zero, **options)
    trainer.train(resume_from_checkpoint=resume)
    return outcome(trainer)


def assert_bitwise(outcome: Outcome, reference: Outcome) -> None:
    assert outcome.losses == reference.losses and len(outcome.losses) == small.STEPS
    assert small.farthest(outcome.state, reference.state) == 0.0


# -- one rank --


@pytest.mark.parametrize("make_model, data", [(small.gpt2, small.texts), (small.bert, small.sentences)])
def test_one_rank_is_bitwise_plain_without_clipping(make_model: Any, data: Any, tmp_path: Path) -> None:
    """max_grad_norm=0 clips nothing, but Trainer logs the norm."""
    plain = train(tmp_path, make_model(), data(), max_grad_norm=0.0)
    ours = train(tmp_path, make_model(), data(), {"stage": 3}, max_grad_norm=0.0)
    assert_bitwise(ours, plain)
    assert ours.norms == pytest.approx(plain.norms, rel=1e-5) and ours.rates == plain.rates
    assert small.farthest(plain.state, make_model().state_dict()) > 1e-2


class Watch(transformers.TrainerCallback):
    """Notes before each step whether its update has begun."""

    def __init__(self) -> None:
        self.begun: list[bool] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        self.begun.append(parts["optimizer"].optimizer.backward_updates.has_begun)


@pytest.mark.parametrize("most, waits", [(0.0, 1), (1e6, 2)], ids=["no clipping", "speculating"])
@pytest.mark.parametrize("passes", [1, 2])
def test_updates_begin_inside_backward(most: float, waits: int, passes: int, tmp_path: Path) -> None:
    """Trainer asks for the norm before each step and logs it. The first steps show how many passes make one, and
    whether clipping changes anything."""
    options = {"max_grad_norm": most, "gradient_accumulation_steps": passes}
    plain = train(tmp_path, small.gpt2(), small.texts(48), **options)
    placement = zerostd.Placement(optimizer_states="host", cpu_share=1.0, speculate=most > 0)
    zero = {"placement": placement, "groups": ["transformer.h.*"]}
    trainer = make(tmp_path, small.gpt2(), small.texts(48), zero, **options)
    watch = Watch()
    trainer.add_callback(watch)
    trainer.train()
    ours = outcome(trainer)
    assert_bitwise(ours, plain)
    assert ours.norms == pytest.approx(plain.norms, rel=1e-5)
    assert watch.begun == [False] * waits + [True] * (small.STEPS - waits)
    updates = trainer.optimizer.optimizer.backward_updates
    assert updates.num_committed == updates.num_speculated == (small.STEPS - waits if most else 0)


def test_clipping_is_trainers_own_setting(tmp_path: Path) -> None:
    plain, unclipped = (train(tmp_path, small.llama(), small.texts(), max_grad_norm=most) for most in (small.CLIP, 0.0))
    assert small.farthest(unclipped.state, plain.state) > 1e-3 and min(plain.norms) > small.CLIP
    for zero in ZEROS.values():
        ours = train(tmp_path, small.llama(), small.texts(), zero)
        assert ours.losses == pytest.approx(plain.losses, rel=1e-6)
        assert ours.norms == pytest.approx(plain.norms, rel=1e-5)
        assert small.farthest(ours.state, plain.state) < 1e-6


def test_states_rest_where_they_should(tmp_path: Path) -> None:
    memory = train(tmp_path, small.gpt2(), small.texts(), ZEROS["stage 2"]).memory
    num_bytes = 4 * sum(parameter.numel() for parameter in small.gpt2().parameters())
    assert memory["host"]["optimizer_states"] >= 2 * num_bytes
    assert "optimizer_states" not in memory["device"]


def test_bf16_of_trainer_is_autocast_as_ever(tmp_path: Path) -> None:
    plain = train(tmp_path, small.gpt2(), small.texts(), bf16=True, max_grad_norm=0.0)
    ours = train(tmp_path, small.gpt2(), small.texts(), {"stage": 3}, bf16=True, max_grad_norm=0.0)
    assert_bitwise(ours, plain)
    assert plain.losses != train(tmp_path, small.gpt2(), small.texts(), max_grad_norm=0.0).losses


def test_precision_of_zerostd_keeps_weights_in_bf16(tmp_path: Path) -> None:
    plain = train(tmp_path, small.gpt2(), small.texts())
    ours = train(tmp_path, small.gpt2(), small.texts(), {"stage": 3, "precision": "bf16"})
    assert ours.losses == pytest.approx(plain.losses, rel=1e-2)
    half = 2 * sum(parameter.numel() for parameter in small.gpt2().parameters())
    assert ours.memory["device"]["parameters"] == pytest.approx(half, rel=0.05)
    assert all(value.dtype == torch.float32 for value in ours.state.values())


def test_activations_may_be_recomputed(tmp_path: Path) -> None:
    options = {"gradient_checkpointing": True, "max_grad_norm": 0.0}
    plain = train(tmp_path, small.gpt2(), small.texts(), **options)
    assert_bitwise(train(tmp_path, small.gpt2(), small.texts(), {"stage": 3}, **options), plain)


@pytest.mark.parametrize("seedable", [True, False])
def test_a_resumed_run_equals_an_uninterrupted_one(seedable: bool, tmp_path: Path) -> None:
    """With dropout, a shuffled loader and a schedule: all of them go on, through Trainer's own call."""
    shuffled = {"accelerator_config": {"use_seedable_sampler": seedable}}  # or by torch's own random state
    options = {**SAVING, **shuffled, "gradient_accumulation_steps": 1 + seedable}
    whole = train(tmp_path, small.bert(), small.sentences(), ZEROS["stage 2"], **options)
    small.newest_checkpoint_gone(tmp_path, small.STEPS)
    resumed = train(tmp_path, small.bert(seed=7), small.sentences(), ZEROS["stage 3"], resume=True, **options)
    assert_bitwise(resumed, whole)  # the log of the first half is part of the checkpoint
    assert resumed.rates == whole.rates


def test_a_model_without_memory_has_its_values_from_the_checkpoint(tmp_path: Path) -> None:
    options = {**SAVING, "use_cpu": False}  # such a model goes to the accelerator, if there is one
    whole = train(tmp_path, small.bert(), small.sentences(), {"stage": 3}, **options)
    small.newest_checkpoint_gone(tmp_path, small.STEPS)
    with zerostd.empty_init():
        model = small.bert(seed=7)
    assert all(parameter.is_meta for parameter in model.parameters())
    resumed = train(tmp_path, model, small.sentences(), {"stage": 3}, resume=True, **options)
    assert resumed.losses == pytest.approx(whole.losses, rel=1e-6)
    assert small.farthest(resumed.state, whole.state) < 1e-6


def test_a_checkpoint_that_was_never_completed_is_passed_over(tmp_path: Path) -> None:
    whole = train(tmp_path, small.gpt2(), small.texts(), {"stage": 3}, **SAVING)
    (tmp_path / f"checkpoint-{small.STEPS}" / "trainer_state.json").unlink()  # Trainer writes it last
    resumed = train(tmp_path, small.gpt2(seed=7), small.texts(), {"stage": 3}, resume=True, **SAVING)
    assert_bitwise(resumed, whole)
    written = tmp_path / f"checkpoint-{small.STEPS}" / "zerostd"
    assert [path.name for path in written.iterdir()] == ["2"]  # in place of what the first run left


@pytest.mark.parametrize("only_model", [False, True])
def test_the_best_model_is_loaded_at_the_end(only_model: bool, tmp_path: Path) -> None:
    """The rate is zero in the first step and far too high afterwards."""
    often = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    best = {"load_best_model_at_end": True, "save_only_model": only_model, "save_total_limit": 1}
    options = {**often, **best, "learning_rate": 1.0}
    trainer = make(tmp_path, small.gpt2(), small.texts(), {"stage": 3}, **options)
    trainer.train()
    losses = small.logged(trainer, "eval_loss")
    assert losses[0] < min(losses[1:]) - 0.1, "nothing is shown"
    assert trainer.evaluate()["eval_loss"] == losses[0]
    assert small.farthest(outcome(trainer).state, small.gpt2().state_dict()) == 0.0
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]
    assert (tmp_path / "checkpoint-1" / "zerostd").exists() != only_model


def test_a_saved_model_is_an_ordinary_one(tmp_path: Path) -> None:
    trainer = make(tmp_path / "run", small.gpt2(), small.texts(), {"stage": 3})
    trainer.save_model(str(tmp_path / "before"))
    trainer.train()
    trainer.save_model(str(tmp_path / "after"))
    before, after = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name).eval() for name in ("before", "after")
    )
    assert small.farthest(before.state_dict(), small.gpt2().state_dict()) == 0.0
    batch = torch.stack([item["input_ids"] for item in small.texts(4)])
    trainer.model.eval()
    assert torch.equal(after(batch).logits, trainer.model(batch).logits)
    assert not torch.equal(after(batch).logits, before(batch).logits)


def test_trained_twice_and_evaluated_before(tmp_path: Path) -> None:
    """A second train() goes on with the prepared model, as Trainer does with its own; without options it is planned."""
    curves = []
    for zero in (None, {}):
        trainer = make(tmp_path, small.gpt2(), small.texts(), zero, max_grad_norm=0.0)
        curve = [trainer.evaluate()["eval_loss"]]
        for _ in range(2):
            trainer.train()
            curve += small.logged(trainer, "loss")
        curves.append([*curve, trainer.evaluate()["eval_loss"]])
    assert curves[0] == curves[1] and len(curves[0]) == 2 * small.STEPS + 2


def test_it_goes_in_front_of_other_trainers(tmp_path: Path) -> None:
    """Evaluation by generating, which calls parts of the model by themselves."""

    class Ours(hf.Trainer, transformers.Seq2SeqTrainer):
        pass

    config = transformers.T5Config(
        vocab_size=small.VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    chosen = {
        "output_dir": str(tmp_path),
        "max_steps": 2,
        "predict_with_generate": True,
        "generation_max_length": 6,
    }
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "save_strategy": "no"}
    generated = []
    for kind, zero in ((transformers.Seq2SeqTrainer, {}), (Ours, {"zero": {"stage": 3}})):
        model = small.seeded(lambda: transformers.T5ForConditionalGeneration(config))
        args = transformers.Seq2SeqTrainingArguments(**chosen, **quiet)
        trainer = kind(model, args, train_dataset=small.texts(), **zero)
        trainer.train()
        generated.append(torch.as_tensor(trainer.predict(small.texts(4)).predictions))
    assert torch.equal(*generated) and generated[0].shape[1] > 1


# -- what cannot be honoured --


@pytest.mark.parametrize("name", hf.REFUSED)
def test_what_trainer_would_do_itself_is_refused(name: str, tmp_path: Path) -> None:
    args = small.arguments(tmp_path)
    setattr(args, name, {"zero_optimization": {}} if name == "deepspeed" else True)
    with pytest.raises(zerostd.NotSupportedError, match=f"{name}="):
        hf.Trainer(small.gpt2(), args, zero={"stage": 3})


def test_buffers_follow_the_rule_of_ddp(tmp_path: Path) -> None:
    with pytest.raises(zerostd.NotSupportedError, match="ddp_broadcast_buffers"):
        hf.Trainer(small.gpt2(), small.arguments(tmp_path, ddp_broadcast_buffers=False), zero={"stage": 3})


@pytest.mark.parametrize(
    "zero, message, options",
    [
        ({"max_grad_norm": 1.0}, "max_grad_norm", {}),
        ({"accumulate": 2}, "gradient_accumulation_steps", {}),
        ({"stages": 3}, "'stages'", {}),
        ({"precision": "bf16"}, "one of the two", {"bf16": True}),
    ],
)
def test_what_is_asked_for_twice_is_refused(zero: Any, message: str, options: Any, tmp_path: Path) -> None:
    with pytest.raises(zerostd.PrepareError, match=message):
        hf.Trainer(small.gpt2(), small.arguments(tmp_path, **options), zero=zero)


def test_states_that_were_saved_without_zerostd_are_refused(tmp_path: Path) -> None:
    train(tmp_path, small.gpt2(), small.texts(), **SAVING)
    with pytest.raises(zerostd.CheckpointError, match="without zerostd"):
        train(tmp_path, small.gpt2(), small.texts(), {"stage": 3}, resume=True, **SAVING)


# -- two ranks --


def on_two_ranks(rank: int, folder: Path) -> dict[str, Outcome]:
    """Every scenario, since importing transformers is what takes long."""
    outcomes: dict[str, Outcome] = {}
    options = {"gradient_accumulation_steps": 2}
    with small.fresh_accelerate():
        doing("plain")
        outcomes["plain"] = train(folder, small.gpt2(), small.texts(), **options)
        for name, zero in ZEROS.items():
            doing(name)
            outcomes[name] = train(folder, small.gpt2(), small.texts(), zero, **options)
        doing("saving")
        trainer = make(folder / "run", small.gpt2(), small.texts(), {"stage": 3}, **options, **SAVING)
        trainer.train()
        trainer.save_model(str(folder / "model"))
        if rank == 0:
            small.newest_checkpoint_gone(folder / "run", small.STEPS)
        dist.barrier()
        doing("resuming")
        resumed = {"stage": 2, "placement": HOST}
        outcomes["resumed"] = train(
            folder / "run", small.gpt2(seed=7), small.texts(), resumed, resume=True, **options, **SAVING
        )
    return outcomes


@pytest.fixture(scope="module")
def of_two(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Outcome]]]:
    folder = tmp_path_factory.mktemp("two")
    return folder, ranks(2, on_two_ranks, folder)


@pytest.mark.parametrize("name", ZEROS)
def test_two_ranks_train_as_ddp(name: str, of_two: Any) -> None:
    for outcomes in of_two[1]:
        plain = outcomes["plain"]
        ours = outcomes[name]
        assert (plain.wrapped, ours.wrapped) == ("DistributedDataParallel", "GPT2LMHeadModel")
        assert ours.losses == pytest.approx(plain.losses, rel=LIMIT)
        assert ours.norms == pytest.approx(plain.norms, rel=LIMIT) and min(plain.norms) > small.CLIP
        assert small.farthest(ours.state, plain.state) < LIMIT
    assert small.farthest(plain.state, small.gpt2().state_dict()) > 100 * LIMIT


def test_two_ranks_share_what_their_stage_says(of_two: Any) -> None:
    whole = 4 * sum(parameter.numel() for parameter in small.gpt2().parameters())
    for outcomes in of_two[1]:
        assert outcomes["stage 2"].memory["device"]["parameters"] == pytest.approx(whole, rel=0.05)
        assert outcomes["stage 3"].memory["device"]["parameters"] == pytest.approx(whole / 2, rel=0.05)
        assert outcomes["stage 3"].memory["device"]["optimizer_states"] == pytest.approx(whole, rel=0.05)
        assert outcomes["stage 3 on the host"].memory["host"]["optimizer_states"] >= 0.95 * whole


def test_two_ranks_resume_through_trainers_own_call(of_two: Any) -> None:
    for outcomes in of_two[1]:
        assert outcomes["resumed"].losses == pytest.approx(outcomes["stage 3"].losses, rel=1e-6)
        assert small.farthest(outcomes["resumed"].state, outcomes["stage 3"].state) < 1e-6


def test_what_two_ranks_saved_is_an_ordinary_model(of_two: Any) -> None:
    folder, (outcomes, _) = of_two
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    assert small.farthest(model.state_dict(), outcomes["stage 3"].state) == 0.0
    assert model.lm_head.weight is model.transformer.wte.weight


def test_one_rank_goes_on_from_what_two_saved(of_two: Any) -> None:
    folder, (outcomes, _) = of_two
    checkpoint = folder / "run" / f"checkpoint-{small.STEPS}"
    assert json.loads((checkpoint / "trainer_state.json").read_text())["global_step"] == small.STEPS
    trainer = make(folder / "one", small.gpt2(seed=7), small.texts(), {"stage": 3}, max_steps=small.STEPS)
    trainer.train(resume_from_checkpoint=str(checkpoint))  # the rate is zero now: nothing changes
    assert small.farthest(outcome(trainer).state, outcomes["resumed"].state) == 0.0
