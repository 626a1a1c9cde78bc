"""Lightning's Trainer and Fabric train with zerostd as without, and their calls do the right thing."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import zerostd

lightning = pytest.importorskip("lightning")
zl = pytest.importorskip("zerostd.integrations.lightning")
zf = pytest.importorskip("zerostd.integrations.fabric")
callbacks = pytest.importorskip("lightning.pytorch.callbacks")

TESTS = Path(__file__).parents[1]
CLIP = 0.05
EPOCHS = 2
BATCH = 4
ACCUMULATE = 2
EPS = 1e-2  # of Adam, of the gradients' size: a wrong scale of theirs shows, and the order of sums does not
LIMIT = 1e-5  # two ranks: only the order of sums may differ
HOST = zerostd.Placement(optimizer_states="host")
ZEROS: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2, "placement": HOST},
    "stage 3": {"stage": 3},
}


class Classifier(lightning.LightningModule):
    """Batch-norm, tied weights, a parameter of its own; training calls itself, validation its parts."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.body = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, width))
        self.head = nn.Linear(width, width)
        self.head.weight = self.body[3].weight
        self.scale = nn.Parameter(torch.ones(width))
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.wrapped = ""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)) * self.scale

    def training_step(self, batch: Any, index: int) -> Tensor:
        self.wrapped = type(self.trainer.model).__name__
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        self.losses.append(loss.item())
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        scores = self.head(self.body(batch[0])) * self.scale
        self.log("quality", F.cross_entropy(scores, batch[1]), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any, index: int) -> Tensor:
        return self(batch[0]).argmax(1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=EPS, weight_decay=0.1)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5), "interval": "step"}]


class Outcome(NamedTuple):
    """What one training came to."""

    losses: list[float]
    rates: list[float]
    logged: dict[str, float]
    state: dict[str, Tensor]
    trainer: Any
    module: Classifier


