"""A worker: one thread that runs jobs beside the training loop, and the `Work` that callers wait for.

Of the jobs that wait, it takes those whose input has arrived, and of these the one that is needed first; if no input
has arrived, the job submitted first. So urgent jobs overtake, but a job whose input is missing never delays others.
Jobs with the same place keep their order. A job may have several parts, and another job may run between them.

A job that fails stops the worker, because later jobs may need its result. The failed job's `wait` raises its error, and
so does every later call of the worker.
"""

from __future__ import annotations

import bisect
import contextlib
import operator
import os
import threading
import time
import traceback
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from zerostd.errors import MisuseError, StorageError, ZerostdError
from zerostd.tiers.debug import be_late
from zerostd.tiers.pacing import LinkPace, Priority, at
from zerostd.tiers.transfer import Done, Transfer

BY_PLACE = operator.attrgetter("place")


class Work(Transfer):
    """A transfer that other threads carry out in `num_parts` parts, each of which ends in `finish`.

    It is done when the last part has ended, failed parts too: after `wait` no thread uses the memory any more. If the
    work ends with a copy on a stream, `event` marks the end of the copy, and the current stream waits for it.
    """

    def __init__(self, num_parts: int = 1) -> None:
        self.event: Transfer = Done()
        self._error: BaseException | None = None
        self._is_reported = False  # whether anybody saw the error
        self._parts_left = num_parts
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._done = threading.Event()

    def finish(self, error: BaseException | None = None) -> None:
        """End one part, well or with an error; `wait` raises the first one."""
        with self._lock:
            self._error = self._error or error
            self._parts_left -= 1
            if self._parts_left == 0:
                self._done.set()

    def wait(self) -> None:
        """Block the host until all parts have ended; raise the first error, with its cause, every time."""
        if not self._done.is_set():
            check_process(self._process, "a transfer")
            self._done.wait()
        error = self._error
        if error is None:
            self.event.wait()
            return
        self._is_reported = True
        if isinstance(error, ZerostdError):  # a new one each time: a raised error collects tracebacks
            raise type(error)(*error.args) from error.__cause__ or error
        raise StorageError(f"the work behind a transfer failed: {error!r}") from error

    def is_done(self) -> bool:
        return self._done.is_set()

    def synchronize(self) -> None:
        """Block the host until the work that was queued in a stream has ended, too."""
        self.wait()
        self.event.synchronize()

    def has_arrived(self) -> bool:
        return self.is_done() and self.event.has_arrived()

    def __del__(self) -> None:
        if self._error is not None and not self._is_reported:
            warnings.warn(
                f"a transfer failed, and its result was not waited for: {self._error}", RuntimeWarning, stacklevel=2
            )


def check_process(process: int, what: str) -> None:
    """Refuse calls in a forked child that need threads of `process`, for which it would wait for ever."""
    if process != os.getpid():
        raise MisuseError(
            f"{what} of process {process} is used in a forked child, {os.getpid()}, which lacks its threads: use "
            "the model in the process that prepared it, give the child zerostd.full_state_dict(model), or start it by "
            "spawn"
        )


@dataclass(eq=False)
class _WorkerJob:
    parts: deque[Callable[[], None]]  # still to do
    place: int  # in the order in which jobs are needed
    number: int  # in the order in which jobs were submitted
    ready: Transfer  # its input
    work: Work
    pace: LinkPace | None  # of background work; None: it never stops between parts


