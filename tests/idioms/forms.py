"""The forms of zerostd that every idiom is run in: options of `zerostd.prepare`, as data.

On one rank in fp32 zerostd promises the bits of plain torch; on two ranks, which all get the same data, the results
within the order of summation; in bf16 those of fp32 within the rounding of a few steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zerostd import Placement

BITWISE = 0.0
ALMOST = 1e-6  # on one rank, of an idiom that says that its own arithmetic may be done in another order
RANKS = 1e-5
ROUNDED = 3e-2  # bf16


@dataclass(frozen=True)
class Form:
    """One way to prepare a model."""

    name: str
    text: str  # what the table says of it
    options: Mapping[str, Any] = field(default_factory=dict)
    num_ranks: int = 1
    tolerance: float = BITWISE  # relative, of each tensor of an outcome
    on_disk: bool = False  # needs a directory
    is_plain: bool = False


HOST = Placement(optimizer_states="host")
DISK = Placement(gradients="disk", optimizer_states="disk")
ALL_HOST = Placement(parameters="host", gradients="host", optimizer_states="host")

PLAIN = Form("plain", "plain torch", is_plain=True)
HALVED = Form("halved", "plain torch with bf16 parameters and fp32 masters", {"precision": "bf16"}, is_plain=True)
FORMS = [
    Form("device", "everything on the device", {"placement": Placement()}),
    Form("host", "optimizer states on the host", {"placement": HOST}),
    Form("early", "optimizer states on the host, updated inside backward", {"placement": HOST, "accumulate": 1}),
    Form("all_host", "parameters, gradients and optimizer states on the host", {"placement": ALL_HOST}),
    Form("disk", "gradients and optimizer states on disk", {"placement": DISK}, on_disk=True),
    Form("recompute", "activations recomputed", {"placement": Placement(activations="recompute")}),
    Form("bf16", "bf16 with fp32 masters", {"placement": Placement(), "precision": "bf16"}, tolerance=ROUNDED),
    Form("stage0", "two ranks, stage 0", {"placement": Placement(), "stage": 0}, num_ranks=2, tolerance=RANKS),
    Form("stage2", "two ranks, stage 2", {"placement": Placement(), "stage": 2}, num_ranks=2, tolerance=RANKS),
    Form("stage3", "two ranks, stage 3", {"placement": Placement(), "stage": 3}, num_ranks=2, tolerance=RANKS),
]
BY_NAME = {form.name: form for form in FORMS}
