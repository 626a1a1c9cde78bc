"""Command lines and files that nobody would write, drawn from a seed. Each command must end in time, with an exit code
and at most one sentence, and without a traceback.

    python tests/cli/fuzz.py 500 [FIRST_SEED]
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from typer.testing import CliRunner, Result

from zerostd.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ROOT / "benchmarks" / "clusters" / "1024x8.json"
LIMIT_S = 60
NUMBERS = [
    "0",
    "1",
    "-1",
    "2",
    "3",
    "7",
    "64",
    "1000",
    "1e9",
    "10**30",
    "nan",
    "inf",
    "-inf",
    "0.5",
    "1_000",
    "0x10",
    "٣",
    "true",
]
NUMBERS += [
    str(10**30),
    str(10**400),
    str(2**63),
    str(-(2**63)),
    "",
    " ",
    "a",
    "'",
    "\\",
    "\n",
    "🜁",
    "\x00",
    "--",
    "-",
    "%s",
]
SIZES = ["1", "350M", "7.5B", "1T", "1e400B", "-1B", "10" * 300 + "T", "0", "B", "1.5.5M", "9" * 5000, "", "\uff11B"]
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "vocab_size": 100,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "max_position_embeddings": 128,
}
RUN = {"format": 1, "world_size": 1, "started": 0.0, "device": "cpu"}
STEP = {"kind": "step", "step": 1, "start": 0.0, "end": 1.0}
PLAN_OPTIONS = [
    "--hidden",
    "--layers",
    "--vocabulary",
    "--world",
    "--stage",
    "--samples",
    "--sequence",
    "--accumulate",
    "--batch",
]
PLAN_OPTIONS += [
    "--accumulate",
    "--step-samples",
    "--scaling",
    "--budget",
    "--activations",
    "--precision",
    "--disk-path",
]
FLAGS = ["--clip", "--recompute", "--table", "--json", "--meta"]


class TooLongError(Exception):
    """A command did not end in time."""


class Fuzz:
    """One seed's draws; its files are in `folder`."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.draw = random.Random(seed)
        self.folder = folder

    def words(self) -> list[str]:
        """Return a command line."""
        command = self.draw.choice([self._plan, self._plan, self._report, self._merge, self._rest])
        words = command()
        if self.draw.random() < 0.1:
            words.insert(self.draw.randrange(len(words) + 1), self.draw.choice(NUMBERS))
        return [word for word in words if "\x00" not in word or self.draw.random() < 0.5]

    def _plan(self) -> list[str]:
        words = ["plan", "--cluster", str(self._file(json.loads(CLUSTER.read_text())))]
        kind = self.draw.random()
        if kind < 0.5:
            words += ["--params", self.draw.choice(SIZES if kind < 0.2 else ["1M", "350M", "7.5B"])]
        elif kind < 0.9:
            words += ["--config", str(self._file(CONFIG))]
        else:
            words += [self.draw.choice(["factories:model", "nowhere:model", "a:b:c", "os:getcwd", "os:abort_", ":"])]
        for option in self.draw.sample(PLAN_OPTIONS, self.draw.randrange(4)):
            words += [option, self.draw.choice(NUMBERS)]
        return words + self.draw.sample(FLAGS, self.draw.randrange(2))

    def _report(self) -> list[str]:
        run = self.folder / "run"
        run.mkdir()
        self._file(RUN, run / "run.json")
        self._file(STEP, run / "rank-0.jsonl")
        paths = [str(run), str(run), "/dev/zero", "/dev/stdin", str(self.folder / "nowhere"), "/proc/self", "a\x00b"]
        words = ["report", self.draw.choice(paths), "-o", str(self.folder / "page.html")]
        if self.draw.random() < 0.3:
            words += [self.draw.choice(["--trace", "--tensorboard", "-o"]), self.draw.choice(["/dev/null/x", "/", ""])]
        return words + self.draw.sample(["--json"], self.draw.randrange(2))

    def _merge(self) -> list[str]:
        checkpoint = self.folder / "checkpoint"
        checkpoint.mkdir()
        for name in ("manifest.json", "rank-0.safetensors", "config.json"):
            self._file({"format": 1, "tensors": {}, "files": {}}, checkpoint / name)
        words = ["merge", self.draw.choice([str(checkpoint), "/dev/zero", "/"]), str(self.folder / "out")]
        for option in self.draw.sample(["--dtype", "--max-shard-size"], self.draw.randrange(3)):
            words += [option, self.draw.choice([*NUMBERS, "fp16", "1GB", "1e400GB"])]
        return words

    def _rest(self) -> list[str]:
        commands = ["plan", "report", "merge", "reprot", "--version", "--help", "-h", ""]
        more = [*NUMBERS, *FLAGS, "--help", "/dev/zero"]
        return [self.draw.choice(commands), *self.draw.sample(more, self.draw.randrange(3))]

    def _file(self, value: Any, path: Path | None = None) -> Path:
        """Write a document: as it is, changed, damaged, or something that is no file."""
        path = path or self.folder / f"{self.draw.randrange(10**9)}.json"
        kind = self.draw.random()
        if kind < 0.05:
            os.mkfifo(path)
        elif kind < 0.1:
            path.symlink_to(self.draw.choice(["/dev/zero", "/dev/full", "/nowhere", str(path), "/proc/self/mem"]))
        elif kind < 0.15:
            path.mkdir()
        elif kind < 0.25:
            depth = 10 ** self.draw.randrange(2, 6)
            path.write_text(self.draw.choice(["[" * depth, '{"a":' * depth, "[" * depth + "]" * depth]))
        else:
            text = json.dumps(self._changed(value) if kind < 0.7 else value).encode()
            if kind > 0.9:
                place = self.draw.randrange(len(text))
                text = text[:place] + self.draw.randbytes(self.draw.randrange(4)) + text[place + 1 :]
            path.write_bytes(text + b"\n")
        return path

    def _changed(self, value: Any) -> Any:
        """Return a document with one value replaced, somewhere."""
        if isinstance(value, dict | list) and value and self.draw.random() < 0.85:
            keys = list(value) if isinstance(value, dict) else range(len(value))
            key = self.draw.choice(keys)
            copy = value.copy()
            if isinstance(value, dict) and self.draw.random() < 0.1:
                del copy[key]
            else:
                copy[key] = self._changed(value[key])
            return copy
        values = [
            None,
            True,
            0,
            -1,
            1.5,
            10**30,
            10**400,
            1e308,
            float("nan"),
            float("inf"),
            "",
            "x" * 9,
            "../..",
            [],
            {},
        ]
        return self.draw.choice([*values, [[]] * 3, {"a": {}}, "<script>", "\ud800"])


