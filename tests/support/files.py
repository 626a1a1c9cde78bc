"""What processes have open."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def opened(folder: Path, process: int | str = "self") -> dict[str, os.stat_result]:
    """What a process has open of the files that were made in a folder, with a name or without, by descriptor."""
    found = {}
    for entry in os.listdir(f"/proc/{process}/fd"):
        link = f"/proc/{process}/fd/{entry}"
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if os.readlink(link).startswith(str(folder)):
                found[link] = os.stat(link)
    return found
