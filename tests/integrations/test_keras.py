"""`fit` of Keras 3 on torch trains with zerostd as with the same torch optimizer in a step of its own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import nn

import zerostd
from support.processes import doing

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras")
zk = pytest.importorskip("zerostd.integrations.keras")

CLIP = 0.1
BATCH = 8
EPS = 1e-2
EVERYTHING = zerostd.Placement(parameters="host", gradients="host", optimizer_states="host")
ZEROS: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1},
    "stage 2, states on the host": {"stage": 2, "placement": zerostd.Placement(optimizer_states="host")},
    "stage 3": {"stage": 3},
    "stage 3, all on the host": {"stage": 3, "placement": EVERYTHING},
}
LOSS = "sparse_categorical_crossentropy"
LIMIT = 1e-5  # two ranks: only the order of sums may differ


class Residual(keras.Model):
    """Layers in a list, a model inside, a weight of its own, and one layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = keras.layers.Dense(16)
        self.blocks = [
            keras.Sequential([keras.Input((16,)), keras.layers.Dense(16, "relu"), keras.layers.LayerNormalization()])
            for _ in range(2)
        ]
        self.outlet = keras.layers.Dense(3, "softmax")
        self.scale = self.add_weight(shape=(16,), initializer="ones", name="scale")

    def call(self, x: Any) -> Any:
        x = self.inlet(x)
        for block in [*self.blocks, self.blocks[0]]:
            x = x + block(x) * self.scale
        return self.outlet(x)


class WithTorch:
    """A step as Keras's documentation has it for torch."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        predicted = self(x, training=True)
        loss = self.compute_loss(x, y, predicted)
        self.inner.zero_grad()
        loss.backward()
        if self.clip is not None:
            nn.utils.clip_grad_norm_([weight.value for weight in self.trainable_weights], self.clip)
        self.inner.step()
        return {"loss": loss.item()}


class Curve(keras.callbacks.Callback):
    """Losses and learning rates, step by step; the rate is halved every epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.rates: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.losses.append(float(logs["loss"]))
        self.rates.append(self.model.inner.param_groups[0]["lr"])


class Outcome(NamedTuple):
    """What one training came to."""

    losses: list[float]
    rates: list[float]
    weights: list[numpy.ndarray]
    model: Any


def normed(dropout: float = 0.2) -> Any:
    """With batch-norm and dropout: states that do not train."""
    layers = keras.layers
    body = [
        layers.Dense(16, "relu"),
        layers.BatchNormalization(),
        layers.Dropout(dropout),
        layers.Dense(3, "softmax"),
    ]
    return keras.Sequential([keras.Input((8,)), *body])


def residual() -> Any:
    model = Residual()
    model(numpy.zeros((1, 8), "float32"))  # builds it
    return model


def build(make: Any, seed: int = 0) -> Any:
    keras.utils.set_random_seed(seed)
    return make()


def items() -> tuple[numpy.ndarray, numpy.ndarray]:
    x = numpy.random.default_rng(1).normal(size=(48, 8)).astype("float32")
    return x, x[:, :3].argmax(1)


def halving(epoch: int, rate: float) -> float:
    return 1e-2 * 0.5**epoch


def train_plain(make: Any, clip: float | None = None) -> Outcome:
    model = build(make)
    model.__class__ = type("Plain", (WithTorch, type(model)), {})
    parameters = [weight.value for weight in model.trainable_weights]
    model.__dict__.update(inner=torch.optim.AdamW(parameters, lr=1e-2, eps=EPS, weight_decay=0.1), clip=clip)
    model.compile(optimizer="sgd", loss=LOSS)

    def change(epoch: int, logs: Any = None) -> None:
        model.inner.param_groups[0]["lr"] = float(numpy.float32(halving(epoch, 0.0)))  # Keras keeps rates in fp32

    return fit(model, range(2), items(), [keras.callbacks.LambdaCallback(on_epoch_begin=change)])


def prepared(make: Any, zero: dict[str, Any], clip: float | None = None, seed: int = 0) -> Any:
    model = build(make, seed)
    optimizer = zk.Optimizer(torch.optim.AdamW, 1e-2, global_clipnorm=clip, eps=EPS, weight_decay=0.1)
    model.compile(optimizer=optimizer, loss=LOSS, metrics=["accuracy"])
    zk.prepare(model, **zero)
    model.__dict__["inner"] = optimizer.inner  # for Curve
    return model


