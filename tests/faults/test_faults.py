"""A sample of the faults that `make faults` draws, and that a fault can be drawn again."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from faults.drawing import KINDS, Fault, Job, draw
from faults.running import End, judge, run

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
)


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
    assert "rank 1 did not come" in said[7][0].text or "rank 1 made its last call" in said[7][0].text, said[7][0].text


def test_a_number_draws_the_same_fault_again_and_numbers_draw_all_kinds() -> None:
    faults = [draw(seed) for seed in range(1000)]
    assert faults == [draw(seed) for seed in range(1000)]
    assert {fault.kind for fault in faults} == set(KINDS)
    assert {(fault.kind, fault.phase) for fault in faults} == {(kind, phase) for kind in KINDS for phase in KINDS[kind]}


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