class _Queue:
    """The jobs of a worker, and what its thread does. It does not know the worker, so the thread can end with it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.process = os.getpid()
        self.jobs: list[_WorkerJob] = []  # in the order in which they are needed
        self.num_submitted = 0
        self.condition = threading.Condition()
        self.is_busy = False
        self.is_closed = False
        self.error: BaseException | None = None  # of the first job that failed
        self.resumes_at = 0.0  # when jobs with a pace go on, by time.monotonic()

    def serve(self, device: torch.device) -> None:
        """Do jobs until the queue is closed."""
        if device.type != "cpu" and device.index is not None:
            torch.accelerator.set_device_index(device.index)
        torch.set_grad_enabled(False)
        while True:
            with self.condition:
                self.is_busy = False
                self.condition.notify_all()
                self.condition.wait_for(lambda: self.jobs or self.is_closed)
                if self.is_closed:
                    return
                job = self._next()
                if job is None:
                    self.condition.wait(max(0.0, self.resumes_at - time.monotonic()))
                    continue
                self.is_busy = True
            self._do_part(job)
            del job

    def close(self) -> None:
        if self.process != os.getpid():  # a forked child has no thread to end, and the lock may be held for ever
            return
        with self.condition:
            self.is_closed = True
            self.condition.notify_all()

    def stop(self) -> None:
        """Close, drop the jobs that wait, and return when the one that runs is done."""
        if self.process != os.getpid():
            return
        self.close()
        with self.condition:
            self.jobs.clear()
            self.condition.wait_for(lambda: not self.is_busy)

    def _next(self) -> _WorkerJob | None:
        """Return the job whose next part is done now; None if it is background work that has stopped for a while. The
        lock is held, and there is a job."""
        stops = self.error is None and time.monotonic() < self.resumes_at
        ready = (job for job in self.jobs if job.ready.has_arrived() and not (stops and job.pace is not None))
        job = next(ready, None)
        if job is None:
            job = min(self.jobs, key=lambda job: job.number)
            if stops and job.pace is not None:
                return None
        if len(job.parts) == 1 or self.error is not None:
            self.jobs.remove(job)
        return job

    def _do_part(self, job: _WorkerJob) -> None:
        if self.error is None:
            begun = time.monotonic()
            be_late()
            try:
                with at(Priority.BACKGROUND) if job.pace is not None else contextlib.nullcontext():
                    job.parts.popleft()()
                if job.pace is not None:
                    now = time.monotonic()
                    self.resumes_at = now + job.pace.pause(now - begun)
            except BaseException as error:
                self.error = _without_frames(error)
                with self.condition, contextlib.suppress(ValueError):  # its other parts are not to be done
                    self.jobs.remove(job)
        if self.error is not None:
            failure = self.error
            if not isinstance(failure, ZerostdError):
                failure = StorageError(f"{self.name} failed: {type(failure).__name__}: {failure}")
                failure.__cause__ = self.error
            job.work.finish(failure)
        elif not job.parts:
            job.work.finish()


class Worker:
    """Does jobs in the background. Its thread starts with the first job, and ends with the object or with `stop`."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._queue = _Queue(name)
        self.stop = self._queue.stop  # may outlive the worker, which it does not refer to
        self._thread = threading.Thread(target=self._queue.serve, args=(device,), daemon=True, name=name)
        weakref.finalize(self, self._queue.close)

    def submit(
        self,
        *parts: Callable[[], None],
        place: int = 0,
        ready: Transfer | None = None,
        work: Work | None = None,
        pace: LinkPace | None = None,
    ) -> Work:
        """Do the parts of a job one after the other, when `ready` has arrived or there is nothing else to do. Return
        its Work, which is done when the last part has returned; pass `work` if a part sets its event. Between parts,
        background work pauses as its `pace` says."""
        self.check()
        if self._queue.is_closed:
            raise StorageError(f"{self._queue.name} has ended: its model was released")
        with self._queue.condition:
            self._queue.num_submitted += 1
            job = _WorkerJob(deque(parts), place, self._queue.num_submitted, ready or Done(), work or Work(), pace)
            if self._thread.ident is None:
                self._thread.start()
            bisect.insort(self._queue.jobs, job, key=BY_PLACE)
            self._queue.condition.notify_all()
        return job.work

    def check(self) -> None:
        """Raise if a job has failed, or in a forked child."""
        check_process(self._queue.process, self._queue.name)
        error = self._queue.error
        if error is not None:
            raise StorageError(
                f"{self._queue.name} stopped: {type(error).__name__}: {error}. Its work is incomplete, so the states "
                "of this model can no longer be used: load the last checkpoint into a new model"
            ) from error

    def drain(self) -> None:
        """Return when all jobs so far are done; raise if one failed."""
        check_process(self._queue.process, self._queue.name)
        with self._queue.condition:
            self._queue.condition.wait_for(lambda: not self._queue.jobs and not self._queue.is_busy)
        self.check()


def _without_frames(error: BaseException) -> BaseException:
    """Turn the traceback into text: the thread keeps the error, and frames would let it keep the model."""
    cause: BaseException | None = error
    while cause is not None:
        if cause.__traceback__ is not None:
            cause.add_note("".join(traceback.format_tb(cause.__traceback__)).rstrip())
            cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__
    return error
