"""LoRA by peft: the frozen base is sharded, adapters train as without zerostd, and are saved as ordinary adapters.

Also a real small transformer, fine-tuned whole and by LoRA, and saved back as it came.
"""

from __future__ import annotations

import json
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zerostd
from support.processes import doing

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
small = pytest.importorskip("integrations.small")
hf = pytest.importorskip("zerostd.integrations.transformers")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LIMIT = 1e-5  # two ranks: only the order of sums may differ
RANK = 4  # of the adapters' matrices


class Outcome(NamedTuple):
    """What one training came to."""

    losses: list[float]
    state: dict[str, Tensor]
    memory: dict[str, dict[str, int]]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    with small.fresh_accelerate():
        yield


def lora(base: nn.Module, **options: Any) -> nn.Module:
    """The model with adapters in its attention, the same ones each time."""
    config = peft.LoraConfig(r=RANK, lora_alpha=8, **options)
    return small.seeded(lambda: peft.get_peft_model(base, config))


def lora_llama() -> nn.Module:
    return lora(small.llama(), target_modules=["q_proj", "v_proj"])


def lora_bert() -> nn.Module:
    return lora(small.bert(), task_type="SEQ_CLS", target_modules=["query", "value"])


def frozen(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}


def train_by_hand(rank: int = 0, num_ranks: int = 1, **zero: Any) -> Outcome:
    """A plain loop, through zerostd.prepare if there are options for it."""
    model = lora_llama()
    inner = model if zero or num_ranks == 1 else DistributedDataParallel(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: Any = torch.optim.AdamW(trained, lr=5e-2, eps=1e-3)
    if zero:
        inner, optimizer = zerostd.prepare(model, optimizer, **zero)
    rows = torch.stack([item["input_ids"] for item in small.texts(4 * num_ranks)])
    losses = []
    for _ in range(small.STEPS):
        batch = rows[rank::num_ranks]
        loss = inner(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = zerostd.full_state_dict(model) if zero else model.state_dict()
    memory = zerostd.memory(model).now if zero else {}
    return Outcome(losses, {name: value.clone() for name, value in state.items()}, memory)


# -- one rank --


def test_plain_prepare_trains_adapters_bitwise() -> None:
    plain = train_by_hand()
    ours = train_by_hand(stage=3)
    assert ours.losses == plain.losses and plain.losses[-1] < plain.losses[0] - 0.01
    assert small.farthest(ours.state, plain.state) == 0.0
    base = frozen(lora_llama())
    assert small.farthest({name: ours.state[name] for name in base}, base) == 0.0


def test_trainer_saves_resumes_and_chooses_adapters(tmp_path: Path) -> None:
    """All in one run: clipping, checkpoints of a frozen base with adapters, the best of them at the end."""
    often = {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3, "learning_rate": 0.1}
    options = {**often, "load_best_model_at_end": True, "max_grad_norm": 0.1}
    data = small.texts()
    evaluation = small.texts(8, seed=3)

    def train(folder: Path, kind: Any, resume: Any = None, **zero: Any) -> Any:
        args = small.arguments(folder, **options)
        trainer = kind(lora_llama(), args, train_dataset=data, eval_dataset=evaluation, **zero)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    plain = train(tmp_path / "plain", transformers.Trainer)
    whole = train(tmp_path / "ours", hf.Trainer, zero={"stage": 3})
    assert small.logged(whole, "loss") == pytest.approx(small.logged(plain, "loss"), rel=1e-5)
    assert min(small.logged(plain, "grad_norm")) > 0.1
    assert whole.state.best_global_step == plain.state.best_global_step
    assert small.farthest(zerostd.full_state_dict(whole.model), plain.model.state_dict()) < LIMIT
    small.newest_checkpoint_gone(tmp_path / "ours", small.STEPS)
    resumed = train(tmp_path / "ours", hf.Trainer, True, zero={"stage": 2})
    assert small.logged(resumed, "loss") == small.logged(whole, "loss")
    saved = next((tmp_path / "ours").glob("checkpoint-*/zerostd/**/manifest.json"))
    kept = {tensor["of"] for tensor in json.loads(saved.read_text())["tensors"] if tensor["kind"] == "parameter"}
    assert kept == {name for name, parameter in resumed.model.named_parameters() if parameter.requires_grad}
    resumed.save_model(str(tmp_path / "adapter"))
    assert not (tmp_path / "adapter" / "model.safetensors").exists()  # the adapter alone
    assert_same_outputs(peft.PeftModel.from_pretrained(small.llama(), tmp_path / "adapter"), resumed.model)


def assert_same_outputs(loaded: nn.Module, trained: nn.Module) -> None:
    batch = torch.stack([item["input_ids"] for item in small.texts(4)])
    loaded.eval(), trained.eval()
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=batch).logits, trained(input_ids=batch).logits)


# -- two ranks --


