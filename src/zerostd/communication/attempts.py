"""Calls of prepare, as ranks see them in the store before they have connections.

In: the ranks that this one has to meet, and its address. Out: the addresses of all; or an error with the ranks that
have not come within the time limit; or, at once, that another rank waits for this one together with other ranks.

[Note: failing twice] Two such ranks would wait for each other until the limit, and so would all others of both sets. So
the one that comes later puts its failure in the place of its address, for both sets, which wakes those that wait. Each
rank that wakes does the same where it belongs to both. So every rank counts both calls, and none can be taken for a
later one.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from zerostd.compat import default_store
from zerostd.errors import CommunicationError, PrepareError

CALLS = "zerostd/prepare/"  # and a place among the ranks: how often the rank there has called, together with these
LATEST = "zerostd/latest/"  # and a rank, in the store of all: its latest call, as ranks and number
MOST_COMPARED = 64  # ranks: looking at the calls of more would take long


def store_of(ranks: Sequence[int]) -> Any:
    """Return the store in which these ranks meet: the default group's, under a name of their own if they are some."""
    store = default_store()
    if is_everyone(ranks):
        return store
    return dist.PrefixStore(f"ranks {listed(ranks)}", store)  # type: ignore[attr-defined]  # not among its exports


def is_everyone(ranks: Sequence[int]) -> bool:
    return list(ranks) == list(range(dist.get_world_size()))


def listed(ranks: Sequence[int]) -> str:
    return "-".join(map(str, ranks))


class Attempt:
    """A call of prepare by this rank together with others. Without a number, it is the next one."""

    def __init__(self, ranks: Sequence[int], number: int | None = None) -> None:
        self.ranks = list(ranks)
        self.rank = dist.get_rank()
        self.place = self.ranks.index(self.rank)
        self._store = store_of(ranks)
        self._everyone = default_store()
        self.number = self._count(1) if number is None else number
        self.key = f"zerostd/{self.number}"

    def meet(self, address: list[Any], timeout_s: float) -> list[list[Any]]:
        """Return the addresses of all ranks, in order. A call that ends at the time limit counts as if not made."""
        try:
            return self._meet(address, timeout_s)
        except PrepareError:  # counted by all: [Note: failing twice]
            raise
        except BaseException:
            with contextlib.suppress(RuntimeError):
                self._count(-1)
                self._store.delete_key(f"{self.key}/{self.place}")
                self._everyone.set(f"{LATEST}{self.rank}", json.dumps(None))
            raise

    def _meet(self, address: list[Any], timeout_s: float) -> list[list[Any]]:
        before = self._verdict()
        self._everyone.set(f"{LATEST}{self.rank}", json.dumps([self.ranks, self.number]))
        self._refuse_others()
        self._store.set(f"{self.key}/{self.place}", json.dumps(address))
        keys = [f"{self.key}/{place}" for place in range(len(self.ranks))]
        try:
            self._store.wait(keys, timedelta(seconds=timeout_s))
            texts = self._store.multi_get(keys) if self._store.has_extended_api() else [*map(self._store.get, keys)]
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {self.rank} gave up waiting in zerostd.prepare() (time limit {timeout_s:g} s): "
                f"{self._missing(keys, before)}. Every rank must prepare the same models, in the same order"
            ) from error
        answers = [json.loads(text) for text in texts]
        self._follow([answer for answer in answers if isinstance(answer, dict)])
        if self.place == 0 and self._store.check([f"{self.key}/missing"]):
            self._store.delete_key(f"{self.key}/missing")
        return answers

    def _count(self, more: int) -> int:
        """Return this rank's number of calls together with these ranks, after adding to it."""
        return int(self._store.add(f"{CALLS}{self.place}", more))

    # Ranks that have not come

    def _verdict(self) -> str:
        """Return what the first rank has written that gave up: now, or in an earlier call of the same number."""
        key = f"{self.key}/missing"
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _missing(self, keys: list[str], before: str) -> str:
        """Return the missing ranks, in words. The first rank that gives up tells all others, which then miss it too."""
        try:
            missing = [f"rank {r}" for r, key in zip(self.ranks, keys, strict=True) if not self._store.check([key])]
            text = f"{', '.join(missing)} did not call it" if missing else "all called it too late"
            new = json.dumps([uuid.uuid4().hex, text])
            verdict = self._store.compare_set(f"{self.key}/missing", before, new)
            return str(json.loads(verdict)[1])
        except RuntimeError:
            return "the store does not answer, so the process that keeps it, often rank 0, has ended"

    # Ranks that come with others

    def _refuse_others(self) -> None:
        """Raise if another rank waits for this one together with other ranks: [Note: failing twice]."""
        others = list(self._others())
        if not others:
            return
        rank, first = others[0]
        failure = (
            f"rank {self.rank} prepares a model with the ranks {self.ranks}, but rank {rank} with {first.ranks}: pass "
            "the same mesh= on all ranks of a model; if it has DTensors, another dimension of their mesh"
        )
        calls = [[attempt.ranks, attempt.number] for attempt in (self, *(other for _, other in others))]
        self._follow([{"failure": failure, "calls": calls}])

    def _others(self) -> Iterator[tuple[int, Attempt]]:
        """Yield ranks that wait for this one together with other ranks, and their calls."""
        for rank in self.ranks if len(self.ranks) <= MOST_COMPARED else ():
            key = f"{LATEST}{rank}"
            latest = json.loads(self._everyone.get(key)) if self._everyone.check([key]) else None
            if rank != self.rank and latest is not None and latest[0] != self.ranks and self.rank in latest[0]:
                other = Attempt(*latest)
                if other._count(0) < other.number:
                    yield rank, other

    def _follow(self, failures: list[dict[str, Any]]) -> None:
        """Fail in all calls that failed because of each other, as far as this rank belongs to them."""
        for failure in failures:
            for ranks, number in failure["calls"]:
                if self.rank in ranks:
                    Attempt(ranks, number)._fail(failure)
        if failures:
            raise PrepareError(failures[0]["failure"])

    def _fail(self, failure: dict[str, Any]) -> None:
        self._count(max(0, self.number - self._count(0)))
        self._store.set(f"{self.key}/{self.place}", json.dumps(failure))
