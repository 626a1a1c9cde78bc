"""A worker: one thread that does jobs in the order they were given, beside everything else.

A job that fails stops the worker: what follows would build on what is not there. The failed job's `wait` raises its
error, and so does everything asked of the worker from then on.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable

import torch

from zerostd.errors import StorageError, ZerostdError
from zerostd.tiers.transfer import Work

__all__ = ["Worker"]

Item = tuple[Callable[[], None], Work] | None


class Worker:
    """Does jobs in the background. Ends with the object."""

    name: str
    error: BaseException | None  # of the first job that failed

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self.error = None
        self._jobs: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._last = Work(0)
        self._last._done.set()
        threading.Thread(target=_serve, args=(weakref.ref(self), self._jobs, device), daemon=True, name=name).start()
        weakref.finalize(self, self._jobs.put, None)

    def submit(self, job: Callable[[], None]) -> Work:
        """Do `job` after those before it. Its Work is done when it has returned."""
        self.check()
        work = self._last = Work()
        self._jobs.put((job, work))
        return work

    def check(self) -> None:
        """Raise if a job has failed."""
        if self.error is not None:
            raise StorageError(
                f"{self.name} stopped: {type(self.error).__name__}: {self.error}. What it was doing is not complete, "
                "so this model's states cannot be used any more: load the last checkpoint into a new one"
            ) from self.error

    def drain(self) -> None:
        """Return when all jobs so far are done; raise if one failed."""
        self._last.wait()
        self.check()


def _serve(worker: weakref.ref[Worker], jobs: queue.SimpleQueue[Item], device: torch.device) -> None:
    if device.type != "cpu" and device.index is not None:
        torch.accelerator.set_device_index(device.index)
    torch.set_grad_enabled(False)
    while (item := jobs.get()) is not None:
        job, work = item
        owner = worker()
        if owner is None:
            return
        try:
            if owner.error is not None:
                raise owner.error
            job()
        except BaseException as error:
            owner.error = owner.error or error
            work.fail(error if isinstance(error, ZerostdError) else _explained(owner.name, error))
        else:
            work.finish()
        del owner, job, work, item


def _explained(name: str, error: BaseException) -> StorageError:
    explained = StorageError(f"{name} failed: {type(error).__name__}: {error}")
    explained.__cause__ = error
    return explained
