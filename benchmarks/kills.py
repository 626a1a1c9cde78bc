"""A training that is killed again and again: SIGKILL to one rank or all, in saving, loading or a step, at random times.

    python benchmarks/kills.py --kills 60

Stories of a few kills each, with the code of the tests (tests/checkpoints/kills.py). After every kill all checkpoints
that are there are read whole; after every start nothing is left of an unfinished one; at the end parameters, optimizer
states, random states and options are those of a run without kills, bit by bit. The seed of a story decides in what, how
late and whom each kill hits.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from datetime import date
from pathlib import Path

from gpt import RESULTS, machine

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from checkpoints.kills import PHASES, WORLD_SIZE, Story
from checkpoints.runs import Job

JOBS = [
    Job(precision="bf16", placement="host"),
    Job(placement="all tiers", stage=2),
    Job(precision="fp16", placement="parameters on host"),
    Job(stage=1, rules="tensor lr"),
    Job(precision="bf16", placement="parameters on disk"),
]
WORDS = {"save": "saving", "load": "loading", "train": "a step"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--each", type=int, default=4, help="kills of one story")
    parser.add_argument("--seed", type=int, default=0, help="of the first story")
    parser.add_argument("--write", action="store_true", help="write results/kills.md")
    options = parser.parse_args()
    begun, stories = time.monotonic(), []
    while (done := sum(len(story.killed) for story in stories)) < options.kills:
        number = len(stories)
        job, waits, kills = JOBS[number % len(JOBS)], number % 2 == 0, min(options.each, options.kills - done)
        with tempfile.TemporaryDirectory(prefix="kills-") as folder:
            story = Story(Path(folder), job, seed=options.seed + number, kills=kills, waits=waits)
            story.tell()  # raises if anything is lost
        stories.append(story)
        print(f"{done + kills} kills: {job}, {', '.join(story.killed)}", flush=True)
    text = report(stories, options, time.monotonic() - begun)
    print(text, end="")
    if options.write:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "kills.md").write_text(text)


def report(stories: list[Story], options: argparse.Namespace, seconds: float) -> str:
    """In Markdown."""
    hits: Counter[tuple[str, str]] = Counter()
    for story in stories:
        for kill, what in zip(story.drawn, story.killed, strict=True):
            hits[what, "all" if len(kill.victims) > 1 else "one"] += 1
    lines = [
        "# Killed again and again",
        "",
        f"{len(stories)} trainings on {WORLD_SIZE} ranks, {options.each} kills each: SIGKILL to one rank or to all, at "
        "a random time after a sign of life.",
        "After every kill each checkpoint that was there was read whole; after every start nothing was left of an "
        "unfinished one; at the",
        "end parameters, optimizer states, random states, loss scale and options were those of a run without kills, "
        "bit by bit.",
        "",
        f"- machine: {machine()}",
        f"- command: `python benchmarks/kills.py --kills {options.kills} --each {options.each} --seed {options.seed}`",
        f"- date: {date.today()}; {seconds:.0f} s",
        f"- kills: {sum(hits.values())}; checkpoints torn: 0; trainings that ended otherwise: 0",
        f"- kills that left an unfinished checkpoint, which the next start removed: "
        f"{sum(story.num_stray for story in stories)}",
        "",
        "| killed in | one rank | all ranks |",
        "|---|--:|--:|",
        *(f"| {WORDS[phase]} | {hits[phase, 'one']} | {hits[phase, 'all']} |" for phase in PHASES),
        "",
        "| training | kills in |",
        "|---|---|",
        *(f"| {_words(story)} | {', '.join(WORDS[what] for what in story.killed)} |" for story in stories),
    ]
    return "\n".join(lines) + "\n"


def _words(story: Story) -> str:
    return f"{story.job}, {'waits for each save' if story.waits else 'goes on while it saves'}"


if __name__ == "__main__":
    main()
