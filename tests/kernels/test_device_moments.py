"""The Triton kernel of coded moments in Triton's interpreter, so that it needs no GPU: the bits are those of the CPU.

tests/gpu/test_moments.py has the same on a device. The interpreter is chosen when triton is imported, so it has a
process of its own. Without triton this is skipped.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from support.interpreted import compare_interpreted
from support.moments import arrays, assert_same_arrays, numbers
from zerostd.kernels import MOMENT_CODECS, Adam, update
from zerostd.kernels.moments import Numbers
from zerostd.kernels.rules import UpdateArguments

ADAM = Adam(1e-3, 0.1, False, beta1=0.9, beta2=0.95, eps=1e-8, decoupled=True, step=3)
RULES = {"AdamW": ADAM, "Adam": replace(ADAM, decoupled=False, maximize=True, step=400)}


def compare() -> None:
    """Update numbers of all sizes both ways. Called where the interpreter is chosen."""
    from zerostd.kernels import device_moments  # needs triton

    cases = [
        (c, r, d, n) for c in MOMENT_CODECS for r in RULES for d in (torch.float32, torch.bfloat16) for n in (1, 1000)
    ]
    for codec, rule, dtype, numel in cases:
        for is_split in (True, False):
            gradient = numbers(numel, seed=1, any_bits=True).to(dtype)
            ours, theirs = (arrays(numel, codec, is_split=is_split, any_bits=True) for _ in range(2))
            weights = [None if is_split else torch.empty(numel, dtype=torch.float16) for _ in range(2)]
            for factor in (1.0, 0.3):
                update(RULES[rule], gradient, ours, factor=factor, weight=weights[0])
                step = UpdateArguments(RULES[rule], gradient, torch.tensor(factor), theirs, theirs, weights[1])
                device_moments.update(step, Numbers.of(RULES[rule]))
            assert_same_arrays((*ours, weights[0]), (*theirs, weights[1]), f"{codec}, {rule}, {dtype}, {numel} numbers")


def test_the_interpreted_kernel_has_the_bits_of_the_cpu() -> None:
    compare_interpreted(__file__)
