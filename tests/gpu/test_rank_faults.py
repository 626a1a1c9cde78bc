"""Ranks over nccl that are killed, stopped, raise or go astray: the others raise, name them, and end with exit code 1.

All ranks are on one GPU: nccl refuses two ranks of one host on a GPU, so each has a host name of its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.processes import free_port

pytestmark = pytest.mark.gpu

LIMIT_S = 10
LATEST_S = 90.0  # far above the limit: nccl and torch are started, too

PROGRAM = """
import os, signal, sys, time
import torch, zerostd
how, stage, rank = sys.argv[1], int(sys.argv[2]), int(os.environ["RANK"])
torch.cuda.set_device(0)
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4)]).cuda()
optimizer = torch.optim.AdamW(model.parameters())
placement = zerostd.Placement(optimizer_states="host")
model, optimizer = zerostd.prepare(model, optimizer, stage=stage, placement=placement, precision="bf16")
for step in range(6):
    if step == 3 and rank == 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "raise":
            raise ValueError("loader broke")
        if how == "leave":
            time.sleep(600)
        if how == "skip":
            continue
        if how == "lr":
            optimizer.param_groups[0]["lr"] = 0.5
    loss = model(torch.randn(8, 64, device="cuda")).square().mean()
    float(loss)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("how", ["kill", "stop", "raise", "leave", "skip", "lr"])
def test_the_others_raise_and_name_the_rank(how: str, stage: int, tmp_path: Path) -> None:
    port = str(free_port())
    ranks = []
    for rank in range(2):
        own = {"RANK": str(rank), "LOCAL_RANK": "0", "NCCL_HOSTID": f"pretended-{rank}"}
        everyone = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = os.environ | own | everyone | {"NCCL_SOCKET_IFNAME": "lo", "ZEROSTD_TIMEOUT_S": str(LIMIT_S)}
        with (tmp_path / f"log-{rank}").open("w") as log:
            command = [sys.executable, "-c", PROGRAM, how, str(stage)]
            ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    begun = time.monotonic()
    try:
        code = ranks[0].wait(LATEST_S)
    finally:
        for process in ranks:
            process.send_signal(signal.SIGKILL)
            process.wait()
    said = (tmp_path / "log-0").read_text()
    assert code == 1, f"exit code {code} after {time.monotonic() - begun:.0f} s:\n{said[-3000:]}"
    assert "CommunicationError" in said and "rank 1" in said.rpartition("CommunicationError")[2], said[-3000:]
