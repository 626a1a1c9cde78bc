"""StepOptions: what a step says to its updates does not follow later changes."""

from __future__ import annotations

import threading

import torch

from zerostd.optimizers.spans import StepOptions, snapshot
from zerostd.tiers import Work


def test_a_snapshot_has_no_parameters_and_keeps_its_values():
    groups = [{"params": [torch.zeros(1)], "lr": torch.tensor(0.1), "betas": (0.9, 0.99)}]
    options = snapshot(groups)
    groups[0]["lr"].fill_(7.0)
    groups[0]["betas"] = (0.0, 0.0)
    assert set(options[0]) == {"lr", "betas"}
    assert options[0]["lr"].item() == torch.tensor(0.1).item()
    assert options[0]["betas"] == (0.9, 0.99)


def test_without_a_factor_it_is_one():
    assert StepOptions([]).read_factor() == 1.0


def test_reading_the_factor_waits_until_it_has_arrived():
    memory = torch.tensor(float("nan"))
    arrived = Work()
    options = StepOptions([], torch.tensor([0.5]), memory, arrived)

    def arrive() -> None:
        memory.fill_(0.5)
        arrived.finish()

    timer = threading.Timer(0.05, arrive)
    timer.start()
    assert options.read_factor() == 0.5
    timer.join()
