"""Several nccl ranks on one GPU: zerostd's stages against FSDP2, DDP, DDP + ZeroRedundancyOptimizer and DeepSpeed.

    python benchmarks/shared_gpu.py --write shared-gpu        # 2 and 4 ranks, 0.4 B and 1.3 B, at most 300 s

nccl refuses two ranks of one host on a GPU, so each rank gives itself a host name of its own and they talk over
sockets. It shows order, overlap, memory and numerics, not the speed of NVLink: read the ratios. Where there is an MPS
daemon to start, kernels of the ranks run side by side. All systems train the same GPT with bf16 compute, fp32 masters,
AdamW(fused=True) and clipping.

Each row has processes of its own, forked from this one, which has torch loaded and never touches the device. They
write to log files, and the row is what rank 0 has written after its last step. Ranks that do not end by themselves, or
take longer than the row may, are killed with all that they started, and the MPS daemon is started again. Rows, page
and logs go to $OUT, if it is set, as they come. DeepSpeed is looked for in `.peers/`, unpacked.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from gpt import GPT, RESULTS, Shape, draw, machine
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import zerostd

SIZES = {"tiny": (256, 4, 4), "0.4b": (1024, 24, 16), "1.3b": (2048, 24, 16)}
VOCABULARY = 32000
ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
MAX_NORM = 1.0
REFERENCE = "FSDP2"
FIRST = (REFERENCE, "stage 3", "stage 2", "stage 3, states on the host")  # before all others, in every size and world
OTHERS = ("DDP + ZeRO-1", "DDP", "DeepSpeed ZeRO-2", "DeepSpeed ZeRO-3")
MORE = ("stage 0", "stage 1", "stage 2, states on the host", "FSDP2, all on the host")  # on request
PEERS = Path(__file__).resolve().parent.parent / ".peers"
DEVICE = "cpu" if "--cpu" in sys.argv else "cuda"  # ranks are forked, so this process must not look for a device
WARM = 3  # steps that are not measured
FEWEST = 2  # measured steps of a row that is short of time
GRACE_S = 4.0  # for ranks to end, after the row is complete or one of them has failed
LEAST_S = 15.0  # that a row needs
DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


@dataclass(frozen=True)
class Row:
    """One system in one size and world."""

    size: str
    ranks: int
    system: str


@dataclass
class Outcome:
    """What a row measured, and how it ended."""

    row: Row
    step_s: float = 0.0
    gib: float = 0.0  # most that torch had allocated on a rank
    loss: float = 0.0  # after the steps that all rows make
    steps: int = 0  # measured
    took_s: float = 0.0
    problem: str = ""


# -- in a rank --


def prepare(system: str, model: nn.Module, batch: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function that makes one step and returns its loss."""
    if system.startswith("stage"):
        places = {"optimizer_states": "host"} if "host" in system else {}
        stage = int(system.split()[1].strip(","))
        ours, optimizer = zerostd.prepare(
            model,
            torch.optim.AdamW(model.parameters(), **ADAMW),
            stage=stage,
            precision="bf16",
            accumulate=1,
            max_grad_norm=MAX_NORM,
            placement=zerostd.Placement(**places),
        )
        return _loop(ours, optimizer)
    if system.startswith("DDP"):
        replicated = DistributedDataParallel(model, gradient_as_bucket_view=True)
        parameters = list(model.parameters())
        if system == "DDP":
            return _loop(replicated, torch.optim.AdamW(parameters, **ADAMW), parameters, autocasts=True)
        sharding = ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, **ADAMW)
        return _loop(replicated, sharding, parameters, autocasts=True)
    if system.startswith("DeepSpeed"):
        return _deepspeed(int(system[-1]), model, batch)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    offload = CPUOffloadPolicy(pin_memory=DEVICE == "cuda") if "host" in system else OffloadPolicy()
    for module in [*model.blocks, model]:
        fully_shard(module, mp_policy=policy, offload_policy=offload)
    return _loop(model, torch.optim.AdamW(model.parameters(), **ADAMW), list(model.parameters()))


