"""Turns: one thread at a time uses a prepared model, and no signal cuts a change of its state in half.

    take, give              a forward has the turn from its first hook to its last; those of other threads wait for it
    begin_pass, end_pass    until a backward pass has ended, other threads are refused
    with turn:              a section: code that changes state. It has the turn, and signals wait until it ends

Python runs signal handlers between any two instructions of the main thread, and a handler may raise: Ctrl-C does. In a
section the handler is put off to its end. A second signal of the same kind is not put off, so an endless wait can be
left; the model is unusable then. A forward that ends with an exception of which torch does not tell hooks, such as
KeyboardInterrupt, never gives its turn back. So a waiting thread checks whether that forward still runs.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import nn

from zerostd.compat import calls_of, in_backward, python_thread
from zerostd.errors import MisuseError
from zerostd.tiers.worker import check_process

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2)
LOOK_S = 0.1  # how often a waiting thread looks whether the forward that it waits for still runs


class SignalDeferral:
    """Puts the handlers of signals off while a section runs. It is armed from the first section of a pass to its end;
    outside of sections an armed handler calls the user's at once."""

    def __init__(self) -> None:
        self.depth = 0  # sections that the main thread is in
        self._is_armed = False
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}  # the user's
        self._pending: list[int] = []

    def enter(self) -> None:
        """Begin a section of the main thread. Either it has begun, or a signal's exception is raised."""
        if not self._is_armed:
            self.arm()
        self.depth += 1

    def leave(self, *, is_last: bool) -> None:
        """End a section, the last one of a pass or not; then call the handlers that were put off."""
        self.depth = max(0, self.depth - 1)
        if self.depth:
            return
        if is_last:
            self.disarm()
        while self._pending:
            signum = self._pending.pop(0)
            self._handlers[signum](signum, sys._getframe())

    def arm(self) -> None:
        """Stand before the handlers of the user that are Python functions."""
        for signum in SIGNALS:
            handler = signal.getsignal(signum)
            if callable(handler) and handler != self._on_signal:
                self._handlers[signum] = handler
                signal.signal(signum, self._on_signal)
        self._is_armed = True

    def disarm(self) -> None:
        """Leave the handlers as they were; one that the user has set meanwhile stays."""
        self._is_armed = False
        for signum, handler in self._handlers.items():
            if signal.getsignal(signum) == self._on_signal:
                signal.signal(signum, handler)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self.depth and signum not in self._pending:
            self._pending.append(signum)
            return
        if self.depth:
            self.depth = 0
            self._pending.clear()
        self._handlers[signum](signum, frame)


_DEFERRAL = SignalDeferral()  # signals belong to the process


class Turn:
    """The right to use one prepared model."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._condition = threading.Condition()
        self._holder: int | None = None  # the thread that has the turn
        self._depth = 0  # how often it has taken it
        self._module: nn.Module | None = None  # whose forward took it; None: a section did, which always gives it back
        self._trainer: threading.Thread | None = None  # whose backward pass runs, or ran into an exception
        self._is_broken = False  # a signal cut a section in half
        self.refusal: str | None = None  # why nobody gets the turn: the model sleeps

    @property
    def is_mine(self) -> bool:
        """Whether this thread may use the model now. Threads of autograd act for the one that called backward."""
        return self._holder == threading.get_ident() or in_backward()

    def take(self, module: nn.Module | None = None) -> None:
        """Return when this thread has the turn, for a forward of `module`; None: for a section."""
        self.check_awake()
        if self._holder == threading.get_ident():
            self._depth += 1
            self._module = self._module or module
            return
        if in_backward():
            return
        self.check_process()
        with self._condition:
            self._wait_for_others(refuses=module is None)
            if self._trainer not in (None, threading.current_thread()):
                self._refuse_if_alive("this call")
            self._module = module
            self._depth = 1
            self._holder = threading.get_ident()

    def check_awake(self) -> None:
        """Refuse the use of a model that sleeps."""
        if self.refusal is not None:
            raise MisuseError(self.refusal)

    def check_process(self) -> None:
        """Refuse the use of the model in a forked child."""
        check_process(self._process, "a prepared model")

    def _wait_for_others(self, *, refuses: bool) -> None:
        """Wait until the turn is free. A forward may itself wait for this thread: a part of it is refused."""
        while self._holder is not None:
            if refuses and self._module is not None and self._is_running():
                raise MisuseError(
                    f"thread {threading.current_thread().name!r} uses a part of a prepared model while a forward of it "
                    "runs in another thread: call the whole model, which waits for its turn, or wait until the other "
                    "thread is done"
                )
            if not self._condition.wait(LOOK_S) and not self._is_running():
                return

    def give(self) -> None:
        """Give the turn back, as often as it was taken."""
        if self._holder != threading.get_ident():
            return
        self._depth -= 1
        if self._depth == 0:
            with self._condition:
                self._holder = None
                self._module = None
                self._condition.notify_all()

    def restart(self, module: nn.Module) -> None:
        """Forget what took the turn before a forward of `module` and the section that runs now: it has ended without
        giving it back."""
        self._depth = 2
        self._module = module

    def begin_pass(self, trainer: threading.Thread | None) -> None:
        """Begin a backward pass of the thread that ran its forward. None: not known. It is taken for this thread's,
        or, in one of autograd's own threads, for that of the first thread that claims it."""
        with self._condition:
            if trainer is not None and self._holder != trainer.ident:
                self._wait_for_others(refuses=False)
            self._trainer = trainer or python_thread()

    def claim_pass(self, trainer: threading.Thread) -> None:
        """Take the pass that runs for that of a thread, or refuse it: a pass of another one runs."""
        self.check_trainer(trainer)
        self._trainer = trainer

    def check_trainer(self, trainer: threading.Thread) -> None:
        """Refuse a backward pass of one thread inside that of another."""
        if self._trainer not in (None, trainer):
            self._refuse_if_alive("another backward pass")

    def end_pass(self) -> None:
        """End a backward pass, or forget one that ended with an exception."""
        self._trainer = None

    def _refuse_if_alive(self, call: str) -> None:
        assert self._trainer is not None
        if self._trainer.is_alive():
            raise MisuseError(
                f"a backward pass of the model runs in thread {self._trainer.name!r}, or failed there, and {call} "
                f"comes from thread {threading.current_thread().name!r}: let one thread train the model, and others "
                "use it only between its steps, for instance under a lock"
            )
        self._trainer = None

    def _is_running(self) -> bool:
        """Return whether the forward that has the turn is still on the stack of its thread."""
        frame = sys._current_frames().get(self._holder or 0)
        return frame is not None and (self._module is None or calls_of(self._module, frame) > 0)

    def __enter__(self) -> None:
        is_deferring = _in_main_thread()
        if is_deferring:
            _DEFERRAL.enter()
        try:
            if self._is_broken:
                raise MisuseError(
                    "a second signal interrupted a change of this model's state, which is incomplete: load the last "
                    "checkpoint into a newly prepared model"
                )
            self.take()
        except BaseException:
            if is_deferring:
                _DEFERRAL.leave(is_last=False)
            raise

    def __exit__(self, *raised: object) -> None:
        if not _in_main_thread():
            self.give()
            return
        self._is_broken |= _DEFERRAL.depth == 0
        self.give()
        _DEFERRAL.leave(is_last=self._holder is None and self._trainer is None)


def _in_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident
