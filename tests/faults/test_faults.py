"""A sample of the faults that `make faults` draws, and that a fault can be drawn again."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from faults import io_shim
from faults.drawing import FEATURES, FIRST_OF_FEATURES, FIRST_OF_MACHINES, KINDS, MACHINES, NOT_WITH, Fault, Job, draw
from faults.running import End, judge, reference, run
from support import warm

pytestmark = pytest.mark.timeout(300)  # whatever hangs

SAMPLE = (
    Fault(0, Job(3, "disk", 3), "SIGKILL", "backward", rank=1, step=1, delay_s=0.0),
    Fault(1, Job(2, "host", 2), "SIGSTOP", "forward", rank=0, step=2, delay_s=0.0),
    Fault(2, Job(1, "device", 3), "exception", "loader", rank=2, step=1, delay_s=0.0),
    Fault(3, Job(0, "device", 2), "other option", "lr before the forward", rank=1, step=2, delay_s=0.0),
    Fault(4, Job(0, "host", 3), "other option", "lr before the step", rank=1, step=1, delay_s=0.0),
    Fault(5, Job(0, "device", 2), "rank skips", "step", rank=1, step=1, delay_s=0.0),
    Fault(6, Job(2, "device", 2), "rank leaves the loop", "loader", rank=0, step=1, delay_s=0.0),
    Fault(7, Job(3, "device", 2), "call by one rank alone", "prepare", rank=1, step=1, delay_s=0.0),
    Fault(8, Job(3, "host", 2), "exception on all ranks, caught", "forward", rank=0, step=1, delay_s=0.0),
    Fault(9, Job(3, "device", 2), "gradients dropped", "step", rank=1, step=1, delay_s=0.0),
    Fault(10, Job(3, "device", 4, feature="secondary shards"), "SIGKILL", "backward", rank=3, step=1, delay_s=0.0),
    Fault(11, Job(2, "disk", 2, feature="an average"), "exception on all ranks, caught", "loss", 0, 2, delay_s=0.0),
)
# Run in a process that has the shim.
OF_MACHINES = """
import json
from concurrent.futures import ThreadPoolExecutor
from faults.drawing import Fault, Job
from faults.running import run
SAMPLE = (
    Fault(0, Job(3, "disk", 2), "drive is full", "writing", rank=1, step=1, delay_s=0.0),
    Fault(1, Job(2, "disk", 2), "drive cannot be read", "reading", rank=0, step=1, delay_s=0.0),
    Fault(2, Job(1, "disk", 2), "file overwritten", "loader", rank=1, step=2, delay_s=0.0),
    Fault(3, Job(3, "device", 2), "exception in a hook of all ranks, caught", "backward hook", 0, step=1, delay_s=0.0),
    Fault(4, Job(0, "host", 2), "checkpoint damaged", "overwritten", rank=1, step=1, delay_s=0.0),
    Fault(5, Job(3, "host", 2), "slow connection", "forward", rank=0, step=1, delay_s=0.0),
    Fault(6, Job(3, "disk", 2, feature="freed gradients"), "byte changed on its way", "reading", 1, 1, delay_s=0.0),
    Fault(7, Job(3, "disk", 2, feature="packed parameters"), "EIO once or twice", "reading", 0, 1, delay_s=0.0),
)
with ThreadPoolExecutor(3) as threads:
    outcomes = list(threads.map(run, SAMPLE))
