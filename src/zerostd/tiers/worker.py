"""A worker: one thread that does jobs beside everything else.

Of the jobs that wait, it takes one whose input has arrived, and of those the one that is needed first; if none has, the
one given first. So what is needed soonest overtakes, but never holds up what could be done meanwhile. Jobs of the same
place keep their order. A job may have several parts, in order: between two of them another job may overtake.

A job that fails stops the worker: what follows would build on what is not there. The failed job's `wait` raises its
error, and so does everything asked of the worker from then on.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from zerostd.errors import StorageError, ZerostdError
from zerostd.tiers.transfer import Done, Transfer, Work

__all__ = ["Worker"]


@dataclass(eq=False)
class _Job:
    parts: deque[Callable[[], None]]  # still to do
    place: int  # in the order in which they are needed
    ready: Transfer  # its input
    work: Work = field(default_factory=Work)


@dataclass(eq=False)
class _Jobs:
    """What a worker and its thread share. The thread holds no reference to the worker, so that it can end with it."""

    name: str
    waiting: list[_Job] = field(default_factory=list)  # as they were given
    condition: threading.Condition = field(default_factory=threading.Condition)
    is_busy: bool = False
    is_over: bool = False
    error: BaseException | None = None  # of the first job that failed

    def take(self) -> _Job:
        """The next job, whose first part is done next; the lock is held, and there is one."""
        arrived = [job for job in self.waiting if job.ready.has_arrived()]
        job = min(arrived, key=lambda job: job.place) if arrived else self.waiting[0]
        if len(job.parts) == 1 or self.error is not None:
            self.waiting.remove(job)
        return job

    def end(self) -> None:
        """Let the thread go when it has done what it does."""
        with self.condition:
            self.is_over = True
            self.condition.notify_all()

    def stop(self) -> None:
        """Return when the job that runs is done; those that wait are dropped, and no other will be taken."""
        self.end()
        with self.condition:
            self.waiting.clear()
            self.condition.wait_for(lambda: not self.is_busy)


class Worker:
    """Does jobs in the background. Ends with the object."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._jobs = _Jobs(name)
        threading.Thread(target=_serve, args=(self._jobs, device), daemon=True, name=name).start()
        weakref.finalize(self, self._jobs.end)
        self.stop: Callable[[], None] = self._jobs.stop  # holds no reference to the worker

    def submit(self, run: Callable[[], None], place: int = 0, ready: Transfer | None = None) -> Work:
        """Do `run`, for which `ready` should have arrived. Its Work is done when it has returned."""
        return self.submit_parts([run], place, ready)

    def submit_parts(self, parts: Iterable[Callable[[], None]], place: int = 0, ready: Transfer | None = None) -> Work:
        """Do one part after the other, at least one. The Work is done when the last has returned."""
        self.check()
        if self._jobs.is_over:
            raise StorageError(f"{self._jobs.name} has ended: its model was released")
        job = _Job(deque(parts), place, ready or Done())
        with self._jobs.condition:
            self._jobs.waiting.append(job)
            self._jobs.condition.notify_all()
        return job.work

    def check(self) -> None:
        """Raise if a job has failed."""
        error = self._jobs.error
        if error is not None:
            raise StorageError(
                f"{self._jobs.name} stopped: {type(error).__name__}: {error}. What it was doing is not complete, so "
                "this model's states cannot be used any more: load the last checkpoint into a new one"
            ) from error

    def drain(self) -> None:
        """Return when all jobs so far are done; raise if one failed."""
        with self._jobs.condition:
            self._jobs.condition.wait_for(lambda: not self._jobs.waiting and not self._jobs.is_busy)
        self.check()


def _serve(jobs: _Jobs, device: torch.device) -> None:
    if device.type != "cpu" and device.index is not None:
        torch.accelerator.set_device_index(device.index)
    torch.set_grad_enabled(False)
    while True:
        with jobs.condition:
            jobs.is_busy = False
            jobs.condition.notify_all()
            jobs.condition.wait_for(lambda: jobs.waiting or jobs.is_over)
            if jobs.is_over:
                return
            job = jobs.take()
            jobs.is_busy = True
        _do(job, jobs)
        del job


def _do(job: _Job, jobs: _Jobs) -> None:
    if jobs.error is None:
        try:
            job.parts.popleft()()
        except BaseException as error:
            jobs.error = _without_frames(error)
            with jobs.condition, contextlib.suppress(ValueError):  # its other parts are not to be done
                jobs.waiting.remove(job)
    if jobs.error is not None:
        job.work.fail(jobs.error if isinstance(jobs.error, ZerostdError) else _explained(jobs.name, jobs.error))
    elif not job.parts:
        job.work.finish()


def _explained(name: str, error: BaseException) -> StorageError:
    explained = StorageError(f"{name} failed: {type(error).__name__}: {error}")
    explained.__cause__ = error
    return explained


def _without_frames(error: BaseException) -> BaseException:
    """The traceback as text: the thread keeps the error, and frames would let it keep the model."""
    cause: BaseException | None = error
    while cause is not None:
        if cause.__traceback__ is not None:
            cause.add_note("".join(traceback.format_tb(cause.__traceback__)).rstrip())
            cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__
    return error
