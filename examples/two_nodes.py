"""Run a script on two nodes: two agents of torchrun, as on two machines, here both on this one.

    python examples/two_nodes.py [SCRIPT [OPTIONS ...]]

Left out, the script is examples/digits.py. On two machines each starts its own agent, with the first one's address:

    torchrun --nnodes 2 --node-rank 0 --master-addr HOST --master-port 29500 --nproc-per-node 8 SCRIPT
    torchrun --nnodes 2 --node-rank 1 --master-addr HOST --master-port 29500 --nproc-per-node 8 SCRIPT

The script itself does not know: it is the same on one rank, on several, and on several nodes.
"""

import contextlib
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

NODES, LIMIT_S = 2, 300.0
DIGITS = str(Path(__file__).parent / "digits.py")


def free_port():
    """Below those that systems hand out by themselves: somebody could get it before the agents do."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", random.randrange(20000, 32000)))
            return probe.getsockname()[1]


def start(node, port, script):
    """The agent of one node. The first one's ranks print; what the others say is shown if they fail."""
    agent = ["-m", "torch.distributed.run", "--nnodes", str(NODES), "--node-rank", str(node), "--nproc-per-node", "1"]
    meeting = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    return subprocess.Popen(
        [sys.executable, *agent, *meeting, *script],
        env=environment,
        stdout=None if node == 0 else subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_all(agents):
    """True if all end well. When one fails or time is up, the others are ended: they would wait for it."""
    deadline = time.monotonic() + LIMIT_S
    while any(agent.poll() is None for agent in agents):
        if any(agent.poll() not in (None, 0) for agent in agents) or time.monotonic() > deadline:
            for agent in agents:
                agent.terminate()
            break
        time.sleep(0.05)
    outputs = [agent.communicate()[0] for agent in agents]
    for node, (agent, output) in enumerate(zip(agents, outputs, strict=True)):
        print(f"node {node} ended with {agent.returncode}")
        if agent.returncode and output:
            print(output)
    return all(agent.returncode == 0 for agent in agents)


def main(script):
    port = free_port()
    started = time.monotonic()
    is_well = wait_for_all([start(node, port, script) for node in range(NODES)])
    print(f"{NODES} nodes, {time.monotonic() - started:.1f} s")
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or [DIGITS]))
