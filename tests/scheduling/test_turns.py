"""Interrupts, other threads and second signals: state is changed whole, or not at all."""

from __future__ import annotations

import _thread
import queue
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerostd
from scheduling.interrupts import FORMS, differences, run
from zerostd import Placement
from zerostd.engine.runtime import runtime_of
from zerostd.errors import CheckpointError, MisuseError

WIDTH = 64
PLACEMENTS = {
    "device": Placement(),
    "host": Placement(parameters="host", optimizer_states="host"),
    "disk": Placement(parameters="disk", optimizer_states="disk", gradients="host"),
}
placements = pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS.keys())


@pytest.fixture(autouse=True)
def python_hears_interrupts() -> Iterator[None]:
    """A shell lets commands in the background ignore them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("form", FORMS)
def test_a_run_goes_on_after_an_interrupt_at_any_line(form: str) -> None:
    expected, whole = run(form, None)
    draw = random.Random(form)
    lines = [draw.randrange(whole.num_lines) for _ in range(4)]
    assert [text for at in lines if (text := differences(form, at, expected))] == []


def make(placement: Placement, middle: nn.Module | None = None) -> tuple[nn.Module, Any]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), middle or nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return zerostd.prepare(model, optimizer, placement=placement, groups=["*"])


def in_threads(*functions: Callable[[], None]) -> list[BaseException]:
    """Run functions side by side; return what they raised."""
    raised: list[BaseException] = []

    def guarded(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=guarded, args=(function,), daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a thread hangs"
    return raised


class Meeting(nn.Module):
    """Passes its input on; in backward, or in forward, calls a function once."""

    def __init__(self, call: Callable[[], Any], *, in_backward: bool = False) -> None:
        super().__init__()
        self.call: Callable[[], Any] | None = call
        self.in_backward = in_backward

    def forward(self, x: Tensor) -> Tensor:
        if self.in_backward and x.requires_grad:
            x.register_hook(lambda grad: self._run())
        elif not self.in_backward:
            self._run()
        return x

    def _run(self) -> None:
        call = self.call
        self.call = None
        if call is not None:
            call()


class Failing:
    """Raises in one place of the second step, once."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.step = 0

    def __call__(self, where: str) -> None:
        if self.where == where and self.step == 1:
            self.where = ""
            raise ValueError(f"planted in {where}")


def train_with(failing: Failing, placement: Placement, **options: Any) -> dict[str, Tensor]:
    """Train three steps, and repeat the one that fails."""
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    model[1].register_forward_hook(lambda *_: failing("forward"))
    model[1].register_full_backward_hook(lambda *_: failing("backward"))
    list(model.parameters())[1].register_hook(lambda _: failing("gradient"))
    adamw = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = zerostd.prepare(model, adamw, placement=placement, groups=["*"], **options)
    optimizer.register_step_pre_hook(lambda *_: failing("step"))
    inputs = torch.randn(3, 3, WIDTH, generator=torch.Generator().manual_seed(1))
    while failing.step < len(inputs):
        try:
            optimizer.zero_grad()
            loss = model(inputs[failing.step]).square().mean()
            failing("loss")
            loss.backward()
            optimizer.step()
            failing.step += 1
        except ValueError:
            continue
    return zerostd.full_state_dict(model)


@pytest.mark.parametrize("where", ["forward", "loss", "backward", "gradient", "step"])
@placements
def test_a_step_that_raised_can_be_repeated(placement: Placement, where: str) -> None:
    expected = train_with(Failing(""), placement)
    trained = train_with(Failing(where), placement)
    assert all(torch.equal(value, trained[name]) for name, value in expected.items())


INSIDE_BACKWARD: dict[str, dict[str, Any]] = {  # updates that begin there
    "host": {"placement": PLACEMENTS["host"]},
    "disk": {"placement": PLACEMENTS["disk"]},
    "freed gradients": {"placement": Placement(keep_gradients=False)},
    "speculative": {"placement": Placement(optimizer_states="host", speculate=True), "max_grad_norm": 1e6},
}


def prepared_to_fail(options: dict[str, Any]) -> tuple[nn.Module, Any, Failing]:
    torch.manual_seed(3)
    failing = Failing("backward")
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    model[1].register_full_backward_hook(lambda *_: failing("backward"))
    adamw = torch.optim.AdamW(model.parameters(), lr=0.01)
    return *zerostd.prepare(model, adamw, groups=["*"], accumulate=1, **options), failing


def backward(model: nn.Module, step: int) -> None:
    model(torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(step))).square().mean().backward()


@pytest.mark.parametrize("options", INSIDE_BACKWARD.values(), ids=INSIDE_BACKWARD.keys())
def test_a_pass_that_raised_after_its_updates_began_needs_a_checkpoint(options: dict[str, Any], tmp_path: Path) -> None:
    model, optimizer, _ = prepared_to_fail(options)
    for step in range(6):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    expected = zerostd.full_state_dict(model)

    model, optimizer, failing = prepared_to_fail(options)
    for step in range(4):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    zerostd.save(tmp_path / "saved", model, optimizer)
    failing.step = 1
    with pytest.raises(ValueError, match="planted"):
        backward(model, 4)
    calls: list[Callable[[], Any]] = [
        *(optimizer.step, optimizer.zero_grad, lambda: backward(model, 4), lambda: zerostd.release(model)),
        *(lambda: zerostd.save(tmp_path / "torn", model, optimizer), lambda: zerostd.load(tmp_path / "saved", model)),
        *(lambda: zerostd.full_state_dict(model), lambda: zerostd.sleep(model), optimizer.state_dict),
    ]
    for call in calls:
        with pytest.raises(MisuseError, match=r"a backward pass failed after .* had begun .* load the last check"):
            call()
    with pytest.raises(CheckpointError):
        zerostd.load(tmp_path / "nothing", model, optimizer)
    with pytest.raises(MisuseError, match="load the last checkpoint"):
        optimizer.zero_grad()
    zerostd.load(tmp_path / "saved", model, optimizer)
    for step in range(4, 6):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    ours = zerostd.full_state_dict(model)
    assert all(torch.equal(value, ours[name]) for name, value in expected.items())