def _loop(
    model: nn.Module, optimizer: torch.optim.Optimizer, clipped: Sequence[nn.Parameter] = (), *, autocasts: bool = False
) -> Callable[[Tensor, Tensor], Tensor]:
    """The usual loop. zerostd clips by itself."""

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocasts):
            loss: Tensor = model(tokens, targets)
        loss.backward()
        if clipped:
            nn.utils.clip_grad_norm_(clipped, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _deepspeed(stage: int, model: nn.Module, batch: int) -> Callable[[Tensor, Tensor], Tensor]:
    sys.path.insert(0, str(PEERS))
    sys.modules.pop("typing_extensions", None)  # torch has loaded the machine's, which may be too old
    os.environ |= {"DS_SKIP_CUDA_CHECK": "1", "DS_ACCELERATOR": DEVICE}
    import deepspeed

    deepspeed.init_distributed()
    config = {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": MAX_NORM,
        "bf16": {"enabled": True},
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "overlap_comm": True, "contiguous_gradients": True},
    }
    model = model.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def train(row: Row, arguments: argparse.Namespace, out: Path, stop_at: float) -> None:
    """Train one system, and let rank 0 write what was measured after each step. Past `stop_at` no step begins."""
    if DEVICE == "cuda":
        torch.cuda.set_device(0)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo")
    width, depth, heads = SIZES[row.size]
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = GPT(Shape(width, depth, heads, VOCABULARY, arguments.length))
    step = prepare(row.system, model, arguments.batch)
    del model
    generator = torch.Generator(DEVICE).manual_seed(1 + dist.get_rank())
    times: list[float] = []
    loss = 0.0
    for number in range(WARM + arguments.steps):
        if DEVICE == "cuda" and number == WARM:
            torch.cuda.reset_peak_memory_stats()
        batch = draw(generator, arguments.batch, arguments.length)
        _synchronize()
        dist.barrier()
        begin = time.perf_counter()
        mine = step(*batch)
        _synchronize()
        times.append(time.perf_counter() - begin)
        is_late = number + 1 >= WARM + FEWEST and time.monotonic() > stop_at
        peak = torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0
        shared = torch.tensor([is_late, peak], dtype=torch.float64, device=DEVICE)
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        dist.all_reduce(mine := mine.float())
        if number + 1 == WARM + FEWEST:
            loss = float(mine) / dist.get_world_size()
        if dist.get_rank() == 0 and number + 1 >= WARM + FEWEST:
            is_last = bool(shared[0]) or number + 1 == WARM + arguments.steps
            measured = times[WARM:]
            text = json.dumps([median(measured), float(shared[1]) / 2**30, loss, len(measured), is_last])
            out.with_suffix(".new").write_text(text)
            out.with_suffix(".new").rename(out)
        if shared[0]:
            break


def train_afresh(row: Row, arguments: argparse.Namespace, out: Path, stop_at: float) -> None:
    """Train in a fresh interpreter, where the device is lost in forked processes. It takes seconds to start."""
    words = json.dumps([asdict(row), str(out), stop_at])
    os.execv(sys.executable, [sys.executable, __file__, *sys.argv[1:], "--rank", words])


def _synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


# -- around the ranks --


def fork(log: Path, environment: dict[str, str], function: Callable[..., None], *arguments: Any) -> int:
    """Call a function in a forked process, which is a process group of its own; return its id."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        with suppress(OSError):  # the child does so too, and may have ended
            os.setpgid(pid, pid)
        return pid
    _run_child(log, environment, function, *arguments)


def _run_child(log: Path, environment: dict[str, str], function: Callable[..., None], *arguments: Any) -> NoReturn:
    code = 1
    try:
        os.setpgid(0, 0)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, 1)
        os.dup2(file, 2)  # no process that outlives its row may hold the pipe that somebody reads to its end
        os.environ |= environment
        function(*arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # destroying process groups may wait for ranks that are gone


def watch(pids: Sequence[int], limit_s: float, is_complete: Callable[[], bool]) -> dict[int, int]:
    """Wait for processes; kill those that are left at the limit, or a moment after the work is complete or one has
    failed. Return the exit codes of those that ended by themselves."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + limit_s
    is_ending = False
    while len(codes) < len(pids) and time.monotonic() < deadline:
        codes |= _ended(pids, codes)
        if not is_ending and (any(codes.values()) or is_complete()):
            is_ending = True
            deadline = min(deadline, time.monotonic() + GRACE_S)
        time.sleep(0.05)
    by_themselves = dict(codes)
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)  # also what a rank that has ended left behind
    deadline = time.monotonic() + GRACE_S  # a process inside the driver may not end at all: it is left
    while len(codes) < len(pids) and time.monotonic() < deadline:
        codes |= _ended(pids, codes)
        time.sleep(0.05)
    return by_themselves


