"""Host memory while files are loaded: the weights, and next to nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import save_file
from torch import nn

import zerostd
from support import warm

PROGRAM = """
import ctypes, resource, sys
import torch, zerostd
from pathlib import Path

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

ctypes.CDLL(None).mallopt(-3, 1 << 20)  # what is freed goes back to the system, as that of larger models does
with zerostd.empty_init():
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024, bias=False) for _ in range(48)])
before = resident()
peak = before
from zerostd.checkpointing.storage.safetensors_files import SafetensorsReader
read = SafetensorsReader.read
def watched(self, *args):
    global peak
    read(self, *args)
    peak = max(peak, resident())
SafetensorsReader.read = watched
zerostd.dispatch(model, sys.argv[1], budget={"device": "20MiB"})
total = sum(4 * 1024 * 1024 for _ in range(48))
print((peak - before) / total)
"""


def test_loading_takes_little_more_than_the_weights(tmp_path: Path) -> None:
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(48)])
    save_file(dict(model.state_dict()), tmp_path / "model.safetensors")
    (tmp_path / "load.py").write_text(PROGRAM)
    done = warm.run_file(str(tmp_path / "load.py"), str(tmp_path / "model.safetensors"), folder=tmp_path, timeout=240)
    assert done.returncode == 0, done.stderr
    # The block that is read is 2 % of this model, and so is a gathered group, which on a CPU is host memory, too.
    assert 0.95 < float(done.stdout) < 1.08
    with pytest.raises(zerostd.PrepareError, match="the device must hold"):
        zerostd.dispatch(model, budget="1MiB")