print(json.dumps([[outcome.problems, [end.text for end in outcome.ends]] for outcome in outcomes]))
"""


def test_drives_connections_and_hooks_may_fail() -> None:
    done = warm.run(OF_MACHINES, env=io_shim.environment(), timeout=300)
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout.splitlines()[-1])
    assert [problems for problems, _ in outcomes] == [[]] * len(outcomes)
    assert "reading " in outcomes[1][1][0] and "EIO: Input/output error" in outcomes[1][1][0]
    assert "are not those that were written: " in outcomes[2][1][1]
    assert "rank 1 is gone: its process has ended, after StorageError: " in outcomes[2][1][0]


def test_ranks_end_as_documented_whatever_happens_to_one_of_them() -> None:
    with ThreadPoolExecutor(3) as threads:
        outcomes = list(threads.map(run, SAMPLE))
    problems = [f"{outcome.fault}: {problem}" for outcome in outcomes for problem in outcome.problems]
    assert not problems, "\n".join(problems)
    assert all(outcome.is_named for outcome in outcomes if outcome.fault.kind != "exception on all ranks, caught")
    said = {outcome.fault.seed: outcome.ends for outcome in outcomes}
    assert "is gone: its process has ended" in said[0][0].text
    assert "rank 0 does not answer: its process is stopped" in said[1][1].text
    assert "rank 2 is gone: its process has ended, after Broken: broken on purpose" in said[2][0].text
    assert "param_groups[0]['lr'] = 0.01 on rank 0 and param_groups[0]['lr'] = 0.5 on rank 1" in said[3][0].text
    assert "optimizer.step() with param_groups[0]['lr'] = 0.5" in said[4][0].text
    assert "steps taken: 2 on rank 0 and steps taken: 1 on rank 1" in said[5][0].text
    last = said[7][0].text
    assert "rank 1 did not call it" in last or "rank 1 made its last call" in last, last


@pytest.mark.parametrize(("first", "kinds"), [(0, KINDS), (FIRST_OF_MACHINES, MACHINES)])
def test_a_number_draws_the_same_fault_again_and_numbers_draw_all_kinds(
    first: int, kinds: dict[str, tuple[str, ...]]
) -> None:
    faults = [draw(seed) for seed in range(first, first + 1000)]
    assert faults == [draw(seed) for seed in range(first, first + 1000)]
    assert {fault.kind for fault in faults} == set(kinds)
    assert {(fault.kind, fault.phase) for fault in faults} == {(kind, phase) for kind in kinds for phase in kinds[kind]}


def test_features_are_drawn_with_all_kinds_that_go_with_them() -> None:
    faults = [draw(seed) for seed in range(FIRST_OF_FEATURES, FIRST_OF_FEATURES + 3000)]
    assert faults[:100] == [draw(seed) for seed in range(FIRST_OF_FEATURES, FIRST_OF_FEATURES + 100)]
    for feature, stages in FEATURES.items():
        mine = [fault for fault in faults if fault.job.feature == feature]
        assert {fault.kind for fault in mine} == {*KINDS, *MACHINES} - NOT_WITH.get(feature, set())
        assert {fault.job.stage for fault in mine} == {*stages}
        assert all(fault.rank < fault.job.world_size for fault in mine)


def test_an_end_that_is_not_as_documented_is_told() -> None:
    """The judge itself: it must not be content with everything."""
    fault = SAMPLE[0]
    right = End(1, "CommunicationError", "rank 0 failed: rank 1 is gone", [])
    guilty = End(-9, "", "", [])
    assert not judge(fault, [right, guilty, right], 1.0).problems
    for wrong in (
        End(None, "", "", []),
        End(-6, "", "", []),
        End(1, "RuntimeError", "rank 1", []),
        End(0, "", "", [1.0]),
        End(1, "CommunicationError", "rank 0 failed: no rank is behind", []),
    ):
        assert judge(fault, [wrong, guilty, right], 1.0).problems, wrong


def test_the_judge_asks_for_an_end_of_the_connection_for_the_file_and_for_the_own_error() -> None:
    reset = replace(SAMPLE[0], kind="connection reset")
    said = End(1, "CommunicationError", "rank 0 failed: {}. Every rank must", [])

    def problems(fault: Fault, text: str, own: End) -> list[str]:
        other = replace(said, text=said.text.format(text))
        return judge(fault, [other, own, other], 1.0).problems

    lost = End(1, "CommunicationError", "", [])
    assert not problems(reset, "rank 1 waits in the gather", lost)
    assert not problems(reset, "all ranks are there, so the network between them has failed", lost)
    assert problems(reset, "rank 2 is gone", lost)
    cut = replace(SAMPLE[0], kind="file cut")
    assert not problems(cut, "rank 1 is gone", End(1, "StorageError", "", []))
    assert problems(cut, "rank 1 is gone", End(1, "RuntimeError", "", []))
    assert not problems(cut, "rank 1 is gone", End(1, "CheckpointError", "rank 1: StorageError: reading 256 bytes", []))
    assert problems(cut, "rank 1 is gone", End(1, "CheckpointError", "it is damaged", []))
    damaged = replace(SAMPLE[0], kind="checkpoint damaged")
    for text, is_right in (("saved/rank-00001-of-00003.safetensors has 3 bytes", True), ("it is damaged", False)):
        ends = [End(1, "CheckpointError", text, [])] * 3
        assert (not judge(damaged, ends, 1.0).problems) is is_right
    right = reference(SAMPLE[0].job)
    slow = replace(SAMPLE[0], kind="slow drive")
    assert not judge(slow, [End(0, "", "", losses) for losses in right], 1.0).problems
    wrong = [End(0, "", "", [loss + 1e-3 for loss in losses]) for losses in right]
    assert judge(slow, wrong, 1.0).problems
