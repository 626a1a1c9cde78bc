"""The shim of io_shim.c: compile it, start a process with it, and tell it from inside what to do to which calls."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"


@functools.cache
def library() -> Path:
    """Return the compiled shim; skip the test where it cannot be made."""
    if sys.platform != "linux" or shutil.which("cc") is None:
        pytest.skip("the shim needs Linux and a C compiler")
    target = Path(tempfile.mkdtemp(prefix="io-shim-")) / "io_shim.so"
    command = ["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", str(HERE / "io_shim.c"), "-o", str(target), "-ldl"]
    subprocess.run(command, check=True)
    return target


def environment(rule: str = "") -> dict[str, str]:
    """Return the environment of a process that runs with the shim, and with a rule from its start."""
    paths = os.pathsep.join([str(SOURCE), str(HERE.parent)])
    return {**os.environ, "PYTHONPATH": paths, "LD_PRELOAD": str(library()), "IO_SHIM": rule, "OMP_NUM_THREADS": "1"}


class Fault:
    """A rule that is in force inside `with`."""

    def __init__(self, rule: str) -> None:
        self.rule = rule
        self.taken = 0  # calls that it was applied to

    def change(self, rule: str) -> None:
        """Apply another rule from now on, or none; calls that are held go on."""
        shim = ctypes.CDLL(None)
        self.taken += shim.io_shim_taken()
        shim.io_shim_set(rule.encode())

    def let_pass(self) -> None:
        """Do nothing more to calls, and count them."""
        self.change(re.sub("action=[a-z]+", "action=pass", self.rule))


@contextlib.contextmanager
def fault(
    under: Path | str, verb: str, action: str, number: int = 0, *, first: int = 1, count: int = 0
) -> Iterator[Fault]:
    """Apply a rule to this process, which was started with the shim. `number` is an errno or milliseconds."""
    shim = ctypes.CDLL(None)
    rule = f"under={under},verb={verb},action={action},errno={number},first={first},count={count}"
    given = Fault(rule)
    shim.io_shim_set(rule.encode())
    try:
        yield given
    finally:
        given.change("")


# The start of a script that runs with the shim: its server has none of the variables of the script.
START = """
import ctypes, os
ctypes.CDLL(None).io_shim_set(os.environ["IO_SHIM"].encode())
"""
EIO = errno.EIO
ENOSPC = errno.ENOSPC
