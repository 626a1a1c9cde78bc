"""Functions of a test that run in Triton's interpreter, which is chosen when triton is imported: so in a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def compare_interpreted(test_file: str) -> None:
    """Call `compare` of a test's file where kernels of Triton are interpreted. Skips the test without triton."""
    pytest.importorskip("triton")
    path = Path(test_file)
    paths = [str(path.parents[1]), str(path.parent), *sys.path]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
    program = f"import {path.stem}; {path.stem}.compare()"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
