"""Machines that `zerostd plan --machine` knows by name: published rates of GPUs, beside a host that is assumed.

`h100-80` is one GPU, `8xh100-80` a node of eight H100 with 80 GB, `4x8xh100-80` four such nodes. A path names a
profile in JSON.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from zerostd.errors import PrepareError
from zerostd.measuring import load_profile
from zerostd.planning import Link, MachineProfile, Processor, Wire

PROFILES = Path(__file__).parent / "clusters"  # that come with zerostd, by name
NAME = re.compile(r"(?:([1-9]\d{0,4})x)?(?:([1-9]\d?)x?)?([a-z]+\d[a-z0-9]*-\d+)")
# GB of memory, TFLOP/s of dense 16-bit products, GB/s of memory, of the link to the host each way, and to other GPUs
GPUS = {
    "t4-16": (16, 65, 320, 12, 12),
    "v100-16": (16, 125, 900, 12, 150),
    "v100-32": (32, 125, 900, 12, 150),
    "rtx3090-24": (24, 71, 936, 25, 25),
    "rtx4090-24": (24, 165, 1008, 25, 25),
    "l40s-48": (48, 362, 864, 25, 25),
    "a100-40": (40, 312, 1555, 25, 300),
    "a100-80": (80, 312, 2039, 25, 300),
    "h100-80": (80, 989, 3350, 55, 450),
    "h200-141": (141, 989, 4800, 55, 450),
    "b200-180": (180, 2250, 8000, 55, 900),
}
NETWORK = 25e9  # bytes/s between nodes for one GPU, where there are several: 200 Gbit/s
HOST = 128 * 10**9  # bytes for one GPU; cores and their rates are those of h200-1
BYTES_OF_UPDATE = 48  # of the device's memory for one parameter, as measured on the H200


def find_machine(name: str | None, disk_path: str | None) -> tuple[MachineProfile | None, int | None]:
    """Return a machine by its name or by the path of its profile, and the number of ranks if the name says it. None is
    this machine, which alone has a directory for a disk."""
    if name is None:
        return None, None
    if disk_path is not None:
        raise PrepareError("--disk-path is for this machine only: with --machine, the profile describes the disk")
    packaged = {path.stem: path for path in PROFILES.glob("*.json")}
    match = NAME.fullmatch(name)
    if match is not None and match[3] in GPUS:
        return _machine(name, int(match[1] or 1), int(match[2] or 1), match[3])
    path = Path(name)
    is_name = match is not None or (path.name == name and not path.suffix)
    if not path.exists() and name not in packaged and is_name:
        gpu = name.rsplit("x", 1)[-1]
        close = next(
            (f"did you mean {name.removesuffix(gpu)}{kind}?" for kind in GPUS if gpu and kind.startswith(gpu)), None
        )
        raise PrepareError(
            f"--machine {name}: no such file or machine; "
            f"{close or 'write 8xh100-80 for a node of eight GPUs.'} The GPUs are "
            f"{', '.join(GPUS)}; other machines are {', '.join(sorted(packaged))}"
        )
    return load_profile(path if path.exists() else packaged.get(name, path)), None


def _machine(name: str, nodes: int, gpus: int, kind: str) -> tuple[MachineProfile, int]:
    base = load_profile(PROFILES / "h200-1.json")
    memory, tflops, rate, link, peer = GPUS[kind]
    matrix = {"bfloat16": tflops * 1e12, "float16": tflops * 1e12, "float32": tflops * 1e12 / 8}
    cores = base.processor.num_cores * gpus
    update_ns = {**base.processor.update_ns, cores: base.processor.update_ns[base.processor.num_cores] / gpus}
    wires = [Wire("within the node", gpus, peer * 1e9, 2e-5)] if gpus > 1 else []
    wires += [Wire("network", nodes * gpus, NETWORK, 5e-5)] if nodes > 1 else []
    machine = replace(
        base,
        name=f"{name}, from published rates",
        matrix=matrix,
        resident_ns=BYTES_OF_UPDATE / rate,
        free={"device": memory * 10**9, "host": HOST * gpus},
        processor=Processor(cores, update_ns, base.processor.memory * gpus),
        link=Link(link * 1e9, link * 1e9, 1.8 * link * 1e9),
        wires=tuple(wires),
        ranks_per_node=gpus,
    )
    return machine, nodes * gpus
