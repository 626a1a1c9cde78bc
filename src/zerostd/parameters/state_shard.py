"""A state shard: the master and the states of a stretch of a region, with one tier and one route.

The master of a bf16 parameter is kept as two halves of 16 bits (`kernels.Split`). The upper half equals the parameter
that the model computes with. If the update can read the parameter, the parameter itself is that half, and only the
lower half is kept here. Otherwise the shard has a separate upper half. Other masters are one fp32 tensor, or wider.
States may be kept as codes (`kernels.Moment`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch

from zerostd import kernels
from zerostd.kernels import Moment, Split, decode_moments, encode_moments
from zerostd.monitoring import Ledger
from zerostd.policy import Kind, Route, Tier
from zerostd.sharding import Piece, Portion
from zerostd.tiers import Done, TierTensor, Transfer
from zerostd.tiers.debug import Seals

MASTER = "master"
HIGH = "high"  # bf16: the upper half of a split master, rounded
LOW = "low"  # int16: the lower half
OF_MASTER = (MASTER, HIGH, LOW)  # names that are no states


class SplitTensor(TierTensor):
    """A split master as one fp32 tier tensor, for reads and writes outside the step. Reads return a copy."""

    def __init__(self, high: TierTensor, low: TierTensor) -> None:
        super().__init__(low.numel, torch.float32, low.tier, None)
        self.high = high
        self.low = low

    def part(self, part: slice) -> SplitTensor:
        """Return a part of it."""
        return SplitTensor(self.high.part(part), self.low.part(part))

    def read(self, part: slice, memory: torch.Tensor | None = None) -> torch.Tensor:
        """Return the numbers of a part, where the lower half is; from disk in host memory."""
        low = self.low.read(part, memory)
        return kernels.join(Split(self.high.read(part).to(low.device), low))

    def write(self, part: slice, values: torch.Tensor) -> None:
        """Write numbers to a part of both halves, and so to the parameter if it is the upper half."""
        halves = kernels.split(values.to(torch.float32))
        self.high.write(part, halves.high)
        self.low.write(part, halves.low)

    def start_read(self, start: int, target: torch.Tensor) -> Transfer:
        """Read into memory from element `start`; the read is complete on return."""
        values = target.view(torch.float32)
        values.copy_(self.read(slice(start, start + values.numel())))
        return Done()

    def start_write(self, start: int, source: torch.Tensor) -> Transfer:
        """Write from memory to element `start`; the write is complete on return."""
        values = source.view(torch.float32)
        self.write(slice(start, start + values.numel()), values)
        return Done()


class CodedTensor(TierTensor):
    """A state that is kept as codes, as one tier tensor of fp32 numbers, for reads and writes outside the
    step. Reads return copies. A block of the moment is coded as a whole. Blocks begin with a parameter, and no shard
    ends inside a block; a write that ends inside one reads the block first."""

    def __init__(self, codes: TierTensor, moment: Moment, numel: int) -> None:
        super().__init__(numel, torch.float32, codes.tier, None)
        self.codes = codes  # the records
        self.moment = moment

    def read(self, part: slice, memory: torch.Tensor | None = None) -> torch.Tensor:
        """Return the numbers of a part, where its codes are; from disk in host memory."""
        first = part.start // self.moment.block * self.moment.block
        codes = self.codes.read(self.records(slice(first, part.stop)), memory)
        return decode_moments(codes, self.moment, part.stop - first)[part.start - first :]

    def write(self, part: slice, values: torch.Tensor) -> None:
        """Write numbers to a part."""
        block = self.moment.block
        first = part.start // block * block
        end = min(self.numel, -(-part.stop // block) * block)
        if part.start >= part.stop:
            return
        if (first, end) == (part.start, part.stop):
            numbers = values.to(torch.float32).contiguous()
        else:
            numbers = self.read(slice(first, end)).to(values.device)
            numbers[part.start - first : part.stop - first] = values
        codes = torch.empty(self.moment.num_elements(end - first), dtype=self.moment.dtype, device=numbers.device)
        encode_moments(numbers, self.moment, codes)
        self.codes.write(self.records(slice(first, end)), codes)

    def start_write(self, start: int, source: torch.Tensor) -> Transfer:
        """Write numbers from memory, beginning at element `start`. Returns when they are written."""
        values = source.view(torch.float32)
        self.write(slice(start, start + values.numel()), values)
        return Done()

    def records(self, part: slice) -> slice:
        """Return the place in `codes` of a part that starts at a block."""
        return slice(self.moment.num_elements(part.start), self.moment.num_elements(part.stop))


def kept_as(tensor: TierTensor) -> torch.dtype | Moment:
    """Return how a column is kept."""
    return tensor.moment if isinstance(tensor, CodedTensor) else tensor.dtype


def is_in_memory(tensor: TierTensor) -> bool:
    """Return whether a column is kept in memory, as numbers or coded."""
    return (tensor.codes if isinstance(tensor, CodedTensor) else tensor).tensor is not None


def memory_of(tensor: TierTensor, part: slice) -> torch.Tensor:
    """Return a part of a column that is kept in memory: the numbers themselves, or their records."""
    if isinstance(tensor, CodedTensor):
        return tensor.codes.read(tensor.records(part))
    return tensor.read(part)


@dataclass(eq=False)
class StateShard:
    """A stretch of a region with one tier and one route, and its tensors, each as long as the stretch."""

    start: int  # elements of the region
    stop: int
    tier: Tier
    route: Route
    tensors: dict[str, TierTensor]
    spare: dict[str, TierTensor] = field(default_factory=dict)
    holds_parameters: bool = False  # the master, or the upper half of a split one, is the parameter itself, not a copy
    seals: WeakKeyDictionary[TierTensor, Seals] = field(default_factory=WeakKeyDictionary)  # ZEROSTD_DEBUG=checksums
    landed: Transfer = field(default_factory=Done)  # when the last update is back in `tier`: of streamed ones, on disk

    @property
    def portion(self) -> Portion:
        """The plan it was made from."""
        return Portion(self.start, self.stop, self.tier, self.route)

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def region(self) -> slice:
        """Where it lies in the region."""
        return slice(self.start, self.stop)

    @property
    def is_split(self) -> bool:
        """Whether the master is kept as two halves."""
        return LOW in self.tensors

    @property
    def master(self) -> TierTensor:
        """fp32, or the parameters' own dtype if that is wider."""
        return SplitTensor(self.tensors[HIGH], self.tensors[LOW]) if self.is_split else self.tensors[MASTER]

    @property
    def is_resident(self) -> bool:
        """Whether it is updated in place, on the device."""
        return self.route is Route.RESIDENT

    @property
    def is_coded(self) -> bool:
        """Whether states are kept as codes. Then a kernel updates them on every route, and not the user's optimizer."""
        return any(isinstance(tensor, CodedTensor) for tensor in self.tensors.values())

    def commit_speculative(self) -> None:
        """Make the spare tensors, which a speculative update has written, the current ones."""
        self.tensors, self.spare = self.spare, self.tensors

    def parts(self, pieces: Iterable[Piece]) -> Iterator[tuple[Piece, slice]]:
        """Yield the parts of the region's pieces that lie here, each with its place in the tensors."""
        for piece in pieces:
            if part := piece.within(self.start, self.stop):
                yield part, part.place_from(self.start)

    def wait_landed(self) -> None:
        """Block the host until the last update has arrived in `tier`; its new parameters may have been used long
        before. Call this before reading or writing the tensors outside updates."""
        self.landed.synchronize()

    def read_master(self) -> torch.Tensor:
        """Return the master as the last update left it."""
        self.wait_landed()
        return self.master.read(slice(0, self.numel))


