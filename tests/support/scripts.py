"""Somebody's script, run as by a launcher or without one, in processes that have torch loaded already."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
from pathlib import Path

from support.processes import run_ranks

ROOT = Path(__file__).resolve().parents[2]
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def run_script(path: str | Path, *words: str, ranks: int = 0, folder: Path = ROOT, timeout: float = 240) -> list[str]:
    """What each rank printed, of a script in `folder` with these arguments; of one process alone without ranks."""
    return run_ranks(_run, max(1, ranks), str(path), words, str(folder), ranks > 0, timeout=timeout)


def _run(rank: int, path: str, words: tuple[str, ...], folder: str, launched: bool) -> str:
    if not launched:
        for name in LAUNCHERS:
            del os.environ[name]
    os.chdir(folder)
    sys.argv = [path, *words]
    sys.path.insert(0, str(Path(path).resolve().parent))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise
    return printed.getvalue()