def train(model: Any, epochs: range = range(2), data: Any = None) -> Outcome:
    return fit(model, epochs, data or items(), [keras.callbacks.LearningRateScheduler(halving)])


def fit(model: Any, epochs: range, data: Any, callbacks: Sequence[Any], batch: int = BATCH) -> Outcome:
    curve = Curve()
    options = {"batch_size": batch // world_size(), "shuffle": False, "verbose": 0, "callbacks": [*callbacks, curve]}
    model.fit(*data, initial_epoch=epochs[0], epochs=epochs[-1] + 1, **options)
    return Outcome(curve.losses, curve.rates, model.get_weights(), model)


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def farthest(weights: list[numpy.ndarray], reference: list[numpy.ndarray]) -> float:
    assert len(weights) == len(reference)
    return max(float(numpy.abs(a.astype("float64") - b).max()) for a, b in zip(weights, reference, strict=True))


@pytest.fixture(scope="module")
def plain() -> Outcome:
    return train_plain(normed, CLIP)


# -- one rank --


@pytest.mark.parametrize("make", [normed, residual])
def test_one_rank_is_bitwise_plain_without_clipping(make: Any, plain: Outcome) -> None:
    without = train_plain(make)
    for name in ("stage 3", "stage 3, all on the host"):
        ours = train(prepared(make, ZEROS[name]))
        assert ours.rates == without.rates and len(set(without.rates)) == 2
        assert ours.model.evaluate(*items(), verbose=0, return_dict=True)["loss"] == pytest.approx(
            without.model.evaluate(*items(), verbose=0), rel=1e-6
        )
        assert farthest(ours.weights, without.weights) == 0.0
    assert len(without.losses) == 12
    if make is normed:
        assert farthest(plain.weights, without.weights) > 1e-3  # the clipping below bites


@pytest.mark.parametrize("zero", ZEROS.values(), ids=ZEROS)
def test_clipping_is_an_argument_of_the_optimizer(zero: Any, plain: Outcome) -> None:
    ours = train(prepared(normed, zero, CLIP))
    assert farthest(ours.weights, plain.weights) < 1e-6
    means = [numpy.mean(plain.losses[:6][: step + 1]) for step in range(6)]  # Keras logs the mean of an epoch so far
    assert ours.losses[:6] == pytest.approx(means, rel=1e-6)


def test_going_on_from_saved_weights_equals_not_stopping(tmp_path: Path) -> None:
    """Also what does not train, and the count of steps. A second save replaces the first. Without dropout: the first
    fit of a model draws random numbers of its own."""
    steady = partial(normed, dropout=0.0)
    model = prepared(steady, ZEROS["stage 2, states on the host"], CLIP)
    train(model, range(1))
    path = tmp_path / "now.weights.h5"
    for _ in range(2):
        model.save_weights(path)
    expected = train(model, range(1, 2))
    again = prepared(steady, ZEROS["stage 3, all on the host"], CLIP, seed=7)
    again.load_weights(path)
    resumed = train(again, range(1, 2))
    assert resumed.losses == expected.losses and farthest(resumed.weights, expected.weights) == 0.0
    assert int(again.optimizer.iterations) == 12
    assert sorted(entry.name for entry in Path(f"{path}.zerostd").iterdir()) == ["2", "2.crc"]


def test_a_file_that_was_written_again_is_not_mixed_with_older_states(tmp_path: Path) -> None:
    model = prepared(normed, {"stage": 3})
    path = tmp_path / "now.weights.h5"
    model.save_weights(path)
    another = build(normed, seed=7)
    another.save_weights(path)
    before = model.get_weights()
    with pytest.raises(zerostd.CheckpointError, match="which was written later"):
        model.load_weights(path)
    assert farthest(model.get_weights(), before) == 0.0


def test_a_saved_model_is_an_ordinary_one(tmp_path: Path) -> None:
    ours = train(prepared(normed, ZEROS["stage 3, all on the host"]))
    ours.model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    x, _ = items()
    assert farthest(loaded.get_weights(), ours.weights) == 0.0
    assert numpy.array_equal(loaded.predict(x, verbose=0), ours.model.predict(x, verbose=0))
    assert loaded.optimizer.get_config() == ours.model.optimizer.get_config()
    zk.prepare(loaded, stage=2)
    train(_counted(loaded))  # it goes on with a new optimizer
    ordinary = zk.release(ours.model)
    assert "call" not in vars(ordinary) and farthest(ordinary.get_weights(), ours.weights) == 0.0
    with pytest.raises(zerostd.MisuseError, match="not prepared"):
        ordinary.fit(*items(), verbose=0)


def _counted(model: Any) -> Any:
    model.__dict__["inner"] = model.optimizer.inner
    return model


# -- what cannot be honoured --


def test_what_cannot_be_honoured_is_refused() -> None:
    for name, value in (("clipnorm", 1.0), ("clipvalue", 0.5), ("use_ema", True), ("gradient_accumulation_steps", 2)):
        with pytest.raises(zerostd.NotSupportedError, match=name):
            zk.Optimizer(torch.optim.SGD, 0.1, **{name: value})
    model = build(normed)
    model.compile(optimizer="adam", loss=LOSS)
    with pytest.raises(zerostd.NotSupportedError, match="Adam, which updates whole variables"):
        zk.prepare(model)
    model.compile(optimizer=zk.Optimizer(torch.optim.SGD, 0.1), loss=LOSS)
    for options, message in (
        ({"stages": 3}, "stages"),
        ({"max_grad_norm": 1.0}, "global_clipnorm"),
        ({"precision": "bf16"}, "mixed_bfloat16"),
    ):
        with pytest.raises(zerostd.PrepareError, match=message):
            zk.prepare(model, **options)
    with pytest.raises(zerostd.MisuseError, match="after compile"):
        model.fit(*items(), verbose=0)
    unbuilt = keras.Sequential([keras.layers.Dense(2)])
    unbuilt.compile(optimizer=zk.Optimizer(torch.optim.SGD, 0.1), loss=LOSS)
    with pytest.raises(zerostd.PrepareError, match=r"call model\.build"):
        zk.prepare(unbuilt)


# -- two ranks --


def on_two_ranks(rank: int, folder: Path) -> dict[str, Any]:
    """Every scenario, since importing Keras is what takes long. Each rank has its half of every batch."""
    x, y = (array.reshape(-1, 2, BATCH // 2, *array.shape[1:])[:, rank] for array in items())
    data = x.reshape(-1, 8), y.reshape(-1)
    outcomes: dict[str, Any] = {}
    for name in ("stage 1", "stage 2, states on the host", "stage 3"):
        doing(name)
        model = prepared(residual, ZEROS[name], CLIP)
        outcomes[name] = train(model, data=data)._replace(model=None)
        outcomes[f"{name}, bytes"] = zerostd.memory(zk.root_of(model)).now["device"]["parameters"]
    doing("saving")
    model = prepared(residual, ZEROS["stage 3"], CLIP)
    train(model, range(1), data)
    model.save_weights(folder / "now.weights.h5")
    doing("resuming")
    again = prepared(residual, ZEROS["stage 2, states on the host"], CLIP, seed=7)
    again.load_weights(folder / "now.weights.h5")
    outcomes["resumed"] = train(again, range(1, 2), data)._replace(model=None)
    model.save_weights(folder / "whole.weights.h5")
    outcomes["whole"] = model.get_weights()
    return outcomes


@pytest.fixture(scope="module")
def of_two(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("two")
    return folder, ranks(2, on_two_ranks, folder)


def test_two_ranks_train_as_one_on_the_joined_batches(of_two: Any) -> None:
    plain = train_plain(residual, CLIP)
    for outcomes in of_two[1]:
        for name in ("stage 1", "stage 2, states on the host", "stage 3"):
            assert farthest(outcomes[name].weights, plain.weights) < LIMIT, name
        assert outcomes["stage 3, bytes"] < 0.6 * outcomes["stage 1, bytes"]
    losses = [numpy.mean([outcomes["stage 3"].losses[step] for outcomes in of_two[1]]) for step in range(6)]
    means = [numpy.mean(plain.losses[: step + 1]) for step in range(6)]
    assert losses == pytest.approx(means, rel=LIMIT)


def test_two_ranks_go_on_from_what_they_saved(of_two: Any) -> None:
    folder, ranks = of_two
    for outcomes in ranks:
        assert farthest(outcomes["resumed"].weights, outcomes["stage 3"].weights) < 1e-6
    ordinary = build(residual, seed=7)
    ordinary.load_weights(folder / "whole.weights.h5")
    assert farthest(ordinary.get_weights(), ranks[0]["whole"]) == 0.0
