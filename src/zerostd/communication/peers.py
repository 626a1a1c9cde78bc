"""The other ranks, asked directly: is each of them there, and where is it in its program?

Every rank listens on a socket of its own. A thread answers those who ask, and tells the next rank once a second where
this one is: somebody then knows where a rank was seen last when its process is gone. Training sends no message for
this. The loop only notes its place, and after a collective has failed it asks.

    a collective fails -> ask every rank -> who is gone, silent or elsewhere -> tell every rank -> raise

A message is one line of JSON with the fields of `Place`, and the reply another one.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

from zerostd.errors import CommunicationError

HEARTBEAT_S = 1.0  # between two messages to the next rank
ANSWER_S = 3.0  # a rank that has not answered by then is stopped, or cannot be reached
ABORT_S = 5.0  # that a failure waits for the abort of process groups; it goes on behind
MOST_BYTES = 1 << 16  # in one message
MOST_ASKED = 32  # ranks, at the same time
T = TypeVar("T")
BACKWARD = "backward"  # calls that are counted
STEP = "optimizer.step()"
OPEN: weakref.WeakSet[Peers] = weakref.WeakSet()  # those with a socket


@dataclass
class Place:
    """Where a rank is in its program."""

    rank: int
    call: str = "zerostd.prepare()"  # the last one
    what: str = ""  # the collective that the call is in
    is_waiting: bool = False  # for other ranks
    num_steps: int = 0
    num_backwards: int = 0
    seconds: float = 0.0  # on the clock of its process, of the last change; in a message: since then
    verdict: str = ""  # who is to blame for a collective that failed, as this rank sees it
    end: str = ""  # why it left, if it has

    @property
    def counts(self) -> str:
        """How far its training has come, in words."""
        return f"with {self.num_backwards} backward passes and {self.num_steps} steps begun"

    @property
    def where(self) -> str:
        """The collective and the call it is in, in words."""
        return self.call if self.what in ("", self.call) else f"{self.what}, in {self.call}"

    def describe(self) -> str:
        """Return where the rank is, to follow its number."""
        if self.is_waiting:
            return f"waits in {self.where}, {self.counts}"
        return f"made its last call, {self.call}, {self.seconds:.1f} s ago, {self.counts}"

    def is_beside(self, other: Place) -> bool:
        """Whether two ranks wait in the same collective, as far as can be seen."""
        mine = (self.is_waiting, self.what, self.num_steps, self.num_backwards)
        return mine == (other.is_waiting, other.what, other.num_steps, other.num_backwards)


class Peers:
    """This rank's place, and the way to the places of all others. One for each prepared model."""

    def __init__(self, store: Any, rank: int, ranks: Sequence[int], timeout_s: float) -> None:
        """Meet all ranks at the store. Raises CommunicationError with the ranks that have not come in time. `ranks` are
        those of the default process group, by their number here: errors name them."""
        self.place = Place(rank, seconds=time.monotonic())
        self.ranks = tuple(ranks)
        self.timeout_s = timeout_s
        self._seen: dict[int, tuple[float, Place]] = {}  # what other ranks said last, and when
        self._is_open = True
        host = _store_host(store)
        self._socket = _listen(host)
        number = store.add(f"zerostd/prepare/{rank}", 1)  # of this rank's calls of prepare
        self._key = f"zerostd/{number}"
        try:
            self._addresses = self._meet(store, host, len(self.ranks))
        except BaseException:
            self._socket.close()
            with contextlib.suppress(RuntimeError):  # as if it had not called: the next time it counts as the first
                store.add(f"zerostd/prepare/{rank}", -1)
                store.delete_key(f"{self._key}/{rank}")
            raise
        _close_in_children()
        OPEN.add(self)
        threading.Thread(target=self._serve, name="zerostd peers", daemon=True).start()

    def _meet(self, store: Any, host: str, size: int) -> list[tuple[str, int]]:
        address: Sequence[Any] = self._socket.getsockname()[:2]
        store.set(f"{self._key}/{self.place.rank}", json.dumps(address))
        keys = [f"{self._key}/{rank}" for rank in range(size)]
        try:
            store.wait(keys, timedelta(seconds=self.timeout_s))
            texts = store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {self.ranks[self.place.rank]} gave up waiting in zerostd.prepare() (time limit "
                f"{self.timeout_s:g} s): {self._missing(store, keys)}. Every rank must prepare the same models, in the same order"
            ) from error
        if self.place.rank == 0:
            store.delete_key(f"{self._key}/missing")
        addresses = [tuple(json.loads(text)) for text in texts]
        here = _is_loopback(address[0])
        return [(host if _is_loopback(name) and not here else name, port) for name, port in addresses]

    def _missing(self, store: Any, keys: list[str]) -> str:
        """Return who did not come, in words. The first rank that gives up says so to all: others see it missing too."""
        verdict = f"{self._key}/missing"
        try:
            if not store.check([verdict]):
                missing = [f"rank {rank}" for rank, key in zip(self.ranks, keys, strict=True) if not store.check([key])]
                store.set(verdict, f"{', '.join(missing)} did not come to it" if missing else "all came too late")
            return str(store.get(verdict).decode())
        except RuntimeError:
            return "the store does not answer, so the process that keeps it, often rank 0, has ended"

    # The loop's side

    def enter(self, call: str) -> None:
        """Note the call that this rank makes now."""
        self.place.call = call
        self.place.what = ""
        self.place.seconds = time.monotonic()
        self.place.num_backwards += call == BACKWARD
        self.place.num_steps += call == STEP

    @contextlib.contextmanager
    def at(self, what: str) -> Iterator[None]:
        """Note the collective that this rank is in, inside the context."""
        before = self.place.what
        self.place.what = what
        try:
            yield
        finally:
            self.place.what = before

    @contextlib.contextmanager
    def waiting(self, *groups: Any) -> Iterator[None]:
        """Turn a failed or late collective inside the context into a CommunicationError that says who is to blame, and
        abort process groups.

        [Note: aborted communicators] A kernel of nccl whose peer is gone runs until its communicator is aborted, and
        nothing behind it on the device, nor the end of the process, can come before. So a failure aborts all of them,
        at the same time: an abort waits for the device, and so for kernels of the other communicator.
        """
        self.place.is_waiting = True
        try:
            yield
        except RuntimeError as error:
            text = self._explain(error)
            aborts = [threading.Thread(target=group.abort, name="zerostd abort", daemon=True) for group in groups]
            with contextlib.suppress(RuntimeError):  # Python is about to end and starts no threads
                for abort in aborts:
                    abort.start()
                for abort in aborts:
                    abort.join(ABORT_S)
            raise CommunicationError(text) from error
        finally:
            self.place.is_waiting = False

    def _explain(self, error: RuntimeError) -> str:
        cause = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        is_late = any(word in cause.lower() for word in ("timed out", "timeout"))
        limit = f" (time limit {self.timeout_s:g} s)" if is_late else ""
        verb = f"{'gave up waiting' if is_late else 'failed'} in {self.place.where}{limit}"
        self.place.verdict = self._blame(self._ask_all())
        self._tell_all()
        return (
            f"rank {self.ranks[self.place.rank]} {verb}, {self.place.counts}: {self.place.verdict}. Every rank must make "
            f"the same calls in the same order. Cause: {cause}"
        )

    def _blame(self, answers: dict[int, Place | str]) -> str:
        """Return who is to blame: ranks that are gone, else those that do not wait, else those that wait elsewhere and
        the first that raised, with its verdict. Those that raised later did so because of others."""
        heard = sorted(self._seen.items(), key=lambda item: item[1][0])  # the first verdict is nearest to the cause
        verdicts = {rank: place for rank, (_, place) in heard if place.verdict}
        missing: list[str] = []
        running: list[str] = []
        elsewhere: list[str] = []
        for rank, answer in sorted(answers.items()):
            if rank in verdicts:
                continue
            if isinstance(answer, str):
                end = self._seen[rank][1].end if rank in self._seen else ""
                missing.append(
                    f"rank {self.ranks[rank]} {f'is gone: {end}' if end else answer}. {self._last_seen(rank)}"
                )
            elif not answer.is_waiting:
                running.append(f"rank {self.ranks[rank]} {answer.describe()}")
            elif not answer.is_beside(self.place):
                elsewhere.append(f"rank {self.ranks[rank]} {answer.describe()}")
        first = next(iter(verdicts), None)
        if first is not None:
            place = verdicts[first]
            elsewhere.append(
                f"rank {self.ranks[first]} failed before. It {place.describe()}, and said: {place.verdict}"
            )
        culprits = missing or running or elsewhere
        return "; ".join(culprits) or "all ranks wait in it, so the network between them has failed"

    def _last_seen(self, rank: int) -> str:
        """Return where a rank that does not answer was, as far as somebody knows."""
        if rank not in self._seen:
            return "It was not heard of since zerostd.prepare()"
        heard, place = self._seen[rank]
        return f"Its last message, {time.monotonic() - heard:.1f} s ago, says that it {place.describe()}"

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(len(self._addresses)) if rank != self.place.rank]

    def _ask_all(self) -> dict[int, Place | str]:
        """Return the places of all other ranks; of those that do not answer, in words, why."""
        return dict(zip(self._others, _map_at_once(self._ask, self._others), strict=True))

    def _ask(self, rank: int) -> Place | str:
        try:
            with socket.create_connection(self._addresses[rank], min(ANSWER_S, self.timeout_s)) as connection:
                connection.sendall(self._message())
                reply = _receive(connection)
        except TimeoutError:
            return "does not answer: its process is stopped, or its machine cannot be reached"
        except OSError:
            reply = None
        if reply is None or reply.get("key") != self._key:
            return "is gone: its process has ended"
        for line in reply["seen"]:
            self._note(line, is_relayed=True)
        place = self._note(reply["place"])
        return f"is gone: {place.end}" if place.end else place

    def _tell_all(self) -> None:
        """Let every rank that answers know the verdict, before this process ends."""
        _map_at_once(self._tell, self._others)

    def _tell(self, rank: int) -> bool:
        """Send this rank's place without waiting for an answer; returns whether somebody took it."""
        try:
            with socket.create_connection(self._addresses[rank], HEARTBEAT_S) as connection:
                connection.sendall(self._message())
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Say goodbye to the next rank that is there, and close the socket."""
        if not self._is_open:
            return
        error = getattr(sys, "last_value", None)  # an exception that ends the interpreter
        self.place.end = "it has released the model, or its process has ended"
        if error is not None:
            self.place.end = f"its process has ended, after {type(error).__name__}: {str(error)[:200]}"
        self._is_open = False
        size = len(self._addresses)
        any(self._tell((self.place.rank + step) % size) for step in range(1, min(size, 4)))
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self.drop()

    def drop(self) -> None:
        """Close the socket without a word: in a forked child, where the thread does not run."""
        self._is_open = False
        OPEN.discard(self)
        self._socket.close()

    # The thread's side

    def _serve(self) -> None:
        size = len(self._addresses)
        beat = 0.0
        while self._is_open:
            if time.monotonic() >= beat:
                beat = time.monotonic() + HEARTBEAT_S
                self._tell((self.place.rank + 1) % size)
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # of strangers, and of a closed socket
                self._socket.settimeout(max(0.0, beat - time.monotonic()) + 0.01)
                connection, _ = self._socket.accept()
                with connection:
                    connection.settimeout(HEARTBEAT_S)
                    message = _receive(connection)
                    if message is not None and message["key"] == self._key:
                        self._note(message["place"])
                        connection.sendall(self._message())

    def _message(self) -> bytes:
        """Return this rank's place and what it knows of the two ranks before it, as a line."""
        now = time.monotonic()
        place = replace(self.place, seconds=now - self.place.seconds)
        size = len(self._addresses)
        before = {(place.rank - step) % size for step in (1, 2)} - {place.rank}
        seen = []
        for heard, other in (self._seen[rank] for rank in before if rank in self._seen):
            seen.append({**asdict(other), "seconds": other.seconds + now - heard})
        return json.dumps({"key": self._key, "place": asdict(place), "seen": seen}).encode() + b"\n"

    def _note(self, fields: dict[str, Any], *, is_relayed: bool = False) -> Place:
        """Remember where a rank is. What another rank has heard of it counts only if it never spoke to this one, or
        has left since."""
        place = Place(**fields)
        before = self._seen.get(place.rank)
        is_news = before is None or not is_relayed or (place.end != "" and not before[1].end)
        if place.rank != self.place.rank and is_news:
            self._seen[place.rank] = (time.monotonic(), place)
        return place