def test_a_model_is_not_released_between_the_first_update_and_the_step() -> None:
    model, optimizer, _ = prepared_to_fail(INSIDE_BACKWARD["host"])
    for step in range(2):
        backward(model, step)
        if step:
            with pytest.raises(MisuseError, match=r"zerostd.release\(\) between backward and optimizer.step\(\)"):
                zerostd.release(model)
        optimizer.step()
        optimizer.zero_grad()
    zerostd.release(model)


@placements
def test_threads_that_infer_get_the_values_of_one_alone(placement: Placement) -> None:
    model, _ = make(placement)
    inputs = [torch.randn(3, WIDTH) for _ in range(3)]
    with torch.no_grad():
        expected = [model(x) for x in inputs]
    wrong = []

    def infer(index: int) -> None:
        with torch.no_grad():
            wrong.extend(1 for _ in range(20) if not torch.equal(model(inputs[index]), expected[index]))

    assert in_threads(*(lambda index=index: infer(index) for index in range(3))) == []  # type: ignore[misc]
    assert wrong == []


@placements
def test_a_forward_inside_the_backward_of_another_thread_is_refused(placement: Placement) -> None:
    raised: list[BaseException] = []
    x = torch.randn(3, WIDTH)
    meeting = Meeting(lambda: raised.extend(in_threads(lambda: model(x))), in_backward=True)
    model, optimizer = make(placement, meeting)
    plain, plain_optimizer = make(placement, nn.Identity())
    for prepared, steps in ((model, optimizer), (plain, plain_optimizer)):
        prepared(x).square().mean().backward()
        steps.step()
    assert len(raised) == 1 and isinstance(raised[0], MisuseError)
    assert "backward pass of the model runs in thread 'MainThread'" in str(raised[0])
    trained = zerostd.full_state_dict(model)
    assert all(torch.equal(value, trained[name]) for name, value in zerostd.full_state_dict(plain).items())


@pytest.mark.parametrize("placement", [PLACEMENTS["host"], PLACEMENTS["disk"]], ids=["host", "disk"])
def test_a_part_of_the_model_is_refused_inside_the_forward_of_another_thread(placement: Placement) -> None:
    raised: list[BaseException] = []
    x = torch.randn(3, WIDTH)
    meeting = Meeting(lambda: raised.extend(in_threads(lambda: model[2](x))))
    model, _ = make(placement, meeting)
    model(x)
    assert len(raised) == 1 and isinstance(raised[0], MisuseError) and "uses a part of a prepared model" in str(raised)
    assert in_threads(lambda: model[2](x)) == []


@placements
def test_a_forward_that_was_interrupted_does_not_hold_up_other_threads(placement: Placement) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    x = torch.randn(3, WIDTH)
    model, _ = make(placement, Meeting(interrupt))
    with pytest.raises(KeyboardInterrupt):
        model(x)
    assert in_threads(lambda: model(x)) == []


def test_threads_that_train_in_turns_sum_their_gradients() -> None:
    """Passes that do not overlap are like passes of one thread."""
    model, optimizer = make(PLACEMENTS["disk"])
    plain, plain_optimizer = make(PLACEMENTS["disk"])
    x = torch.randn(3, WIDTH)
    assert in_threads(lambda: model(x).square().mean().backward()) == []
    model(2 * x).square().mean().backward()
    optimizer.step()
    for batch in (x, 2 * x):
        plain(batch).square().mean().backward()
    plain_optimizer.step()
    trained = zerostd.full_state_dict(model)
    assert all(torch.equal(value, trained[name]) for name, value in zerostd.full_state_dict(plain).items())


@placements
def test_a_backward_in_a_thread_of_autograd_is_that_of_the_forwards_thread(placement: Placement) -> None:
    """On a device hooks run in autograd's threads, which Python does not know; here they are started as unknown."""
    model, optimizer = make(placement)
    for _ in range(2):
        loss = model(torch.randn(4, WIDTH)).sum()
        ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def backward(loss: Tensor = loss, ended: queue.SimpleQueue[BaseException | None] = ended) -> None:
            try:
                loss.backward()
            except BaseException as error:
                ended.put(error)
            else:
                ended.put(None)

        _thread.start_new_thread(backward, ())
        assert ended.get(timeout=60) is None
        optimizer.step()
        optimizer.zero_grad()


def test_the_handlers_of_signals_are_the_users_between_passes() -> None:
    seen: list[Any] = []
    call = lambda: seen.append(signal.getsignal(signal.SIGINT))  # noqa: E731
    model, optimizer = make(PLACEMENTS["host"], Meeting(call))
    before = signal.getsignal(signal.SIGINT)
    model(torch.randn(3, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert seen[0] != before
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_signal_in_a_section_ends_it_and_the_model() -> None:
    model, _ = make(PLACEMENTS["host"])
    turn = runtime_of(model, "test").turn
    reached = []
    with pytest.raises(KeyboardInterrupt), turn:
        signal.raise_signal(signal.SIGINT)
        reached.append("the first is put off")
        signal.raise_signal(signal.SIGINT)
        reached.append("the second is not")
    assert reached == ["the first is put off"]
    with pytest.raises(MisuseError, match="second signal interrupted"):
        model(torch.randn(3, WIDTH))