def items(count: int = 40) -> TensorDataset:
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.argmax(1))


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def make(folder: Path, zero: Any = None, **options: Any) -> Any:
    """A Trainer on the ranks that there are. Without `zero`: Lightning's DDP."""
    defaults: dict[str, Any] = {
        "strategy": "ddp" if zero is None else zl.ZeroStrategy(**zero) if isinstance(zero, dict) else zero,
        "accelerator": "cpu",
        "devices": world_size(),
        "max_epochs": EPOCHS,
        "gradient_clip_val": CLIP,
        "accumulate_grad_batches": ACCUMULATE,
        "default_root_dir": folder,
        "enable_checkpointing": "callbacks" in options,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return lightning.Trainer(**{**defaults, **options})


def fit(trainer: Any, seed: int = 0, path: Any = None, kind: type[Classifier] = Classifier) -> Outcome:
    lightning.seed_everything(0, verbose=False)  # the order of samples
    torch.manual_seed(seed)
    module = kind()
    trainer.fit(module, DataLoader(items(), BATCH, shuffle=True), DataLoader(items(16), BATCH), ckpt_path=path)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return Outcome(list(module.losses), list(module.rates), logged, whole(trainer), trainer, module)


def whole(trainer: Any) -> dict[str, Tensor]:
    model = trainer.strategy.model
    state = zerostd.full_state_dict(model) if isinstance(model, zf.Root) else trainer.lightning_module.state_dict()
    return {name: value.clone() for name, value in state.items()}


def farthest(state: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    assert state.keys() == reference.keys()
    return max(float((state[name].double() - reference[name].double()).abs().max()) for name in state)


def keep_all(folder: Path, **options: Any) -> Any:
    return callbacks.ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, **options)


@contextlib.contextmanager
def as_it_was() -> Iterator[None]:
    """Lightning starts a process group and writes into the environment, and tests live longer than that."""
    environment = dict(os.environ)
    had_group = dist.is_initialized()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        if dist.is_initialized() and not had_group:
            dist.destroy_process_group()


@pytest.fixture(scope="module", autouse=True)
def clean() -> Iterator[None]:
    with as_it_was():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lightning")


@pytest.fixture(scope="module")
def plain(folder: Path) -> Outcome:
    return fit(make(folder))


@pytest.fixture(scope="module")
def ours(folder: Path) -> Outcome:
    """Stage 3, with a checkpoint of every epoch."""
    return fit(make(folder, {"stage": 3}, callbacks=[keep_all(folder / "ours", save_last=True)]))


class Watched(Classifier):
    """Notes before each step whether its update has begun."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[bool] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        updates = self.trainer.strategy.model.optimizer.backward_updates
        self.begun.append(updates is not None and updates.has_begun)


def watch(folder: Path, **options: Any) -> tuple[list[bool], Outcome]:
    zero = {"placement": zerostd.Placement(optimizer_states="host", cpu_share=1.0, speculate=True), "groups": ["*"]}
    if not options.get("gradient_clip_val", CLIP):
        zero["placement"] = zerostd.Placement(optimizer_states="host", cpu_share=1.0)
    outcome = fit(make(folder, {**zero, **options.pop("zero", {})}, **options), kind=Watched)
    assert isinstance(outcome.module, Watched)
    return outcome.module.begun, outcome


@pytest.mark.parametrize("clip, waits", [(0.0, 1), (1e6, 2)], ids=["no clipping", "speculating"])
def test_updates_begin_inside_backward(clip: float, waits: int, folder: Path) -> None:
    """Lightning clips between backward and step. The first steps show how many passes make one, and whether clipping
    changes anything."""
    plain = fit(make(folder, gradient_clip_val=clip))
    begun, ours = watch(folder, gradient_clip_val=clip)
    assert ours.losses == plain.losses and farthest(ours.state, plain.state) == 0.0
    assert begun == [False] * waits + [True] * (EPOCHS * 5 - waits)


@pytest.mark.parametrize(
    "options",
    [{"zero": {"accumulate": None}}, {"callbacks": [callbacks.GradientAccumulationScheduler({0: 2, 1: 1})]}],
    ids=["as was asked for", "steps of different lengths"],
)
def test_updates_wait_for_the_step(options: Any, folder: Path) -> None:
    if "callbacks" in options:
        options = {**options, "accumulate_grad_batches": 1}
    begun, _ = watch(folder, gradient_clip_val=0.0, **options)
    assert begun and not any(begun)


# -- one rank --


def test_one_rank_is_bitwise_plain_without_clipping(folder: Path, plain: Outcome) -> None:
    without, ours = (fit(make(folder, zero, gradient_clip_val=None)) for zero in (None, "zerostd"))
    assert isinstance(ours.trainer.strategy, zl.ZeroStrategy) and isinstance(ours.trainer.model, zf.Root)
    assert ours.losses == without.losses and len(ours.losses) == 2 * 10
    assert farthest(ours.state, without.state) == 0.0
    assert farthest(plain.state, without.state) > 1e-3  # the clipping below bites


@pytest.mark.parametrize("zero", ZEROS.values(), ids=ZEROS)
def test_clipping_accumulation_schedule_and_logs_are_lightnings(zero: Any, folder: Path, plain: Outcome) -> None:
    ours = fit(make(folder, zero))
    assert ours.losses == pytest.approx(plain.losses, rel=1e-6)
    assert ours.rates == plain.rates and len(set(plain.rates)) > 2
    assert ours.logged == pytest.approx(plain.logged, rel=1e-6) and set(plain.logged) >= {"loss_epoch", "quality"}
    assert farthest(ours.state, plain.state) < 1e-6


def test_going_on_from_a_checkpoint_equals_not_stopping(folder: Path, ours: Outcome) -> None:
    again = fit(make(folder, ZEROS["stage 2"]), seed=7, path=folder / "ours" / "epoch=0.ckpt")
    assert again.losses == ours.losses[10:] and again.rates == ours.rates[10:]
    assert farthest(again.state, ours.state) == 0.0
    rewritten = folder / "ours" / "last.ckpt"  # after each epoch, in place of the one before
    assert sorted(path.name for path in rewritten.iterdir()) == ["rest-2", "zerostd"]
    assert [path.name for path in (rewritten / "zerostd").iterdir()] == ["2"]


def test_evaluation_goes_on_with_the_model_or_shards_a_new_one(folder: Path, plain: Outcome, ours: Outcome) -> None:
    loader = DataLoader(items(16), BATCH)
    expected = plain.trainer.test(plain.module, loader, verbose=False)[0]["quality"]
    labels = torch.cat(plain.trainer.predict(plain.module, loader))
    new = make(folder, {"stage": 3}, accumulate_grad_batches=1, gradient_clip_val=None)
    for trainer, module, path in ((ours.trainer, ours.module, None), (new, Classifier(), folder / "ours/last.ckpt")):
        for evaluate in (trainer.validate, trainer.test):
            scores = evaluate(module, loader, ckpt_path=path, verbose=False)
            assert scores[0]["quality"] == pytest.approx(expected, rel=1e-6)
        assert torch.equal(torch.cat(trainer.predict(module, loader, ckpt_path=path)), labels)


def test_an_ordinary_module_comes_out(folder: Path, ours: Outcome) -> None:
    """Of weights alone, of a merged checkpoint, or by zerostd.release."""
    ours.trainer.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    zl.merge(folder / "ours" / "epoch=1.ckpt", folder / "merged.ckpt")
    for name in ("weights.ckpt", "merged.ckpt"):
        loaded = Classifier.load_from_checkpoint(folder / name, weights_only=False)
        assert farthest(loaded.state_dict(), ours.state) == 0.0 and loaded.hparams.width == 16
    ours = fit(make(folder, {"stage": 3}, max_epochs=1))
    zerostd.release(ours.trainer.model)
    assert farthest(ours.module.state_dict(), ours.state) == 0.0


def test_a_module_can_be_fitted_again(folder: Path, plain: Outcome) -> None:
    ours = fit(make(folder, {"stage": 3}))
    make(folder, {"stage": 2}).fit(ours.module, DataLoader(items(), BATCH))
    make(folder).fit(plain.module, DataLoader(items(), BATCH))
    assert ours.module.losses == pytest.approx(plain.module.losses, rel=1e-6) and len(plain.module.losses) == 40


def test_mixed_precision_is_autocast_as_ever(folder: Path, plain: Outcome) -> None:
    without, ours = (
        fit(make(folder, zero, precision="bf16-mixed", gradient_clip_val=None)) for zero in (None, {"stage": 3})
    )
    assert ours.losses == without.losses != plain.losses
    assert farthest(ours.state, without.state) == 0.0


def test_weights_of_sixteen_bits_learn_alike(folder: Path, plain: Outcome) -> None:
    """fp16 scales the loss by itself: once, though a step calls its own module."""
    for precision in ("bf16", "fp16"):
        ours = fit(make(folder, {"stage": 3, "precision": precision}))
        assert ours.losses == pytest.approx(plain.losses, rel=0.03)
        assert farthest(ours.state, plain.state) < 0.02 and len(set(plain.losses)) == len(plain.losses)
        assert all(value.dtype == torch.float32 for name, value in ours.state.items() if "num" not in name)


class TwoOptimizers(Classifier):
    automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.body, self.head)]


def test_what_cannot_be_honoured_is_refused(folder: Path) -> None:
    for precision in ("16-true", "bf16-true", "64-true"):
        with pytest.raises(zerostd.NotSupportedError, match=r"ZeroStrategy\(precision="):
            make(folder, {"stage": 3}, precision=precision)
    with pytest.raises(zerostd.PrepareError, match="one of the two"):
        make(folder, {"precision": "bf16"}, precision="bf16-mixed")
    for options, message in (
        ({"stages": 3}, "stages"),
        ({"find_unused_parameters": True}, "find_unused_parameters"),
        ({"max_grad_norm": 1.0}, "gradient_clip_val"),
    ):
        with pytest.raises(zerostd.PrepareError, match=message):
            zl.ZeroStrategy(**options)
    loader = DataLoader(items(), BATCH)
    for zero, options, message in (
        ({}, {"gradient_clip_algorithm": "value"}, "by their norm"),
        ({}, {"callbacks": [callbacks.StochasticWeightAveraging(1e-2)]}, "would copy a sharded model"),
        ({"accumulate": 3}, {}, "accumulate_grad_batches"),
    ):
        module = Classifier()
        with pytest.raises(zerostd.ZerostdError, match=message):
            make(folder, zero, **options).fit(module, loader)
        module.state_dict()  # still an ordinary one
    with pytest.raises(zerostd.NotSupportedError, match="param_groups of one optimizer"):
        make(folder, {}, gradient_clip_val=None, accumulate_grad_batches=1).fit(TwoOptimizers(), loader)


def test_states_of_a_run_without_zerostd_are_refused(folder: Path, plain: Outcome) -> None:
    plain.trainer.save_checkpoint(folder / "plain.ckpt")
    with pytest.raises(zerostd.CheckpointError, match="saved without zerostd"):
        fit(make(folder, {"stage": 3}), path=folder / "plain.ckpt")
    (folder / "torn.ckpt").mkdir()
    with pytest.raises(zerostd.CheckpointError, match="never completed"):
        fit(make(folder, {"stage": 3}), path=folder / "torn.ckpt")


# -- Fabric --


class Loop(NamedTuple):
    """A script of Fabric, as its own documentation has it."""

    fabric: Any
    model: Any
    optimizer: Any
    scheduler: Any

    def run(self, steps: range) -> dict[str, list[float]]:
        curves: dict[str, list[float]] = {"losses": [], "norms": []}
        x, y = items().tensors
        rank = self.fabric.global_rank
        size = self.fabric.world_size
        for step in steps:
            for number in range(ACCUMULATE):
                start = (step * ACCUMULATE + number) * size + rank
                batch = slice(start * BATCH % 40, start * BATCH % 40 + BATCH)
                with self.fabric.no_backward_sync(self.model, enabled=number < ACCUMULATE - 1):
                    loss = F.cross_entropy(self.model(x[batch]), y[batch])
                    self.fabric.backward(loss / ACCUMULATE)
                curves["losses"].append(loss.item())
            norm = self.fabric.clip_gradients(self.model, self.optimizer, max_norm=CLIP)
            curves["norms"].append(float(norm))
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        return curves


def loop(zero: Any = None, seed: int = 0, **options: Any) -> Loop:
    strategy = "ddp" if zero is None else zf.ZeroStrategy(**zero) if isinstance(zero, dict) else zero
    fabric = lightning.Fabric(accelerator="cpu", devices=world_size(), strategy=strategy, **options)
    fabric.launch()
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=EPS)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    return Loop(fabric, *fabric.setup(model, optimizer), scheduler)


def state_of(script: Loop) -> dict[str, Tensor]:
    model = script.model._forward_module
    state = zerostd.full_state_dict(model) if isinstance(model, zf.Root) else script.model.state_dict()
    return {name: value.clone() for name, value in state.items()}


def trained(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without batch-norm's averages: passes that are not reduced leave each rank its own until the next one."""
    return {name: value for name, value in state.items() if "running" not in name}


def save_and_go_on(path: Path, zero: Any, later: Any) -> dict[str, Any]:
    """Two steps, a checkpoint, two more; and the same from the checkpoint, at another stage."""
    script = loop(zero)
    script.run(range(2))
    rest = {"scheduler": script.scheduler, "step": 2, "note": [1, "a"]}
    script.fabric.save(path, {"model": script.model, "optimizer": script.optimizer, **rest})
    results: dict[str, Any] = {"expected": (script.run(range(2, 4)), state_of(script))}
    again = loop(later, seed=7)
    state = {"model": again.model, "optimizer": again.optimizer, "scheduler": again.scheduler, "step": 0}
    results["remainder"] = again.fabric.load(path, state)
    results["step"] = state["step"]
    results["resumed"] = (again.run(range(2, 4)), state_of(again))
    return results


@pytest.mark.parametrize("zero", [*ZEROS.values(), "zerostd"], ids=[*ZEROS, "by name"])
def test_fabric_trains_as_without(zero: Any) -> None:
    script = loop()
    ours = loop(zero)
    expected = script.run(range(4))
    curves = ours.run(range(4))
    assert curves["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    assert curves["norms"] == pytest.approx(expected["norms"], rel=1e-5) and min(expected["norms"]) > CLIP
    assert farthest(state_of(ours), state_of(script)) < 1e-6


def test_fabric_goes_on_from_what_it_saved(tmp_path: Path) -> None:
    results = save_and_go_on(tmp_path / "state", ZEROS["stage 2"], ZEROS["stage 3"])
    assert results["resumed"][0] == results["expected"][0] and results["step"] == 2
    assert farthest(results["resumed"][1], results["expected"][1]) == 0.0
    assert results["remainder"] == {"note": [1, "a"]}


def test_fabric_refuses_what_cannot_be_honoured(tmp_path: Path) -> None:
    script = loop({"stage": 3})
    with pytest.raises(zerostd.NotSupportedError, match="max_norm"):
        script.fabric.clip_gradients(script.model, script.optimizer, clip_val=1.0)
    with pytest.raises(zerostd.MisuseError, match="one call"):
        script.fabric.setup_optimizers(torch.optim.SGD(nn.Linear(2, 2).parameters()))
    with pytest.raises(zerostd.NotSupportedError, match="shards are saved whole"):
        script.fabric.save(tmp_path / "x", {"model": script.model}, filter={"model": lambda *_: True})
    with pytest.raises(zerostd.NotSupportedError, match="precision="):
        loop({"stage": 3}, precision="16-true")
    script.fabric.save(tmp_path / "ours", {"model": script.model})
    with pytest.raises(zerostd.CheckpointError, match="has no 'step'"):
        script.fabric.load(tmp_path / "ours", {"model": script.model, "step": 0})


# -- two ranks --

SCRIPT = """
import sys
from pathlib import Path

import torch

sys.path[:0] = [sys.argv[1]]
torch.set_num_threads(1)
from integrations.test_lightning import lightning, on_two_ranks

fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy="zerostd")
fabric.launch()
torch.save(on_two_ranks(Path(sys.argv[2])), f"{sys.argv[2]}/rank{fabric.global_rank}.pt")
"""


def on_two_ranks(folder: Path) -> dict[str, Any]:
    """Every scenario, since importing Lightning is what takes long."""
    results: dict[str, Any] = {}
    loader = DataLoader(items(16), BATCH)
    for name, zero in {"plain": None, **ZEROS}.items():
        options = {"callbacks": [keep_all(folder / "ours")]} if name == "stage 3" else {}
        outcome = fit(make(folder, zero, **options))
        tested = outcome.trainer.test(outcome.module, loader, verbose=False)
        results[name] = outcome._replace(trainer=outcome.module.wrapped, module=tested)
        if name == "stage 3":
            outcome.trainer.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    resumed = fit(make(folder, ZEROS["stage 2"]), seed=7, path=folder / "ours" / "epoch=0.ckpt")
    results["resumed"] = resumed._replace(trainer=None, module=None)
    for name, zero in {"plain": None, **ZEROS}.items():
        script = loop(zero)
        results[f"Fabric, {name}"] = (script.run(range(4)), state_of(script))
    results["Fabric, saved"] = save_and_go_on(folder / "fabric", ZEROS["stage 3"], ZEROS["stage 1"])
    return {name: tuple(value) if isinstance(value, Outcome) else value for name, value in results.items()}


@pytest.fixture(scope="module")
def of_two(folder: Path) -> tuple[Path, list[dict[str, Any]]]:
    """Lightning starts the ranks itself: the script runs once more for each."""
    place = folder / "two"
    place.mkdir()
    script = place / "train.py"
    script.write_text(SCRIPT)
    launched = ("MASTER_", "WORLD_", "RANK", "LOCAL_", "NODE_", "PL_")  # by those that ran in this process
    environment = {name: value for name, value in os.environ.items() if not name.startswith(launched)}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "ZEROSTD_TIMEOUT_S": "60"}
    command = [sys.executable, str(script), str(TESTS), str(place)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    by_rank = [torch.load(place / f"rank{rank}.pt", weights_only=False) for rank in (0, 1)]
    return place, [
        {name: Outcome(*value) if len(value) == len(Outcome._fields) else value for name, value in rank.items()}
        for rank in by_rank
    ]


@pytest.mark.parametrize("name", ZEROS)
def test_two_ranks_train_as_ddp(name: str, of_two: Any) -> None:
    for results in of_two[1]:
        plain = results["plain"]
        ours = results[name]
        assert (plain.trainer, ours.trainer) == ("DistributedDataParallel", "Root")
        assert ours.losses == pytest.approx(plain.losses, rel=LIMIT) and ours.rates == plain.rates
        assert ours.logged == pytest.approx(plain.logged, rel=LIMIT)
        assert ours.module[0]["quality"] == pytest.approx(plain.module[0]["quality"], rel=LIMIT)
        assert farthest(ours.state, plain.state) < LIMIT
        for part in ("losses", "norms"):
            assert results[f"Fabric, {name}"][0][part] == pytest.approx(results["Fabric, plain"][0][part], rel=LIMIT)
        assert farthest(*(trained(results[f"Fabric, {setting}"][1]) for setting in (name, "plain"))) < LIMIT
    assert of_two[1][0]["plain"].losses != of_two[1][1]["plain"].losses  # each rank has its own samples


def test_two_ranks_go_on_from_what_they_saved(of_two: Any) -> None:
    for results in of_two[1]:
        expected = results["stage 3"]
        resumed = results["resumed"]
        assert resumed.losses == pytest.approx(expected.losses[-len(resumed.losses) :], rel=1e-6)
        assert farthest(resumed.state, expected.state) < 1e-6 and len(resumed.losses) == 5
        saved = results["Fabric, saved"]
        assert saved["resumed"][0]["losses"] == pytest.approx(saved["expected"][0]["losses"], rel=1e-6)
        assert farthest(trained(saved["resumed"][1]), trained(saved["expected"][1])) < 1e-6


def test_what_two_ranks_saved_is_an_ordinary_module(of_two: Any) -> None:
    place, results = of_two
    zl.merge(place / "ours" / "epoch=1.ckpt", place / "merged.ckpt")
    for name in ("weights.ckpt", "merged.ckpt"):
        loaded = Classifier.load_from_checkpoint(place / name, weights_only=False)
        assert farthest(loaded.state_dict(), results[0]["stage 3"].state) == 0.0


class Planted:
    """Makes a file when it is unpickled, as code in a pickle can."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


def test_merge_runs_no_code_of_the_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "ours.ckpt"
    model, _ = zerostd.prepare(torch.nn.Linear(2, 2))
    zerostd.save(folder / "zerostd" / "1", model)
    torch.save({"callbacks": Planted(str(tmp_path / "ran"))}, folder / "rest-1")
    with pytest.raises(zerostd.CheckpointError, match=r"rest-1 holds more than tensors.*merge\(\.\.\., weights_only=F"):
        zl.merge(folder, tmp_path / "merged.ckpt")
    assert not (tmp_path / "ran").exists() and not (tmp_path / "merged.ckpt").exists()
    torch.save({"callbacks": {"best": torch.ones(1)}}, folder / "rest-1")
    zl.merge(folder, tmp_path / "merged.ckpt")
    assert set(torch.load(tmp_path / "merged.ckpt")["state_dict"]) == {"weight", "bias"}


@pytest.mark.parametrize("library", [zl, zf], ids=["Trainer", "Fabric"])
def test_ranks_meet_over_the_backends_that_torch_has_for_the_device(library: Any, monkeypatch: Any) -> None:
    for device, backends in (("cpu", "gloo"), ("cuda", "cpu:gloo,cuda:nccl"), ("xpu", "cpu:gloo,xpu:xccl")):
        monkeypatch.setattr(library.ZeroStrategy, "root_device", torch.device(device))
        assert library.ZeroStrategy()._get_process_group_backend() == backends
        assert library.ZeroStrategy(process_group_backend="ours")._get_process_group_backend() == "ours"
