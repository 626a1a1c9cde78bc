"""Interrupts of a training run at chosen lines of the library.

A run counts the lines of zerostd that the main thread passes, and raises SIGINT at one of them: the handler runs
there, as it does when Ctrl-C is pressed. The loop catches KeyboardInterrupt, repeats the step if it was not taken, and
goes on.

    python tests/scheduling/interrupts.py 300 [FIRST_SEED]    # 300 interrupts in each form, spread over all lines
"""

from __future__ import annotations

import contextlib
import faulthandler
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import zerostd
from zerostd import Placement

LIBRARY = str(Path(zerostd.__file__).parent)
NUM_STEPS = 3
FORMS: dict[str, dict[str, Any]] = {
    "device": {"placement": Placement()},
    "host": {"placement": Placement(optimizer_states="host", gradients="host")},
    "disk": {"placement": Placement(optimizer_states="disk", gradients="host")},
    "parameters on host": {"placement": Placement(parameters="host", optimizer_states="host", gradients="host")},
    "parameters on disk": {"placement": Placement(parameters="disk", optimizer_states="disk", gradients="host")},
    "clipped": {"placement": Placement(parameters="disk", optimizer_states="host"), "max_grad_norm": 0.1},
    "gradients on disk": {"placement": Placement(gradients="disk", optimizer_states="disk", parameters="host")},
    "coded": {"placement": Placement(optimizer_states="disk", codec={"optimizer_states": "int8"}), "exact": False},
    "recomputed": {"placement": Placement(parameters="disk", activations="recompute+host")},
}


class Interrupt:
    """Raises SIGINT at the line number `at` of the library; None: counts lines only."""

    def __init__(self, at: int | None) -> None:
        self.at = at
        self.num_lines = 0
        self.place = ""  # where it was raised

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(LIBRARY):
            return None
        if event == "line":
            self.num_lines += 1
            if self.num_lines == self.at:
                self.place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                signal.raise_signal(signal.SIGINT)
        return self._trace


def make(form: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(7)
    blocks = [nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(3)]
    model = nn.Sequential(*blocks, nn.Linear(12, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return zerostd.prepare(model, optimizer, groups=["*"], **FORMS[form])


def num_taken(optimizer: Any) -> int:
    """Return how many steps were taken. No parameter has seen more than another."""
    counters = {int(states["step"]) for states in optimizer.state.values() if "step" in states}
    assert len(counters) <= 1, f"an update was done in part: {counters}"
    return counters.pop() if counters else 0


def train(model: nn.Module, optimizer: Any, interrupt: Interrupt) -> None:
    """Take NUM_STEPS steps, repeating the one that was interrupted."""
    for step in range(NUM_STEPS):
        batch = torch.randn(5, 12, generator=torch.Generator().manual_seed(step))
        while num_taken(optimizer) == step:
            with contextlib.suppress(KeyboardInterrupt), interrupt.planted():
                optimizer.zero_grad()
                loss = model(batch).square().mean()
                loss.backward()
                optimizer.step()
                with torch.no_grad():
                    model(batch)


def run(form: str, at: int | None) -> tuple[dict[str, torch.Tensor], Interrupt]:
    """Train with an interrupt; return the parameters, and the interrupt."""
    model, optimizer = make(form)
    interrupt = Interrupt(at)
    train(model, optimizer, interrupt)
    state = zerostd.full_state_dict(model)
    zerostd.release(model)
    return state, interrupt


def differences(form: str, at: int, expected: dict[str, torch.Tensor]) -> str:
    """Return what is wrong after an interrupt; empty if nothing is."""
    faulthandler.dump_traceback_later(120, exit=True)
    try:
        state, interrupt = run(form, at)
    except Exception as error:
        return f"{form}, line {at}: {type(error).__name__}: {error}"
    finally:
        faulthandler.cancel_dump_traceback_later()
    wrong = [name for name, value in expected.items() if not torch.equal(value, state[name])]
    return f"{form}, line {at} ({interrupt.place}): {wrong} differ" if wrong else ""


def main(num_interrupts: int, seed: int) -> None:
    draw = random.Random(seed)
    for form in FORMS:
        expected, whole = run(form, None)
        lines = [draw.randrange(whole.num_lines) for _ in range(num_interrupts)]
        wrong = [text for at in lines if (text := differences(form, at, expected))]
        print(f"{form}: {num_interrupts} interrupts in {whole.num_lines} lines, {len(wrong)} wrong", flush=True)
        print("\n".join(wrong[:10]), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