def _map_at_once(function: Callable[[int], T], ranks: list[int]) -> list[T]:
    """Return what a function returns for each rank, asked at the same time; one by one where Python is about to end and
    starts no threads."""
    try:
        with ThreadPoolExecutor(max(1, min(MOST_ASKED, len(ranks)))) as threads:
            return list(threads.map(function, ranks))
    except RuntimeError:
        return [function(rank) for rank in ranks]


def _receive(connection: socket.socket) -> dict[str, Any] | None:
    """Return the object of one line; None if the other side has closed, or sent something else."""
    data = b""
    while not data.endswith(b"\n") and len(data) < MOST_BYTES:
        block = connection.recv(MOST_BYTES)
        if not block:
            return None
        data += block
    try:
        message = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


def _listen(host: str) -> socket.socket:
    """Return a socket at the address under which other ranks reach this one: that of the way to the store."""
    family, _, _, _, target = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing
        address = probe.getsockname()[0]
    return socket.create_server((address, 0), family=family, backlog=128)


def _store_host(store: Any) -> str:
    """Return the name of the machine that keeps the store; of this one, where it is no machine's."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(getattr(store, "host", None) or os.environ.get("MASTER_ADDR") or "localhost")


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


@functools.cache
def _close_in_children() -> None:
    """Let no forked child keep a socket open: the rank would seem to be there when its process has ended."""
    os.register_at_fork(after_in_child=_drop_all)


def _drop_all() -> None:
    for peers in list(OPEN):
        peers.drop()