def on_two_ranks(rank: int, folder: Path) -> dict[str, Any]:
    """Every scenario, since importing peft is what takes long."""
    outcomes: dict[str, Any] = {"plain": train_by_hand(rank, 2)}
    for stage in (2, 3):
        doing(f"stage {stage}")
        outcomes[f"stage {stage}"] = train_by_hand(rank, 2, stage=stage)
    with small.fresh_accelerate():
        doing("Trainer")
        args = small.arguments(folder / "run", max_steps=3)
        trainer = hf.Trainer(lora_bert(), args, train_dataset=small.sentences(), zero={"stage": 3})
        trainer.train()
        trainer.save_model(str(folder / "adapter"))
        outcomes["trainer"] = zerostd.full_state_dict(trainer.model)
        with zerostd.gathered(trainer.model):
            outcomes["gathered"] = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    return outcomes


@pytest.fixture(scope="module")
def of_two(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("two")
    return folder, ranks(2, on_two_ranks, folder)


@pytest.mark.parametrize("name", ["stage 2", "stage 3"])
def test_two_ranks_train_adapters_as_ddp(name: str, of_two: Any) -> None:
    for outcomes in of_two[1]:
        assert outcomes[name].losses == pytest.approx(outcomes["plain"].losses, rel=LIMIT)
        assert small.farthest(outcomes[name].state, outcomes["plain"].state) < LIMIT
    assert small.farthest(outcomes["plain"].state, lora_llama().state_dict()) > 100 * LIMIT


def test_the_frozen_base_is_sharded_and_has_no_states(of_two: Any) -> None:
    model = lora_llama()
    num_all, num_trained = (
        sum(p.numel() for p in model.parameters() if p.requires_grad or of_all) for of_all in (True, False)
    )
    for outcomes in of_two[1]:
        held = outcomes["stage 3"].memory["device"]
        assert held["parameters"] == pytest.approx(4 * num_all / 2, rel=0.1)
        assert held["optimizer_states"] < 3 * 4 * num_trained


def test_an_adapter_of_two_ranks_is_an_ordinary_one(of_two: Any) -> None:
    """With a classifier beside LoRA's matrices, which is trained and saved whole."""
    folder, (outcomes, on_rank_1) = of_two
    loaded = peft.PeftModel.from_pretrained(small.bert(), folder / "adapter")
    assert small.farthest(loaded.state_dict(), outcomes["trainer"]) == 0.0
    assert small.farthest(outcomes["trainer"], lora_bert().state_dict()) > 1e-3
    assert small.farthest(outcomes["gathered"], outcomes["trainer"]) == 0.0
    assert small.farthest(on_rank_1["gathered"], outcomes["trainer"]) == 0.0


# -- a real transformer --


def real_model() -> nn.Module:
    make = transformers.AutoModelForSequenceClassification.from_pretrained
    return small.seeded(lambda: make(small.packaged(), num_labels=2))


def fine_tune(folder: Path, model: nn.Module, zero: Any) -> Any:
    args = small.arguments(folder, max_steps=4, warmup_steps=0, learning_rate=1e-3, max_grad_norm=1.0)
    kind, more = (transformers.Trainer, {}) if zero is None else (hf.Trainer, {"zero": zero})
    trainer = kind(model, args, train_dataset=small.reviews(), **more)
    trainer.train()
    return trainer


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        batch = {
            name: torch.tensor([item[name] for item in small.reviews(4)]) for name in ("input_ids", "attention_mask")
        }
        return model.eval()(**batch).logits


def test_a_real_transformer_is_fine_tuned_and_saved_as_it_came(tmp_path: Path) -> None:
    plain = fine_tune(tmp_path / "run", real_model(), None)
    host = zerostd.Placement(optimizer_states="host")
    ours = fine_tune(tmp_path / "run", real_model(), {"stage": 3, "placement": host})
    assert small.logged(ours, "loss") == pytest.approx(small.logged(plain, "loss"), rel=1e-5)
    ours.save_model(str(tmp_path / "tuned"))
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "tuned")
    assert torch.equal(logits(loaded), logits(ours.model))
    assert not torch.allclose(logits(loaded), logits(real_model()), atol=1e-2)


def test_a_real_transformer_learns_by_lora(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return lora(real_model(), task_type="SEQ_CLS", target_modules=["query", "value"])

    plain = fine_tune(tmp_path / "run", make(), None)
    ours = fine_tune(tmp_path / "run", make(), {"stage": 3})
    assert small.logged(ours, "loss") == pytest.approx(small.logged(plain, "loss"), rel=1e-5)
    ours.save_model(str(tmp_path / "adapter"))
    loaded = peft.PeftModel.from_pretrained(real_model(), tmp_path / "adapter")
    assert torch.equal(logits(loaded), logits(ours.model))
    assert not torch.allclose(logits(loaded), logits(real_model()), atol=1e-3)


def test_the_example_teaches_by_lora(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small.packaged()
    monkeypatch.setattr(sys, "argv", ["lora.py", "--quick", "--out", str(tmp_path)])
    runpy.run_path(str(EXAMPLES / "lora.py"), run_name="__main__")
    printed = capsys.readouterr().out
    before, after = map(float, re.findall(r"new words: ([0-9.]+)% before, ([0-9.]+)% after", printed)[0])
    assert before < 80 < 90 < after
    (loaded,) = re.findall(r"loaded by peft: ([0-9.]+)%", printed)
    assert float(loaded) == after
    assert (tmp_path / "adapter" / "adapter_config.json").exists()
