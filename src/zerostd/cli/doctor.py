"""`zerostd doctor`: checks whether this machine is ready for training, and names remedies.

`examine` looks at versions, kernels, accelerator, memory, disk and process group. Each check yields findings with a
status and a remedy; the command shows them as a table or as JSON.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Annotated, Literal

import torch
import typer
from rich.markup import escape
from rich.table import Column, Table

from zerostd.cli.printing import is_first_rank, show
from zerostd.communication.meeting import try_group
from zerostd.errors import PrepareError
from zerostd.kernels import native
from zerostd.measuring.identity import choose_device, free_bytes, versions
from zerostd.measuring.rates import TrialSizes, disk_rates
from zerostd.monitoring.texts import rate_text, seconds_text, size_text
from zerostd.tiers.host import available_memory, cgroup_memory, free_host, memlock_limit
from zerostd.tiers.scratch_files import check_disk, free_disk

GIB = 2**30
LEAST_TORCH = (2, 11)
INSTRUCTIONS = ("plain instructions", "AVX2", "AVX-512")
EXTRAS = ("accelerate", "peft", "safetensors", "scikit-learn", "transformers")
LEAST_HOST = 2 * GIB
LEAST_SHARED = GIB // 4  # a container has 64 MiB unless it is told otherwise
SLOW_DISK = 200e6  # bytes a second
MEETING_S = 60.0
TRIAL = TrialSizes(disk=64 << 20, disk_seconds=0.4)
COLOURS = {"ok": "green", "warning": "yellow", "failure": "red"}

Status = Literal["ok", "warning", "failure"]  # a warning: it works, slower or with less


@dataclass(frozen=True)
class Finding:
    """The result of one check, and the remedy if it failed."""

    name: str
    status: Status
    value: str
    remedy: str = ""


Findings = Iterator[Finding]


def doctor(
    disk: Annotated[str | None, typer.Option(metavar="PATH", help="The directory for a disk tier.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON and nothing else.")] = False,
) -> None:
    """Check what training needs: versions, kernels, accelerator, memory, disk, process group.

    It takes a few seconds. The exit code is 0, or 1 if something does not work.
    Under torchrun all ranks take part, and rank 0 prints the findings.
    """
    findings = examine(disk)
    is_healthy = all(finding.status != "failure" for finding in findings)
    if is_first_rank():
        if as_json:
            objects = [asdict(finding) for finding in findings]
            typer.echo(json.dumps({"healthy": is_healthy, "findings": objects}, indent=2))
        else:
            counts = Counter(finding.status for finding in findings)
            table = Table(*(Column(name, overflow="fold") for name in ("", "", "found", "remedy")))
            for finding in findings:
                status = f"[{COLOURS[finding.status]}]{finding.status}[/]"
                table.add_row(finding.name, status, escape(finding.value), escape(finding.remedy))
            show(f"{counts['ok']} ok, {counts['warning']} to look at, {counts['failure']} broken", table)
    if not is_healthy:
        raise typer.Exit(1)


def examine(disk_path: str | None = None) -> list[Finding]:
    """Check everything in a few seconds; the disk is that of `disk_path`, or of temporary files if it is None.

    Collective: all ranks call it together, if there are several.
    """
    path = disk_path or tempfile.gettempdir()
    checks: dict[str, Callable[[], Findings]] = {
        "versions": _versions,
        "native kernels": _kernels,
        "accelerator": _accelerator,
        "host memory": _host,
        "disk": lambda: _disk(path),
        "process group": _group,
        "extras": _extras,
    }
    findings: list[Finding] = []
    for name, check in checks.items():
        try:
            findings += check()
        except Exception as error:  # whatever is broken: the other findings are wanted all the more
            findings.append(Finding(name, "failure", f"{type(error).__name__}: {_line(error)}", "see the message"))
    return findings


def _versions() -> Findings:
    yield Finding("python", "ok", platform.python_version())
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2] if part.isdigit())
    remedy = f"pip install 'torch>={'.'.join(map(str, LEAST_TORCH))}'"
    yield _judged("torch", str(torch.__version__), remedy, is_good=release >= LEAST_TORCH, otherwise="failure")


def _kernels() -> Findings:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says what the finding says
        library = native.load()
    text = "not loaded: torch does the work, more slowly"
    if library is not None:
        level = library.zs_limit_instructions(len(INSTRUCTIONS))
        is_arm = platform.machine() in ("aarch64", "arm64")
        text = f"loaded, {'NEON' if is_arm else INSTRUCTIONS[level]}"
    remedy = "install a C++ compiler and then zerostd again, or run `make native` in its sources"
    yield _judged("native kernels", text, remedy, is_good=library is not None)


def _accelerator() -> Findings:
    device = choose_device(None)
    if device.type == "cpu":
        is_unseen = os.path.exists("/dev/nvidia0")
        text = "present, but torch does not see it" if is_unseen else "none: the CPU is the device"
        remedy = "install torch with CUDA: this build has no CUDA, or the driver is too old for it"
        yield _judged("accelerator", text, remedy, is_good=not is_unseen)
        return
    module = torch.get_device_module(device)
    name = str(module.get_device_name(device)) if hasattr(module, "get_device_name") else device.type
    text = f"{name}, {size_text(free_bytes(device, None)['device'])} free"
    driver = versions(device).get("driver")
    yield Finding("accelerator", "ok", f"{text}, driver {driver}" if driver else text)


def _host() -> Findings:
    free = free_host()
    group = cgroup_memory()
    text = f"{size_text(free)} free, {size_text(available_memory())} available in the system"
    if group is not None:
        text += f", the cgroup's limit is {size_text(group.limit)}"
    remedy = "end other programs, or raise the container's memory limit"
    yield _judged("host memory", text, remedy, is_good=free >= LEAST_HOST)
    limit = memlock_limit()
    text = "no limit" if limit is None else f"limit {size_text(limit)}, {size_text(free)} of host memory free"
    is_needed = choose_device(None).type != "cpu"
    if not is_needed:
        text += "; not needed without an accelerator"
    remedy = "if pinning fails: `ulimit -l unlimited`, or `--ulimit memlock=-1` for a container"
    yield _judged("pinned memory", text, remedy, is_good=not is_needed or limit is None or limit >= free)
    if not os.path.isdir("/dev/shm"):
        yield Finding("shared memory", "warning", "no /dev/shm", "mount it: data loaders with workers need it")
        return
    shared = free_disk("/dev/shm")
    remedy = "`--shm-size 8g` for a container: data loaders with workers need it"
    yield _judged("shared memory", f"{size_text(shared)} free in /dev/shm", remedy, is_good=shared >= LEAST_SHARED)


def _disk(path: str) -> Findings:
    try:
        check_disk(0, path)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            rates = disk_rates(path, TRIAL)
    except PrepareError as error:
        yield Finding("disk", "failure", _line(error), "name a directory that you may write to: --disk PATH")
        return
    yield Finding("disk", "ok", f"{size_text(free_disk(path))} free in {path}")
    is_direct = not any("O_DIRECT" in str(warning.message) for warning in caught)
    remedy = "name a directory on a local drive: transfers here go through the page cache and take host memory"
    yield _judged("disk, O_DIRECT", "yes" if is_direct else "not on this file system", remedy, is_good=is_direct)
    text = f"{rate_text(rates.read / 1e9)} GB/s read, {rate_text(rates.write / 1e9)} GB/s written"
    is_fast = min(rates.read, rates.write) >= SLOW_DISK
    yield _judged("disk, speed", text, "name a faster drive for states that are kept on disk", is_good=is_fast)


def _group() -> Findings:
    device = torch.device("cpu")  # alone, it is enough to try
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and choose_device(None).type != "cpu":
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        device = torch.device(choose_device(None).type, local_rank % torch.accelerator.device_count())
    try:
        met, backend, seconds = try_group(device, MEETING_S)
    except (RuntimeError, ValueError, OSError) as error:
        remedy = "name the network interface that ranks share: GLOO_SOCKET_IFNAME=eth0, NCCL_SOCKET_IFNAME=eth0"
        yield Finding("process group", "failure", _line(error), remedy)
        return
    yield Finding(
        "process group", "ok", f"{met} rank{'s' * (met > 1)} met over {backend}, {seconds_text(seconds)} per collective"
    )


def _extras() -> Findings:
    installed = []
    missing = []
    for name in EXTRAS:
        try:
            installed.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            missing.append(name)
    text = ", ".join(installed) + (f"; not installed: {', '.join(missing)}" if missing else "")
    yield Finding("extras", "ok", text.removeprefix("; "))


def _judged(name: str, text: str, remedy: str, *, is_good: bool, otherwise: Status = "warning") -> Finding:
    return Finding(name, "ok", text) if is_good else Finding(name, otherwise, text, remedy)


def _line(error: BaseException) -> str:
    """Return what an error says, as one line."""
    return " ".join(str(error).split())[:300]