def _ended(pids: Sequence[int], known: dict[int, int]) -> dict[int, int]:
    codes = {}
    for pid in pids:
        if pid not in known:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
    return codes


def run(row: Row, arguments: argparse.Namespace, folder: Path, limit_s: float) -> Outcome:
    """Measure one row, within `limit_s`."""
    begin = time.monotonic()
    name = f"{row.size}-{row.ranks}-{row.system}".replace(" ", "-").replace(",", "")
    out = folder / f"{name}.json"
    log = folder / f"{name}.log"
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    everyone = {"WORLD_SIZE": str(row.ranks), "LOCAL_WORLD_SIZE": str(row.ranks), "LOCAL_RANK": "0"}
    everyone |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NCCL_SOCKET_IFNAME": "lo"}
    pids = []
    for rank in range(row.ranks):
        own = {"RANK": str(rank), "NCCL_HOSTID": f"pretended-{rank}"}
        function = train if arguments.forks else train_afresh
        pids.append(fork(log, everyone | own, function, row, arguments, out, begin + 0.7 * limit_s))

    def is_complete() -> bool:
        return out.exists() and json.loads(out.read_text())[-1]

    try:
        codes = watch(pids, limit_s, is_complete)
    except BaseException:
        watch(pids, 0.0, is_complete)
        raise
    took_s = time.monotonic() - begin
    outcome = Outcome(row, took_s=took_s)
    if out.exists():
        outcome.step_s, outcome.gib, outcome.loss, outcome.steps, is_last = json.loads(out.read_text())
        if not is_last:
            outcome.problem = f"stopped after {took_s:.0f} s"
    else:
        lines = [line for line in log.read_text(errors="replace").splitlines() if "Error" in line] or ["no message"]
        outcome.problem = f"failed: {lines[-1][:150]}" if any(codes.values()) else f"no step in {took_s:.0f} s"
    if len(codes) < len(pids):
        outcome.problem = f"{outcome.problem}; {len(pids) - len(codes)} rank(s) killed".lstrip("; ")
    return outcome


@contextmanager
def mps() -> Iterator[bool]:
    """An MPS daemon inside the context, where there is one to start; whether there is."""
    if DEVICE != "cuda" or shutil.which("nvidia-cuda-mps-control") is None:
        yield False
        return
    folder = tempfile.mkdtemp(prefix="mps-")
    os.environ["CUDA_MPS_PIPE_DIRECTORY"] = folder
    os.environ["CUDA_MPS_LOG_DIRECTORY"] = folder
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    command = ["nvidia-cuda-mps-control", "-f"]  # in the foreground, so that it can be killed
    daemon = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, **quiet)
    try:
        deadline = time.monotonic() + GRACE_S
        while not Path(folder, "control").exists() and daemon.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        is_there = daemon.poll() is None and Path(folder, "control").exists()
        if not is_there:
            del os.environ["CUDA_MPS_PIPE_DIRECTORY"], os.environ["CUDA_MPS_LOG_DIRECTORY"]
        yield is_there
    finally:
        with suppress(subprocess.TimeoutExpired, OSError):
            subprocess.run(command[:1], input="quit\n", text=True, check=False, timeout=GRACE_S, **quiet)
        with suppress(subprocess.TimeoutExpired):
            daemon.wait(GRACE_S)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(daemon.pid, signal.SIGKILL)  # with its server
        shutil.rmtree(folder, ignore_errors=True)


def measure(rows: Sequence[Row], arguments: argparse.Namespace, folder: Path) -> Iterator[tuple[Outcome, bool]]:
    """Yield the outcome of each row, and whether MPS was there."""
    deadline = time.monotonic() + arguments.budget
    left = list(rows)
    while left:
        with mps() as has_mps:
            while left:
                row = left.pop(0)
                left_s = deadline - time.monotonic()
                if row.system.startswith("DeepSpeed") and not (PEERS / "deepspeed").exists():
                    yield Outcome(row, problem="not there: .peers/ has no deepspeed"), has_mps
                elif left_s < LEAST_S:
                    yield Outcome(row, problem="no time was left"), has_mps
                else:
                    outcome = run(row, arguments, folder, min(arguments.limit, left_s))
                    yield outcome, has_mps
                    if "killed" in outcome.problem:
                        break  # a client that was killed may leave the daemon without use


# -- the page --


