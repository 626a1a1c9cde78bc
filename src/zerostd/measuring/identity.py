"""The identity of this machine, by hardware and versions and never by host name, and its free memory."""

from __future__ import annotations

import contextlib
import platform
from importlib import metadata
from pathlib import Path

import torch
from torch import nn

from zerostd.communication.world import thread_budget
from zerostd.errors import PrepareError
from zerostd.planning.profiles import MachineProfile
from zerostd.tiers.host import free_host
from zerostd.tiers.scratch_files import check_disk, free_disk


def choose_device(device: torch.device | str | None) -> torch.device:
    """Return the device that is meant: None is the accelerator if there is one; an accelerator has its index."""
    if device is None:
        device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    device = torch.device(device)
    if device.type != "cpu" and not torch.accelerator.is_available():
        raise PrepareError(f"device='{device}': torch finds no accelerator; `zerostd doctor` says why, or use 'cpu'")
    if device.type != "cpu" and device.index is None:
        device = torch.device(device.type, torch.accelerator.current_device_index())
    return torch.device("cpu") if device.type == "cpu" else device


def parse_device(device: torch.device | str) -> torch.device:
    """Return the device that a user named; raise PrepareError if torch has none."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise PrepareError(f"device={device!r} is not a torch device ({error}); use 'cuda' or 'cpu'") from error


def device_for(model: nn.Module, machine: MachineProfile | None) -> torch.device:
    """Return the device to plan for: that of the model, or of another machine."""
    if machine is None:
        return device_of(model)
    if not isinstance(machine, MachineProfile):
        raise PrepareError(
            f"machine={type(machine).__name__} must be a zerostd.MachineProfile; leave it out to plan for this machine"
        )
    return torch.device("cpu" if machine.link is None else "cuda")


def device_of(model: nn.Module) -> torch.device:
    """Return where a model lies; one built under empty_init goes to the accelerator, if there is one."""
    devices = {parameter.device for parameter in model.parameters()}
    real = [device for device in devices if device.type != "meta"]
    if len(real) < len(devices) and all(device.type == "cpu" for device in real):
        return choose_device(None)
    return choose_device(real[0])


def machine_name(device: torch.device) -> str:
    """Return the device and the CPU: what a profile is checked against."""
    parts = [f"{_processor()}, {thread_budget(1)} cores"]
    if device.type != "cpu":
        module = torch.get_device_module(device)
        parts.insert(0, str(module.get_device_name(device)) if hasattr(module, "get_device_name") else device.type)
    return "; ".join(parts)


def versions(device: torch.device) -> dict[str, str]:
    """Return the versions on which rates depend."""
    numbers = {"python": platform.python_version(), "torch": str(torch.__version__), "zerostd": "not installed"}
    with contextlib.suppress(metadata.PackageNotFoundError):
        numbers["zerostd"] = metadata.version("zerostd")
    if device.type == "cuda":
        with contextlib.suppress(OSError):  # containers may hide it
            numbers["driver"] = Path("/sys/module/nvidia/version").read_text().strip()
    return numbers


def free_bytes(device: torch.device, disk_path: str | None) -> dict[str, int]:
    """Return the bytes that can be allocated now, by tier; 0 of a disk that was not named."""
    host = free_host()
    disk = 0
    if disk_path is not None:
        check_disk(0, disk_path)  # raises if it is not there
        disk = free_disk(disk_path)
    return {"device": host if device.type == "cpu" else _free_device(device), "host": host, "disk": disk}


def _free_device(device: torch.device) -> int:
    """Return the free bytes that this process may use, and those that torch has cached."""
    module = torch.get_device_module(device)
    ask = module.mem_get_info if hasattr(module, "mem_get_info") else torch.accelerator.get_memory_info
    free, total = ask(device)
    reserved = torch.accelerator.memory_reserved(device)
    if hasattr(module, "get_per_process_memory_fraction"):
        free = min(free, int(module.get_per_process_memory_fraction(device) * total) - reserved)
    return max(0, free) + reserved - torch.accelerator.memory_allocated(device)


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
