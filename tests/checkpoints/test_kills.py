"""SIGKILL at any time, to one rank or all: the newest checkpoint is whole, and training ends where it would have."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoints.kills import PHASES, Story, server
from checkpoints.runs import Job
from checkpoints.trainee import die_everywhere

KILLS = 4  # of each story
STORIES = [  # seeds that aim at all phases
    (Job(precision="bf16", placement="host"), 8, True),
    (Job(placement="all tiers", stage=2), 27, False),
]


@pytest.mark.parametrize(("job", "seed", "waits"), STORIES, ids=["waiting", "going on"])
def test_a_training_that_is_killed_again_and_again(job: Job, seed: int, waits: bool, tmp_path: Path) -> None:
    story = Story(tmp_path, job, seed=seed, kills=KILLS, waits=waits)
    story.tell()
    assert len(story.killed) == KILLS and {kill.phase for kill in story.drawn} == set(PHASES)


def test_killed_before_every_call_of_the_system(tmp_path: Path) -> None:
    """One rank, and a save that ends with the removal of an older one."""
    ours, theirs = server().Pipe(duplex=False)
    process = server().Process(target=die_everywhere, args=(str(tmp_path), theirs))
    process.start()
    theirs.close()
    assert ours.poll(120), "it hangs"
    calls, wrong = ours.recv()
    process.join(10)
    assert not wrong, "\n".join(wrong)
    for call in ("open", "mkdir", "pwrite", "fsync", "rename", "unlink", "rmdir"):
        assert call in calls, f"no kill before {call}: {calls}"
