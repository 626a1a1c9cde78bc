"""A sample of the idioms gives under FSDP2 what peers.json has kept; the rest is run by hand."""

from __future__ import annotations

import pytest

from idioms.loop import idioms
from idioms.peers import OURS, is_ours, read_peers, run_peer
from idioms.running import DIFFERENT, ERROR, SAME
from support.processes import RankPool

SAMPLE = ["clamp_data_after_each_step", "read_state_by_parameter", "assign_other_data", "pickle_the_model"]


def test_fsdp2_answers_as_it_did() -> None:
    kept = read_peers()
    with RankPool(2) as pool:
        outcomes = {name: run_peer(pool, name, "fsdp2").outcome for name in SAMPLE}
    assert outcomes == {name: kept[name]["fsdp2"].split(":")[0] for name in SAMPLE}
    assert set(outcomes.values()) == {SAME, DIFFERENT, ERROR}  # the sample has all of them


@pytest.mark.parametrize("name", list(read_peers()))
def test_kept_answers_are_of_idioms_that_are_there(name: str) -> None:
    assert name in idioms()
    assert (read_peers()[name]["fsdp2"] == OURS) is is_ours(name)
