"""Control messages: small collectives on the CPU, by which ranks agree or learn which rank differs.

`check_equal` at prepare finds ranks with different models before they can hang. `agree` after each backward says
which parameters were used on any rank, that all ranks gathered the same groups in the same order, and that they take
the same options into the step. Called by scheduling, preparing and checkpointing.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from zerostd.communication.world import World
from zerostd.errors import CommunicationError, MisuseError, PrepareError, ZerostdError
from zerostd.kernels import crc32

T = TypeVar("T")
END = "the end of backward"
MOST_DIFFERENCES = 3  # that an error names
SAME_CALLS = "Every rank must make the same calls in the same order"
SAME_ORDER = (
    "Modules that only some ranks call must share a group with one that all ranks call: pass groups=[...] with their "
    "parent's name"
)


class Control:
    """Exchanges small messages for one prepared model."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.notes: list[str] = []  # since ranks last agreed
        self.num_flags = 0  # parameters in `agree`: all messages that may meet have one size

    def agree(
        self, used: Sequence[bool], sequence: Sequence[str], facts: Sequence[str] = (), where: str = END
    ) -> list[bool]:
        """Return for each parameter whether any rank used it. Raise on all ranks if one of them is not at `where`,
        gathered groups in another `sequence`, or has other `facts` or notes."""
        assert self.world.channels is not None
        ours = ([where], list(sequence), [*facts, *self.notes])
        checksum = zlib.crc32(repr(ours).encode(errors="backslashreplace")).to_bytes(4, "little")
        tail = checksum + bytes(255 - byte for byte in checksum)
        message = torch.frombuffer(bytearray(bytes(used) + tail), dtype=torch.uint8)
        with self.world.at(where), self.world.waiting() as wait:
            wait(dist.all_reduce(message, dist.ReduceOp.MAX, group=self.world.channels.control, async_op=True))
        if not torch.equal(message[-8:-4], 255 - message[-4:]):
            raise CommunicationError(_explain(self._exchange(ours, where), self.world))  # all ranks are here
        self.notes.clear()
        return [bool(flag) for flag in message[:-8].tolist()]

    def confirm(self, where: str, facts: Sequence[str] = ()) -> None:
        """Raise on all ranks unless all are at `where`, with the same facts. A rank that is at the end of backward is
        noticed too."""
        if self.world.channels is not None:
            self.agree([False] * self.num_flags, [], facts, where)

    def note(self, line: str) -> None:
        """Note something that all ranks must do alike; they compare it when they agree next."""
        if self.world.channels is not None:
            self.notes.append(line)

    def note_values(self, name: str, values: torch.Tensor) -> None:
        """Note values that all ranks must load alike."""
        if self.world.channels is not None:
            self.note(f"{name!r} loaded with checksum {crc32(values.detach().to('cpu').contiguous()):08x}")

    def check_equal(self, what: str, lines: Sequence[str]) -> None:
        """Raise PrepareError if the `lines` of the ranks differ, with the first difference."""
        text = chr(10).join(lines).encode(errors="backslashreplace")  # names of files need not be text
        digests = self.collect(f"{len(lines)}:{zlib.crc32(text)}", "zerostd.prepare()")
        if len(set(digests)) > 1:
            everyone = self.collect(list(lines), "zerostd.prepare()")
            raise PrepareError(f"ranks were given different {what}: {_first_difference(everyone, self.world)}")

    def collect(self, value: Any, what: str = "an exchange between ranks") -> list[Any]:
        """Return everyone's value, by rank; `what` names the exchange in errors."""
        self.confirm(what)
        return self._exchange(value, what)

    def _exchange(self, value: Any, what: str) -> list[Any]:
        if self.world.channels is None:
            return [value]
        out: list[Any] = [None] * self.world.size
        with self.world.at(what), self.world.waiting():
            dist.all_gather_object(out, value, group=self.world.channels.control)
        return out

    def on_all_ranks(self, work: Callable[[], T], what: str, error: type[ZerostdError], remark: str = "") -> T:
        """Do `work` and return its result, or raise on all ranks what went wrong on the first that failed, with a
        `remark` behind it."""
        cause: Exception | None = None
        message: str | None = None
        try:
            result = work()
        except Exception as caught:
            cause = caught
            message = str(caught) if isinstance(caught, error) else f"{type(caught).__name__}: {caught}"
        for rank, said in enumerate(self.collect(message, what)):
            if said is not None:
                who = f"{self.world.name(rank)}: " if self.world.size > 1 else ""
                raise error(f"{who}{said}{remark}") from cause
        return result

    def collect_if_any(self, value: Any, what: str, *, is_different: bool) -> list[Any]:
        """Return everyone's value, by rank. If no rank differs, the value is this rank's everywhere, at the cost of one
        small message."""
        if self.world.channels is None:
            return [value]
        if self.num_flags:
            is_any = self.agree([is_different] * self.num_flags, [], where=what)[0]
            if not is_any:
                return [value] * self.world.size
        return self._exchange(value, what)

    def collect_on_first(self, value: Any, what: str) -> list[Any]:
        """Return everyone's value on rank 0, nothing on the others."""
        if self.world.channels is None:
            return [value]
        self.confirm(what)
        out: list[Any] | None = [None] * self.world.size if self.world.rank == 0 else None
        with self.world.at(what), self.world.waiting():
            dist.gather_object(value, out, group=self.world.channels.control, group_dst=0)
        return out or []


