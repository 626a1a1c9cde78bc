"""Machine profiles as text: the same both ways, and a field that is not what it must be is named."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import zerostd
from planning.machines import H200, LAPTOP
from zerostd.errors import PrepareError
from zerostd.planning import DiskRates, Link, MachineProfile, Processor, Wire
from zerostd.policy import Tier

WIRED = replace(H200, wires=(Wire("inside", 8, 3.6e11, 2e-5), Wire("network", 64, 5e10, 5e-5)), ranks_per_node=8)


@pytest.mark.parametrize("machine", [H200, LAPTOP, WIRED], ids=lambda machine: machine.name)
def test_a_profile_is_the_same_after_text(machine: MachineProfile) -> None:
    assert MachineProfile.from_json(machine.to_json()) == machine


def test_whole_numbers_may_be_written_with_an_exponent() -> None:
    text = json.dumps({**json.loads(H200.to_json()), "free": {"device": 80e9}})
    assert MachineProfile.from_json(text).free == {"device": 80 * 10**9}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"resident_ns": "fast"}, "resident_ns is 'fast', but must be a number"),
        ({"resident_ns": None}, "resident_ns is None"),
        ({"achieved": True}, "achieved is True"),
        ({"name": 7}, "name is 7, but must be a string"),
        ({"measured": 5}, "measured is 5, but must be a string"),
        ({"matrix": {"bfloat16": "813e12"}}, "matrix.bfloat16 is '813e12', but must be a number"),
        ({"matrix": 813e12}, "matrix is 813000000000000, but must be an object"),
        ({"free": {"device": 1.5}}, "free.device is 1.5, but must be a whole number"),
        ({"free": {"device": "80GB"}}, "free.device is '80GB'"),
        ({"versions": {"torch": 2}}, "versions.torch is 2, but must be a string"),
        ({"ranks_per_node": "8"}, "ranks_per_node is '8', but must be a whole number"),
        ({"link": {"up": "1e9", "down": 1e9, "both": 1e9}}, "link.up is '1e9', but must be a number"),
        ({"link": 55e9}, "link is 55000000000, but must be an object or null"),
        ({"link": {"up": 1e9, "down": 1e9, "both": 1e9, "sideways": 1}}, "Link has no field 'sideways'"),
        ({"disk": {"path": 5, "read": 1, "write": 1, "both": 1}}, "disk.path is 5"),
        ({"disk": {"path": "/", "read": [1], "write": 1, "both": 1}}, "disk.read is [1]"),
        ({"processor": {"num_cores": 2.5, "update_ns": {"1": 1}, "memory": 1}}, "processor.num_cores is 2.5"),
        ({"processor": {"num_cores": 2, "update_ns": {"1": "x"}, "memory": 1}}, "processor.update_ns.1 is 'x'"),
        ({"processor": {"num_cores": 2, "update_ns": {"one": 1}, "memory": 1}}, "processor.update_ns is {'one': 1}"),
        ({"processor": {"num_cores": 2, "update_ns": [1], "memory": 1}}, "processor.update_ns is [1]"),
        ({"wires": "two"}, "wires is 'two', but must be a list"),
        ({"wires": [{"name": "a", "ranks": 8, "bandwidth": "fast", "latency": 0}]}, "wires.0.bandwidth is 'fast'"),
        ({"wires": [5]}, "wires.0 is 5, but must be an object"),
    ],
)
def test_a_field_of_another_type_is_named(changes: dict[str, Any], said: str) -> None:
    text = json.dumps({**json.loads(H200.to_json()), **changes})
    with pytest.raises(PrepareError) as caught:
        MachineProfile.from_json(text, "machine.json")
    assert "machine.json" in str(caught.value) and said in str(caught.value)
    assert "measure again" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"matrix": {}}, "matrix is {}, but must have fields"),
        ({"processor": Processor(2, {}, 1e9)}, "processor.update_ns is {}, but must have fields"),
        ({"matrix": {"bfloat16": 0.0}}, "matrix.bfloat16 is 0.0, but must be a number above 0"),
        ({"link": Link(0.0, 1e9, 1e9)}, "link.up is 0.0"),
        ({"disk": DiskRates("/", 1e9, 1e9, 0.0)}, "disk.both is 0.0"),
        ({"processor": Processor(2, {1: 1.0}, 0.0)}, "processor.memory is 0.0"),
        ({"achieved": 0.0}, "achieved is 0.0"),
        ({"achieved": "most"}, "achieved is 'most', but must be a number above 0"),
        ({"ranks_per_node": 0}, "ranks_per_node is 0"),
        ({"wires": (Wire("slow", 8, 0.0, 0.0),)}, "wires.0.bandwidth is 0.0"),
    ],
)
def test_what_no_plan_can_be_made_of_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(PrepareError) as caught:
        replace(H200, **changes)
    assert said in str(caught.value)


def test_what_is_free_of_the_device_is_in_the_profile_or_in_the_budget() -> None:
    model, machine = nn.Linear(4, 4), replace(H200, free={})
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(PrepareError, match=r"free\.device is missing; complete it, or give a budget"):
        zerostd.plan(model, optimizer, machine=machine)
    plan = zerostd.plan(model, optimizer, machine=machine, budget=zerostd.Budget(device="2GiB"))
    assert set(plan.limits) == {Tier.DEVICE}
