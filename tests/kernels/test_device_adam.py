"""The numbers of a step that the one-pass Adam makes on the host, against those of its kernel in Triton's interpreter.

tests/gpu/test_one_pass_adam.py has the same on a device. Without triton this is skipped.
"""

from __future__ import annotations

import torch

from support.interpreted import compare_interpreted


def compare() -> None:
    """Make the numbers both ways. Called where the interpreter is chosen."""
    from zerostd.kernels import device_adam  # needs triton

    for count in (1, 2, 3, 400, 65_535, 10**6, 2**31 - 1):
        for rate in (1e-3, 3e-4, 0.1):
            for betas in ((0.9, 0.95), (0.9, 0.999), (0.0, 0.5)):
                made = torch.empty(2)
                lr = device_adam._as_float(rate)
                device_adam._numbers[(1,)](torch.tensor(float(count), dtype=torch.float64), made, lr, rate - lr, *betas)
                rest = device_adam._as_float(rate - lr)
                on_host = torch.tensor(device_adam._host_numbers(count, lr, rest, *betas), dtype=torch.float64).float()
                assert torch.equal(made, on_host), (count, rate, betas, made, on_host)


def test_the_numbers_of_a_step_are_the_same_on_host_and_device() -> None:
    compare_interpreted(__file__)