def clear_low(shards: Iterable[StateShard], start: int, new: torch.Tensor, old: torch.Tensor | None) -> None:
    """Set masters to exactly the parameters that a user wrote, from element `start` of the region, where they differ
    from `old`; everywhere if `old` is None. The lower halves of split masters become zero."""
    for shard in shards:
        low = max(start, shard.start)
        high = min(start + new.numel(), shard.stop)
        if low >= high or not (shard.is_split and shard.holds_parameters):
            continue
        column = shard.tensors[LOW]
        part = slice(low - shard.start, high - shard.start)
        shard.wait_landed()
        kept = column.read(part)
        if old is None:
            column.write(part, torch.zeros_like(kept))
            continue
        here = slice(low - start, high - start)
        changed = new[here].to(old.device).view(torch.int16) != old[here].view(torch.int16)
        column.write(part, kept.masked_fill(changed.to(kept.device), 0))


@dataclass(eq=False)
class Edits:
    """Detects in-place writes of users to parameters: by version counters, and by earlier copies of parameters on the
    device that are upper halves of masters. The copies show which elements changed."""

    ledger: Ledger
    versions: list[int]  # of the parameters, when edits were kept last
    copies: dict[Piece, torch.Tensor] = field(default_factory=dict)
    brief: set[Piece] = field(default_factory=set)  # those that the next update forgets
    awaits_commit: bool = False  # users have written to parameters, and masters do not know

    def take(self, piece: Piece, region: torch.Tensor, *, is_brief: bool) -> None:
        with torch.inference_mode(False):
            self.copies[piece] = region[piece.place].clone()
        self.ledger.enter(Kind.BUFFERS, self.copies[piece].nbytes)
        if is_brief:
            self.brief.add(piece)

    def renew(self, region: torch.Tensor, *pieces: Piece) -> None:
        """Copy pieces again, or all."""
        for piece in pieces or self.copies:
            self.copies[piece].copy_(region[piece.place])

    def forget(self, *pieces: Piece) -> None:
        for piece in pieces:
            self.brief.discard(piece)
            self.ledger.leave(Kind.BUFFERS, self.copies.pop(piece).nbytes)