def page_of(outcomes: Sequence[Outcome], arguments: argparse.Namespace, device: str, *, has_mps: bool) -> str:
    """The results as a page."""
    lines = [
        "# Several nccl ranks on one GPU",
        "",
        f"GPT, {arguments.batch} x {arguments.length} tokens a rank, bf16 compute, fp32 masters, AdamW(fused=True),",
        f"clip {MAX_NORM:g}. Ranks talk over sockets, {'with' if has_mps else 'without'} MPS. Each row in processes of",
        f"its own, one after the other in one run: {WARM} steps that do not count, then at most {arguments.steps}, of",
        "which the median. GiB: the most that torch had allocated on a rank in those. Ratios are to FSDP2 of the same",
        f"size and world; below 1, the row is faster or smaller. Loss: after step {WARM + FEWEST}.",
        "",
        f"- machine: {device}",
        f"- command: `python benchmarks/shared_gpu.py {' '.join(sys.argv[1:])}`",
        f"- date: {date.today()}",
    ]
    for (size, ranks), group in itertools.groupby(
        sorted(outcomes, key=lambda each: (each.row.size, each.row.ranks)), lambda each: (each.row.size, each.row.ranks)
    ):
        of_world = list(group)
        reference = next((each for each in of_world if each.row.system == REFERENCE and each.steps), None)
        lines += ["", f"## {size}, {ranks} ranks", ""]
        lines += ["| system | step s | to FSDP2 | GiB a rank | to FSDP2 | loss | steps | remark |"]
        lines += ["|---|--:|--:|--:|--:|--:|--:|---|"]
        for each in of_world:
            cells = [each.row.system, *[""] * 6, each.problem]
            if each.steps:
                cells[1:7] = [f"{each.step_s:.4f}", "", f"{each.gib:.2f}", "", f"{each.loss:.4f}", str(each.steps)]
            if each.steps and reference is not None:
                cells[2] = f"{each.step_s / reference.step_s:.3f}"
                cells[4] = f"{each.gib / reference.gib:.3f}" if reference.gib else ""
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def describe(out: Path) -> None:
    """Write what the machine is, from a process that may touch the device."""
    torch.ones(1, device=DEVICE)
    out.write_text(machine())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="0.4b,1.3b", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks")
    parser.add_argument("--systems", default=";".join((*FIRST, *OTHERS)), help=f"more: {'; '.join(MORE)}")
    parser.add_argument("--batch", type=int, default=4, help="sequences a rank")
    parser.add_argument("--length", type=int, default=512, help="tokens in a sequence")
    parser.add_argument("--steps", type=int, default=5, help="most measured steps of a row")
    parser.add_argument("--limit", type=float, default=45.0, help="most seconds of a row")
    parser.add_argument("--budget", type=float, default=290.0, help="most seconds of all")
    parser.add_argument("--write", metavar="NAME", help="write benchmarks/results/NAME.md")
    parser.add_argument("--cpu", action="store_true", help="gloo ranks on the CPU, to try the program")
    parser.add_argument("--rank", help=argparse.SUPPRESS)  # see `train_afresh`
    arguments = parser.parse_args()
    if arguments.rank is not None:
        row, out, stop_at = json.loads(arguments.rank)
        train(Row(**row), arguments, Path(out), stop_at)
        os._exit(0)
    systems = arguments.systems.split(";")
    unknown = [name for name in systems if name not in (*FIRST, *OTHERS, *MORE)]
    if unknown:
        parser.error(f"unknown systems {unknown}")
    worlds = [(size, int(ranks)) for size in arguments.sizes.split(",") for ranks in arguments.ranks.split(",")]
    rows = [
        Row(size, ranks, system)
        for part in (FIRST, (*OTHERS, *MORE))
        for size, ranks in worlds
        for system in systems
        if system in part
    ]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(os.environ.get("OUT", scratch)) / "shared-gpu"
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier run
        folder.mkdir(parents=True)
        watch([fork(folder / "machine.log", {}, describe, folder / "machine.txt")], 30.0, lambda: False)
        arguments.forks = (folder / "machine.txt").exists()
        device = (folder / "machine.txt").read_text() if arguments.forks else "unknown"
        outcomes: list[Outcome] = []
        page = ""
        for outcome, has_mps in measure(rows, arguments, folder):
            outcomes.append(outcome)
            print(json.dumps(asdict(outcome)), flush=True)
            page = page_of(outcomes, arguments, device, has_mps=has_mps)
            (folder / "page.md").write_text(page)
            if arguments.write:
                (RESULTS / f"{arguments.write}.md").write_text(page)
    print(page)


if __name__ == "__main__":
    main()
