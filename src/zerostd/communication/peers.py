"""Queries to the other ranks: is each of them alive, and where is it in its program?

Every rank listens on a socket. A thread answers questions, and tells the next rank once a second where this rank is. So
another rank knows where a rank was last seen when its process is gone. Training sends no message for this. The loop
only notes its place, and after a collective has failed it asks.

    a collective fails -> ask every rank -> who is gone, silent or elsewhere -> tell every rank -> raise

A message is one line of JSON with the fields of `Place`, and the reply another one.

[Note: waiting on a device] Collectives of a device raise nowhere: the loop queues them and waits later, in a call of
the user's. A second thread looks at those that have not ended (`pending.py`). When the oldest exceeds the time limit,
or a rank is known to be gone, that thread finds the rank to blame and aborts the process groups. The device then
continues with meaningless numbers, so the next call of this model raises the error that the thread found.

[Note: ranks that stray] Ranks make the same calls, so of two ranks one is behind the other, or they are side by side. A
rank that has begun more backward passes and fewer steps than this one has left the way of the others: it has skipped a
step. The two may then wait for each other in different collectives. Messages of every second show that long before the
time limit. Counts may be read while they change, so it takes two messages.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

from zerostd.communication.attempts import Attempt
from zerostd.communication.pending import Pending, QueuedCollective, abort
from zerostd.communication.places import Place
from zerostd.communication.sockets import host_name, is_loopback, listen, map_at_once, receive, store_host
from zerostd.compat import default_store
from zerostd.errors import CommunicationError
from zerostd.tiers import Transfer

HEARTBEAT_S = 1.0  # between two messages to the next rank
ANSWER_S = 3.0  # a rank that has not answered by then is stopped, or cannot be reached
WATCH_S = 0.5  # between two looks at what is queued on the device
HELD_S = 1.0  # a rank whose device has waited so long for a collective waits itself
DOUBT_S = 5.0  # a collective that takes longer may wait for a rank that is gone: the next one is asked
STRAYED = "ranks have made different calls, and wait for each other"
FAILED = "another rank has failed"
BROKEN = ("connection closed", "connection reset", "broken pipe", FAILED)  # in the words of gloo and of the system
NETWORK = "all ranks are there, so the network between them has failed"
GONE = "is gone"  # begins what is said of a rank whose process has ended
BACKWARD = "backward"  # calls that are counted
STEP = "optimizer.step()"
OPEN: weakref.WeakSet[Peers] = weakref.WeakSet()  # those with a socket


class Peers:
    """This rank's place, and the way to the places of all others. One for each prepared model."""

    def __init__(self, rank: int, ranks: Sequence[int], timeout_s: float) -> None:
        """Meet all ranks at the store. `ranks` are those of the default process group, by their number here: errors
        name them."""
        self.place = Place(rank, seconds=time.monotonic())
        self.ranks = tuple(ranks)
        self.timeout_s = timeout_s
        self.pending = Pending()  # on the device
        self._seen: dict[int, tuple[float, Place]] = {}  # what other ranks said last, and when
        self.is_open = True  # until `close`
        self._failure = ""  # what every further call raises
        self._failing = threading.RLock()  # of the first thread that finds a failure; others take what it has found
        self._watcher: threading.Thread | None = None
        self._closing = threading.Event()
        self._suspects: dict[int, float] = {}  # see [Note: ranks that stray]: when they were heard first
        host = store_host(default_store())
        self._socket = listen(host)
        try:
            attempt = Attempt(ranks)
            self._key = attempt.key
            self._addresses = self._meet(attempt, host)
        except BaseException:
            self._socket.close()
            raise
        _close_in_children()
        OPEN.add(self)
        threading.Thread(target=self._serve, name="zerostd peers", daemon=True).start()

    def _meet(self, attempt: Attempt, host: str) -> list[tuple[str, int]]:
        address: Sequence[Any] = self._socket.getsockname()[:2]
        addresses = attempt.meet([*address, host_name()], self.timeout_s)
        self.hosts = {rank: name for rank, (_, _, name) in zip(self.ranks, addresses, strict=True)}
        here = is_loopback(address[0])
        return [(host if is_loopback(name) and not here else name, port) for name, port, _ in addresses]

    # The loop's side

    def enter(self, call: str) -> None:
        """Note the call that this rank makes now. Raises if a collective on the device was found to have failed."""
        self._check()
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
    def waiting(self, *groups: Any) -> Iterator[Callable[[Any], None]]:
        """Turn a failed or late collective inside the context into a CommunicationError that says who is to blame, and
        abort process groups. Yields a function that waits for a collective of gloo.

        [Note: aborted communicators] A kernel of nccl whose peer is gone runs until its communicator is aborted, and
        nothing behind it on the device, nor the end of the process, can come before. So a failure aborts all of them,
        at the same time: an abort waits for the device, and so for kernels of the other communicator.
        """
        self._check()
        self.place.is_waiting = True
        try:
            yield self._wait
        except RuntimeError as error:
            cause = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
            raise CommunicationError(self._fail(self.place, cause, groups)) from error
        finally:
            self.place.is_waiting = False

    def _wait(self, work: Any) -> None:
        """Wait for a collective of gloo. Raises before the time limit if it cannot end: a rank has failed in another
        one, or has strayed."""
        while not work.is_completed():
            with contextlib.suppress(RuntimeError):  # what has failed raises again below
                work.wait(timedelta(seconds=HEARTBEAT_S))
            reason = FAILED if any(place.verdict for _, place in [*self._seen.values()]) else ""
            reason = STRAYED if self._has_strayed() else reason
            if reason and not work.is_completed():
                raise RuntimeError(reason)
        work.wait()

    def _has_strayed(self) -> bool:
        """Return whether this rank and another one have made different calls: [Note: ranks that stray]."""
        for rank, (heard, place) in list(self._seen.items()):
            if not self.place.is_apart_from(place):
                self._suspects.pop(rank, None)
            elif self._suspects.setdefault(rank, heard) != heard:
                return True
        return False

    def expect(self, event: Transfer, group: Any) -> None:
        """Note a collective that was queued on the device, with the event behind it: see [Note: waiting on a device]. A
        thread watches it from then on."""
        self.pending.add(self.place.where, event, group)
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, name="zerostd watch", daemon=True)
            self._watcher.start()

    def _check(self) -> None:
        if self._failure:
            raise CommunicationError(self._failure)

    def _fail(self, here: Place, cause: str, groups: Iterable[Any]) -> str:
        """Abort process groups; return who is to blame for a collective that did not end, the same in all threads."""
        with self._failing:
            if self._failure:
                return self._failure
            text = self._explain(here, cause)
            self._failure = text if self.pending.groups else ""
            abort(dict.fromkeys([*groups, *self.pending.groups]))
            return text

    def _explain(self, here: Place, cause: str) -> str:
        is_late = any(word in cause.lower() for word in ("timed out", "timeout"))
        limit = f" (time limit {self.timeout_s:g} s)" if is_late else ""
        verb = f"{'gave up waiting' if is_late else 'failed'} in {here.where}{limit}"
        is_broken = any(word in cause.lower() for word in BROKEN)
        verdict = self._blame(self._ask_all(), here, is_broken=is_broken)
        if is_broken and verdict == NETWORK:  # a rank that gave up closes its connections before it knows why
            time.sleep(HEARTBEAT_S)
            verdict = self._blame(self._ask_all(), here, is_broken=True)
        self.place.verdict = verdict
        map_at_once(self._tell, self._others)  # before this process ends
        return (
            f"rank {self.ranks[self.place.rank]} {verb}, {self.place.counts}: {self.place.verdict}. Every rank must "
            f"make the same calls in the same order. Cause: {cause}"
        )

    def _blame(self, answers: dict[int, Place | str], here: Place, *, is_broken: bool) -> str:
        """Return the ranks to blame: those that are gone; otherwise those that do not wait; otherwise those that wait
        elsewhere, and the first that raised, with its verdict. Ranks that raised later did so because of others. A rank
        that still responds has not broken a connection."""
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
                reason = f"{GONE}: {end}" if end else answer
                missing.append(f"rank {self.ranks[rank]} {reason}. {self._last_seen(rank)}")
            elif is_broken:
                continue
            elif not answer.is_waiting:
                running.append(f"rank {self.ranks[rank]} {answer.describe()}")
            elif not answer.is_beside(here):
                elsewhere.append(f"rank {self.ranks[rank]} {answer.describe()}")
        first = next(iter(verdicts), None)
        if first is not None:
            place = verdicts[first]
            elsewhere.append(f"rank {self.ranks[first]} failed first. It {place.describe()}, and said: {place.verdict}")
        culprits = missing or running or elsewhere
        return "; ".join(culprits) or NETWORK

    def _last_seen(self, rank: int) -> str:
        """Return the last known place of a rank that does not answer."""
        if rank not in self._seen:
            return "It has not been heard from since zerostd.prepare()"
        heard, place = self._seen[rank]
        return f"Its last message, {time.monotonic() - heard:.1f} s ago, says that it {place.describe()}"

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(len(self._addresses)) if rank != self.place.rank]

    def _ask_all(self) -> dict[int, Place | str]:
        """Return the places of all other ranks; of those that do not answer, in words, why."""
        return dict(zip(self._others, map_at_once(self._ask, self._others), strict=True))

    def _ask(self, rank: int) -> Place | str:
        try:
            with socket.create_connection(self._addresses[rank], min(ANSWER_S, self.timeout_s)) as connection:
                connection.sendall(self._message())
                reply = receive(connection)
        except TimeoutError:
            return "does not answer: its process is stopped, or its machine cannot be reached"
        except OSError:
            reply = None
        if reply is None or reply.get("key") != self._key:
            return f"{GONE}: its process has ended"
        for line in reply["seen"]:
            self._note(line, is_relayed=True)
        place = self._note(reply["place"])
        return f"{GONE}: {place.end}" if place.end else place

    def _tell(self, rank: int) -> bool:
        """Send this rank's place without waiting for an answer; returns whether it was received."""
        try:
            with socket.create_connection(self._addresses[rank], HEARTBEAT_S) as connection:
                connection.sendall(self._message())
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Tell the next rank that this one leaves, and close the socket."""
        if not self.is_open:
            return
        error = getattr(sys, "last_value", None)  # an exception that ends the interpreter
        self.place.end = "it has released the model, or its process has ended"
        if error is not None:
            self.place.end = f"its process has ended, after {type(error).__name__}: {str(error)[:200]}"
        self.is_open = False
        size = len(self._addresses)
        any(self._tell((self.place.rank + step) % size) for step in range(1, min(size, 4)))
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._closing.set()
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join(WATCH_S)  # Python must not end while it asks the device
        if error is not None and not self._failure and self._is_held_for(HELD_S):
            abort(self.pending.groups)  # torch would wait for ranks that wait for this one
        self.drop()

    def drop(self) -> None:
        """Close the socket without a word: in a forked child, where the thread does not run."""
        self.is_open = False
        OPEN.discard(self)
        self._socket.close()

    # The threads' side

    def _watch(self) -> None:
        """Watch collectives that are queued on the device until one of them fails, or the model is released."""
        while not self._closing.wait(WATCH_S) and not self._failure:
            oldest = self.pending.oldest()
            waited_s = 0.0 if oldest is None else time.monotonic() - oldest.seconds
            if oldest is None or waited_s < min(DOUBT_S, self.timeout_s / 2):
                continue
            if waited_s > self.timeout_s:
                cause = f"timed out: queued on the device {waited_s:.1f} s ago, and still not finished"
            elif self._knows_of_loss():
                cause = f"queued on the device {waited_s:.1f} s ago, and still not finished"
            else:
                continue
            self._fail(self._held(oldest), cause, ())

    def _knows_of_loss(self) -> bool:
        """Return whether a rank has failed, left or strayed, or the next one is gone. The first to see that tells all
        others."""
        if self._has_strayed() or any(place.verdict or place.end for _, place in list(self._seen.values())):
            return True
        answer = self._ask((self.place.rank + 1) % len(self._addresses))
        return isinstance(answer, str) and answer.startswith(GONE)

    def _held(self, oldest: QueuedCollective) -> Place:
        """Return this rank's place where its device waits for other ranks."""
        return replace(self.place, what=oldest.what, is_waiting=True)

    def _is_held_for(self, seconds: float) -> bool:
        """Return whether collectives on the device are still running after this many seconds."""
        end = time.monotonic() + seconds
        while self.pending.oldest() is not None and time.monotonic() < end:
            time.sleep(WATCH_S / 10)
        return self.pending.oldest() is not None

    def _serve(self) -> None:
        size = len(self._addresses)
        beat = 0.0
        while self.is_open:
            if time.monotonic() >= beat:
                beat = time.monotonic() + HEARTBEAT_S
                self._tell((self.place.rank + 1) % size)
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # of strangers, and of a closed socket
                self._socket.settimeout(max(0.0, beat - time.monotonic()) + 0.01)
                connection, _ = self._socket.accept()
                with connection:
                    connection.settimeout(HEARTBEAT_S)
                    message = receive(connection)
                    if message is not None and message["key"] == self._key:
                        self._note(message["place"])
                        connection.sendall(self._message())

    def _message(self) -> bytes:
        """Return this rank's place and what it knows of the two ranks before it, as a line."""
        now = time.monotonic()
        oldest = None if self.place.is_waiting else self.pending.oldest()
        is_held = oldest is not None and now - oldest.seconds > min(HELD_S, self.timeout_s / 4)
        here = self._held(oldest) if is_held and oldest is not None else self.place
        place = replace(here, seconds=now - self.place.seconds)
        size = len(self._addresses)
        before = {(place.rank - step) % size for step in (1, 2)} - {place.rank}
        seen = []
        for heard, other in (self._seen[rank] for rank in before if rank in self._seen):
            seen.append({**asdict(other), "seconds": other.seconds + now - heard})
        return json.dumps({"key": self._key, "place": asdict(place), "seen": seen}).encode() + b"\n"

    def _note(self, fields: dict[str, Any], *, is_relayed: bool = False) -> Place:
        """Remember where a rank is. News from another rank counts only if the rank never spoke to this one directly, or
        has left since."""
        place = Place(**fields)
        before = self._seen.get(place.rank)
        is_news = before is None or not is_relayed or (place.end != "" and not before[1].end)
        if place.rank != self.place.rank and is_news:
            self._seen[place.rank] = (time.monotonic(), place)
        return place


@functools.cache
def _close_in_children() -> None:
    """Close the socket in forked children; otherwise the rank would seem to be there when its process has ended."""
    os.register_at_fork(after_in_child=lambda: [*map(Peers.drop, list(OPEN))])