def check(seed: int) -> tuple[str, str]:
    """Run the command of a seed; return its name, and what is wrong with how it ended."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise TooLongError(f"no end after {LIMIT_S} s")

    with tempfile.TemporaryDirectory() as folder:
        words = Fuzz(seed, Path(folder)).words()
        before = signal.signal(signal.SIGALRM, stop)
        signal.alarm(LIMIT_S)
        try:
            result = CliRunner().invoke(app, words)
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)
    problem = _problem(result)
    return words[0] if words else "", f"seed {seed}, {words}: {problem}" if problem else ""


def _problem(result: Result) -> str:
    error = result.exception
    if error is not None and not isinstance(error, SystemExit):
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error} at {frame.filename}:{frame.lineno}"[:400]
    said = [line for line in result.stderr.splitlines() if line.startswith("zerostd: ")]
    usage = "Usage" in result.output or "Error ─" in result.output  # of the parser of options
    if result.exit_code not in (0, 2) or (result.exit_code == 2 and not usage and len(said) != 1):
        return f"exit code {result.exit_code}: {result.stderr[-300:]!r}"
    return f"{len(said[0])} characters: {said[0][:200]}" if said and len(said[0]) > 2000 else ""


def main(num_lines: int, first: int) -> None:
    os.chdir(Path(__file__).parent)
    commands: Counter[str] = Counter()
    num_wrong = 0
    for seed in range(first, first + num_lines):
        command, problem = check(seed)
        commands[command] += 1
        num_wrong += bool(problem)
        if problem:
            print(problem, flush=True)
    print(f"{num_lines} command lines, {num_wrong} wrong: {dict(commands.most_common(6))}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