def check_same_activations(world: World, name: str, sizes: Sequence[int]) -> None:
    """Raise on all ranks of a user's process group if their activations of a group differ in number or size."""
    everyone = Control(world).collect(list(sizes))
    if any(theirs != everyone[0] for theirs in everyone):
        counts = [f"rank {rank}: {len(theirs)} of {sum(theirs)} bytes" for rank, theirs in enumerate(everyone)]
        raise MisuseError(
            "Placement(same_activations=...): the ranks of that process group have different activations in group "
            f"{name!r} ({', '.join(counts)}); pass a group whose ranks run the same forward on the same batch"
        )


def _explain(everyone: list[tuple[list[str], list[str], list[str]]], world: World) -> str:
    """Return how ranks differ, from the place, the sequence of gathers and the facts of each."""
    places, sequences, facts = (list(lines) for lines in zip(*everyone, strict=True))
    usual, rank = _odd(facts)
    names = (world.name(usual), world.name(rank))
    pairs = [(f"{ours} on {names[0]}", f"{theirs} on {names[1]}") for ours, theirs in _differing(facts, usual, rank)]
    options = "; ".join(" and ".join(pair) for pair in pairs[:MOST_DIFFERENCES])
    if any(place != places[0] for place in places):
        usual, rank = _odd(places)
        where = f"{world.name(usual)} is at {places[usual][0]} and {world.name(rank)} is at {places[rank][0]}"
        also = f"; they differ in {options}" if options else ""
        is_order = all("the gather of group" in place[0] for place in (places[usual], places[rank]))
        remedy = f"{SAME_CALLS}. {SAME_ORDER}" if is_order else SAME_CALLS
        return f"ranks are not at the same call: {where}{also}. {remedy}"
    if any(sequence != sequences[0] for sequence in sequences):
        return (
            "ranks gathered groups in different orders, so parameters may hold mixed values and this step was not "
            f"applied: {_first_difference(sequences, world)}. {SAME_ORDER}"
        )
    return (
        f"ranks differ in the options of this step, which would mix their values: {options}. Give all ranks the same "
        "options and calls; if a step was taken with different options, load the last checkpoint"
    )


def _odd(everyone: list[list[str]]) -> tuple[int, int]:
    """Return a rank that agrees with most ranks, and the first rank that differs from it."""
    usual = everyone.index(max(everyone, key=everyone.count))
    return usual, next((rank for rank, lines in enumerate(everyone) if lines != everyone[usual]), usual)


def _differing(everyone: list[list[str]], usual: int, rank: int) -> list[tuple[str, str]]:
    """Return the lines in which two ranks differ, beside each other."""
    both = zip_longest(everyone[usual], everyone[rank], fillvalue="nothing")
    return [(ours, theirs) for ours, theirs in both if ours != theirs]


def _first_difference(everyone: list[list[str]], world: World) -> str:
    """Return where the first rank that differs from most ranks does so."""
    usual, rank = _odd(everyone)
    for index, (ours, theirs) in enumerate(zip_longest(everyone[usual], everyone[rank])):
        if ours is None or theirs is None:
            longer = usual if theirs is None else rank
            num_more = len(everyone[longer]) - index
            return f"{world.name(longer)} has {num_more} more, the first is {everyone[longer][index]!r}"
        if ours != theirs:
            return f"entry {index} is {ours!r} on {world.name(usual)} and {theirs!r} on {world.name(rank)}"
    return "a second comparison found none"
