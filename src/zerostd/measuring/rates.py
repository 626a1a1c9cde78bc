"""What a machine can do: copies between host and device, updates on either, matrix products, files read and written,
and collectives among its ranks.

Memory comes from the tiers and copies go through streams, as in training. A rate is the median of short turns;
`TrialSizes` says how much is tried.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import TypeVar

import numpy
import torch

from zerostd.communication import CodedWires, SharedWires, Wires, World
from zerostd.kernels import MOMENT_CODECS, Adam, update
from zerostd.monitoring.events import Timestamp
from zerostd.monitoring.ledger import Ledger
from zerostd.planning.profiles import DiskRates, Link, Wire
from zerostd.policy import Kind
from zerostd.tiers.disk import Disk
from zerostd.tiers.host import PAGE, Host
from zerostd.tiers.scratch_files import free_disk
from zerostd.tiers.transfer import Stream, Transfer

SHARE = 8  # at most one part in so many of what is free is taken for one array
UPDATE_BYTES = 28  # of host memory for one parameter: fp32 master and states in and out, bf16 gradient in, weight out
ARRAY_BYTES = 14  # that one parameter takes: the new weight takes the place of its gradient
RESIDENT_BYTES = 20  # the same on the device, with the gradient as torch's optimizer wants it
TINY_BYTES = 4096  # of a copy that times nothing but its start
NUM_TINY = 64
SMALLEST_SIDE = 128  # of the first matrices that are tried
BUSY_SECONDS = 0.5  # of updating while the link is busy
REQUEST_BYTES = 16 << 20  # two blocks of the disk tier
DEPTH = 4  # requests of each direction on their way at once
SMALLEST_BYTES = 16 << 10  # that are gathered and reduced
GROWTH = 16  # of that from size to size
MOST_SECONDS = 3.0  # for one size, in units of what one number may take
ALIGNMENT = 64  # elements a rank, as in a flat

Point = tuple[float, float]  # bytes that one rank sends, seconds
T = TypeVar("T")


@dataclass(frozen=True)
class TrialSizes:
    """How much is tried of each. These are for a profile that is kept; less memory or a slow part takes less."""

    parameters: int = 64 << 20  # to update, on the CPU and on the device: far more than caches hold
    copy: int = 64 << 20  # bytes of one copy through the link
    copies: int = 4  # in each direction
    side: int = 8192  # of the matrices on a device
    cpu_side: int = 1024  # of the matrices on the CPU
    disk: int = 1 << 30  # bytes of the file
    wire: int = 64 << 20  # bytes of the longest buffer that is gathered and reduced
    turns: int = 5  # that a median is taken of
    seconds: float = 1.0  # for one number, after which no new turn begins
    disk_seconds: float = 3.0  # for one direction of the disk, or both


FULL = TrialSizes()


def within(wanted: int, free: int) -> int:
    """Return `wanted`, or less where little is free; whole pages, and at least one."""
    return max(PAGE, min(wanted, free // SHARE) // PAGE * PAGE)


def finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def turns_of(work: Callable[[], T], sizes: TrialSizes) -> list[T]:
    """Return the results of `work` turn by turn, without the first, until there are enough or the time is up."""
    work()
    turns: list[T] = []
    end = time.perf_counter() + sizes.seconds
    while len(turns) < sizes.turns and (not turns or time.perf_counter() < end):
        turns.append(work())
    return turns


def median_s(work: Callable[[], object], sizes: TrialSizes) -> float:
    def timed() -> float:
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin

    return max(median(turns_of(timed, sizes)), 1e-9)


# -- link, CPU and device --


class LinkCopies:
    """Memory on both sides of a link, and turns of copies up, down or both ways at once."""

    def __init__(self, device: torch.device, host: Host, sizes: TrialSizes, free: int) -> None:
        self.num_bytes = within(sizes.copy * sizes.copies, free)
        self.step = min(sizes.copy, self.num_bytes)
        self.up = Stream(device)
        self.down = Stream(device)
        above = torch.zeros(2, self.num_bytes, dtype=torch.uint8, device=device)
        below = [host.allocate(self.num_bytes, Kind.BUFFERS) for _ in (self.up, self.down)]
        self._ends = {self.up: (below[0], above[0]), self.down: (above[1], below[1])}  # source and target
        finish(device)

    def turn(self, *streams: Stream) -> list[float]:
        """Copy everything in each of `streams`; seconds by stream from their common beginning."""
        begins = [Timestamp(stream.device, stream.stream) for stream in streams]
        for start in range(0, self.num_bytes, self.step):
            for stream in streams:
                self._copy(stream, start, self.step)
        ends = [Timestamp(stream.device, stream.stream) for stream in streams]
        return [end.since(begins[0]) for end in ends]

    def latency(self) -> float:
        begin = Timestamp(self.up.device, self.up.stream)
        for number in range(NUM_TINY):
            self._copy(self.up, number * TINY_BYTES % self.num_bytes, TINY_BYTES)
        return Timestamp(self.up.device, self.up.stream).since(begin) / NUM_TINY

    def _copy(self, stream: Stream, start: int, num_bytes: int) -> None:
        source, target = self._ends[stream]
        place = slice(start, start + num_bytes)
        with stream.after():
            target[place].copy_(source[place], non_blocking=True)


def link_rates(copies: LinkCopies, sizes: TrialSizes) -> Link:
    size = copies.num_bytes
    up, down = (size / _median_turn(copies, sizes, stream)[0] for stream in (copies.up, copies.down))
    up_s, down_s = _median_turn(copies, sizes, copies.up, copies.down)
    first, last = sorted((up_s, down_s))
    slower = up if up_s > down_s else down
    together = 2 * size - slower * (last - first)  # what was left when the first had ended went alone
    latency = median(turns_of(copies.latency, sizes))
    return Link(up=up, down=down, both=max(together / first, 2 * size / last), latency=latency)


def _median_turn(copies: LinkCopies, sizes: TrialSizes, *streams: Stream) -> list[float]:
    turns = sorted(turns_of(partial(copies.turn, *streams), sizes), key=max)
    return turns[len(turns) // 2]


class HostUpdates:
    """Arrays on the host for the native AdamW: bf16 gradient, fp32 master and states, weight on the gradient."""

    def __init__(self, host: Host, sizes: TrialSizes, free: int) -> None:
        self.numel = within(sizes.parameters * ARRAY_BYTES, free) // ARRAY_BYTES // 1024 * 1024 or 1024
        memory = host.allocate(self.numel * ARRAY_BYTES, Kind.BUFFERS)
        rows = memory[: self.numel * 12].view(torch.float32).view(3, self.numel)
        self._arrays = [rows[0], rows[1], rows[2]]
        self._gradient = memory[self.numel * 12 :].view(torch.bfloat16)
        for array, value in zip((*self._arrays, self._gradient), (0.5, 0.01, 0.001, 0.01), strict=True):
            array.fill_(value)
        self.had = 1.0
        exact = host.device.type != "cpu"  # as the cpu route has it
        self._rule = Adam(3e-4, 0.1, False, 0.9, 0.95, 1e-8, decoupled=True, step=10, exact_root=exact)

    def step(self, num_threads: int) -> None:
        update(self._rule, self._gradient, self._arrays, weight=self._gradient, num_threads=num_threads)

    def ns(self, num_threads: int, sizes: TrialSizes) -> float:
        """Return nanoseconds to update one parameter; `had` collects the share of the cores that the threads had."""
        begin = time.perf_counter()
        used = time.process_time()
        seconds = median_s(partial(self.step, num_threads), sizes)
        had = (time.process_time() - used) / (time.perf_counter() - begin) / num_threads
        self.had = min(had, 1.0)  # the process has other threads, which count too
        return seconds / self.numel * 1e9

    def coded_ns(self, num_threads: int, sizes: TrialSizes) -> float:
        """Return the same for moments of 8 bits, which take the place of the others."""
        master, *states = self._arrays
        pairs = zip(states, MOMENT_CODECS["int8"], strict=True)
        records = [state.view(moment.dtype)[: moment.num_elements(self.numel)].zero_() for state, moment in pairs]
        step = partial(update, self._rule, self._gradient, [master, *records], num_threads=num_threads)
        return median_s(partial(step, weight=self._gradient), sizes) / self.numel * 1e9


def busy_memory(updates: HostUpdates, copies: LinkCopies, num_threads: int) -> float:
    """Return bytes a second of host memory while the CPU updates and the link is busy both ways."""

    def work() -> float:
        count = 0
        begin = time.perf_counter()
        while count < 2 or time.perf_counter() - begin < BUSY_SECONDS:
            updates.step(num_threads)
            count += 1
        return UPDATE_BYTES * updates.numel * count / (time.perf_counter() - begin)

    turns: list[float] = []
    with ThreadPoolExecutor(1, thread_name_prefix="zerostd-measure") as thread:
        by_processor = thread.submit(work)
        while not turns or not by_processor.done():
            turns.append(max(copies.turn(copies.up, copies.down)))
        return by_processor.result() + 2 * copies.num_bytes / median(turns)


def resident_ns(device: torch.device, sizes: TrialSizes, free: int) -> float:
    """Return nanoseconds for a parameter that is kept on the device: torch's fused AdamW in fp32, bf16 in and out."""
    numel = within(sizes.parameters * RESIDENT_BYTES, free) // RESIDENT_BYTES
    gradient = torch.full((numel,), 0.01, dtype=torch.bfloat16, device=device)
    master = torch.nn.Parameter(torch.full((numel,), 0.5, device=device))
    wide = torch.zeros(numel, device=device)
    master.grad = wide
    weight = torch.empty_like(gradient)
    optimizer = torch.optim.AdamW([master], lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def work() -> None:
        wide.copy_(gradient)
        optimizer.step()
        weight.copy_(master.detach())
        finish(device)

    return median_s(work, sizes) / numel * 1e9


def matrix_rates(device: torch.device, sizes: TrialSizes, free: int) -> dict[str, float]:
    """Return FLOP/s of large matrix products in float32, and in bfloat16 unless that is too slow to be of use."""
    side = sizes.cpu_side if device.type == "cpu" else sizes.side
    while 3 * 4 * side * side > free // 2 and side > SMALLEST_SIDE:
        side //= 2
    rates = {dtype: _matrix_rate(device, dtype, side, sizes) for dtype in (torch.bfloat16, torch.float32)}
    return {str(dtype).removeprefix("torch."): rate for dtype, rate in rates.items() if rate is not None}


def _matrix_rate(device: torch.device, dtype: torch.dtype, most: int, sizes: TrialSizes) -> float | None:
    """Return the rate of the largest product that there is time for: some CPUs are a thousand times slower in bf16."""
    side = min(SMALLEST_SIDE, most)
    seconds = _product_s(device, dtype, side, sizes)
    if dtype is not torch.float32 and seconds > sizes.seconds / 10:
        return None
    while side < most and 8 * seconds * (1 + sizes.turns) <= sizes.seconds * 2:
        side = min(most, 2 * side)
        seconds = _product_s(device, dtype, side, sizes)
    return 2 * side**3 / seconds


def _product_s(device: torch.device, dtype: torch.dtype, side: int, sizes: TrialSizes) -> float:
    own = torch.Generator(device).manual_seed(0)  # the user's draws stay as they are
    left, right = (torch.randn(side, side, device=device, generator=own).to(dtype) for _ in range(2))
    product = torch.empty_like(left)

    def work() -> None:
        torch.mm(left, right, out=product)
        finish(device)

    return median_s(work, sizes)


# -- disk --


def disk_rates(path: str, sizes: TrialSizes) -> DiskRates:
    """Return the rates of files in `path`; the one made for it has no name and is gone afterwards."""
    ledger = Ledger()
    host = Host(torch.device("cpu"), ledger, 1)
    with contextlib.ExitStack() as ending:
        ending.callback(host.free_all)
        disk = ending.enter_context(contextlib.closing(Disk(path, ledger)))  # closed first: it uses the memory
        size = within(sizes.disk, free_disk(disk.path))
        step = min(REQUEST_BYTES, max(PAGE, size // 8 // PAGE * PAGE))
        file = disk.allocate(max(size, 2 * step), Kind.BUFFERS)
        memory = host.allocate(2 * DEPTH * step, Kind.BUFFERS)
        memory.view(torch.int64).random_(generator=torch.Generator())  # zeros may be stored without being written
        into, out_of = memory.view(2, DEPTH, step).unbind()
        whole = file.num_bytes // step

        def read(number: int) -> Transfer:
            return disk.read(file, number % half * step, into[number % DEPTH])

        def write(number: int) -> Transfer:
            return disk.write(file, (half + number % half) * step, out_of[number % DEPTH])

        # Room that is reserved but was never written is not read from the drive.
        fill = [lambda number: disk.write(file, number * step, out_of[number % DEPTH])]
        _, count = _requests_per_s(fill, whole, sizes)
        half = max(1, count // 2)  # the first half is read, the second one written
        rates = [_requests_per_s(kinds, 2 * whole, sizes)[0] * step for kinds in ([read], [write], [read, write])]
        return DiskRates(disk.path, *rates)


def _requests_per_s(requests: Sequence[Callable[[int], Transfer]], most: int, sizes: TrialSizes) -> tuple[float, int]:
    """Return how many requests of each kind a second does, all kinds busy, and how many there was time for."""
    under_way: deque[Transfer] = deque()
    begin = time.perf_counter()
    for number in itertools.count():
        if number >= most or (number >= 2 and time.perf_counter() - begin > sizes.disk_seconds):
            break
        while len(under_way) > (DEPTH - 1) * len(requests):
            under_way.popleft().wait()
        under_way += [request(number) for request in requests]
    for transfer in under_way:
        transfer.wait()
    return number / (time.perf_counter() - begin), number


# -- wires --


def levels_of(world: World) -> list[int]:
    """Return the numbers of ranks that wires are measured among: of a node, if there are several, and of all."""
    return sorted({size for size in (world.node_size, world.num_shards) if size > 1})


def wire_rates(world: World, sizes: TrialSizes) -> tuple[Wire, ...]:
    """Return the wires among the ranks that share a model, which call this together: first that inside a node, which
    all nodes measure at the same time. None for one rank alone."""
    levels = levels_of(world)
    wires = [] if world.channels is None or not levels else [_wire_rate(world, "world", sizes)]
    if len(levels) > 1:
        assert world.channels is not None and world.channels.node is not None
        wires.insert(0, _wire_rate(world.inside(world.channels.node), "node", sizes))
    return tuple(wires)


def _wire_rate(world: World, name: str, sizes: TrialSizes) -> Wire:
    latency, bandwidth = _collective_rate(SharedWires(world, Ledger()), sizes)
    _, coded = _collective_rate(CodedWires(world, Ledger(), gather_bits=8, reduce_bits=8), sizes)
    return Wire(name, world.num_shards, bandwidth, latency, coded)


def _collective_rate(wires: Wires, sizes: TrialSizes) -> Point:
    """Return the latency of a collective, and the bytes of 16-bit numbers that one rank sends in a second."""
    world = wires.world
    num_ranks = world.num_shards
    least = ALIGNMENT * world.size
    full = torch.ones(max(least, sizes.wire // 2 // least * least), dtype=torch.bfloat16, device=world.device)
    land = torch.empty(full.numel() // num_ranks, dtype=full.dtype, device=world.device)
    wires.reserve(full.nbytes)
    points: list[Point] = []
    numel = min(full.numel(), max(1, SMALLEST_BYTES // 2 // least) * least)
    while True:
        part = full[:numel]
        mine = part.view(num_ranks, -1)[world.shard_rank]
        gather_s = _collective_s(wires, partial(wires.gather_weights, part, mine), sizes)
        reduce_s = _collective_s(wires, partial(wires.reduce, part, land[: mine.numel()]), sizes)
        sent = float(mine.nbytes * (num_ranks - 1))
        points += [(sent, gather_s), (sent, reduce_s)]
        spent = (gather_s + reduce_s) * (1 + sizes.turns)
        if numel == full.numel() or GROWTH * spent > MOST_SECONDS * sizes.seconds:
            break
        numel = min(full.numel(), GROWTH * numel)
    return fit(points)


def _collective_s(wires: Wires, start: Callable[[], Transfer], sizes: TrialSizes) -> float:
    """Return seconds on the slowest rank: the same number on all, so that all go on or stop together."""
    device = wires.world.device

    def work() -> None:
        start().wait()
        finish(device)

    mine = median_s(work, replace(sizes, seconds=math.inf))  # as many turns on all ranks
    return float(wires.largest(torch.tensor([mine], device=device)))


def fit(points: Sequence[Point]) -> tuple[float, float]:
    """Return latency and bandwidth, neither below 0, so that latency + bytes / bandwidth comes nearest the seconds."""
    sizes, seconds = numpy.array(points).T
    if len(set(sizes)) > 1:
        slope, latency = numpy.polyfit(sizes, seconds, 1, w=1 / seconds)
        if latency >= 0 and slope > 0:
            return float(latency), float(1 / slope)
    size, longest = max(points)  # one size only, or too much noise: the longest says most
    rate = size / longest
    return max(0.0, min(s - size / rate for size, s in points)), rate
