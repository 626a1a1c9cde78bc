"""The loop of a parameter server: an ordinary rank at stage 3 whose gradients come from the workers, and whose new
parameters go there. What a worker asks for (calls.py) is a method of `Server`, with its arguments.

    PUSH   tiles of one flat from all workers -> summed in the order of ranks -> where its gradient is kept
    STEP   update group by group; each group's new parameters leave while the next is updated
    CALL   a checkpoint, or the whole model; the answer goes to all workers
    END    of all workers: the server is done
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zerostd.checkpointing.full_state import full_state
from zerostd.checkpointing.loading import load_checkpoint
from zerostd.checkpointing.saving import save_checkpoint
from zerostd.checkpointing.storage.remote import AnyPath
from zerostd.communication.link import PARAMETERS, Message
from zerostd.communication.servers import GradientSums
from zerostd.communication.world import thread_budget
from zerostd.compat import no_torch_function
from zerostd.engine.runtime import Runtime
from zerostd.errors import ZerostdError
from zerostd.optimizers.elementwise import written_options
from zerostd.optimizers.optimizer import ZeroOptimizer
from zerostd.optimizers.spans import snapshot
from zerostd.parameters import Flat
from zerostd.parameters.blueprints import buffers_of
from zerostd.parameters.prepared import GRAD


class Server:
    """Serves the workers of one prepared model until they have ended."""

    def __init__(self, runtime: Runtime, optimizer: ZeroOptimizer) -> None:
        assert runtime.world.link is not None
        self.runtime = runtime
        self.optimizer = optimizer
        self.link = runtime.world.link
        self.groups = {flat: group for group in runtime.groups for flat in group.flats}
        self.flats = runtime.trained_flats
        factor = 1.0 if runtime.settings.reduce == "sum" else 1.0 / self.link.num_workers
        num_threads = thread_budget(runtime.world.local_size)
        self._sums = GradientSums(self.link, runtime.ledger, num_threads, factor=factor)
        self._written = written_options(optimizer.inner)  # by the optimizer: the workers' are not up to date

    def serve(self) -> None:
        """Return when all workers have ended. Raises CommunicationError with the rank that is gone, if one is."""
        while True:
            message, number = self.link.next_message()
            if message is Message.PUSH:
                self._land(self.flats[number])
            elif message is Message.STEP:
                self.link.request()(self)
            elif message is Message.CALL:
                self._answer(self.link.request())
            else:
                return

    @torch.no_grad()
    def _land(self, flat: Flat) -> None:
        gradient = flat.gradient
        assert gradient is not None
        self.runtime.gatherer.wait_updates(self.groups[flat])  # the last one reads what is overwritten now
        gradient.prepare_landing([False] * len(flat.parameters))
        target = gradient.open_landing(accumulate=False)
        self._sums.land(target, gradient.dtype, flat.layout.intervals[0].name)
        gradient.close_landing(target)

    def _answer(self, request: Callable[[Server], None]) -> None:
        """Do what the workers ask for, which answers them. Errors are sent to the workers."""
        try:
            request(self)
        except ZerostdError as error:
            self.link.answer(error)

    def step(self, options: list[dict[str, Any]], used: list[bool], order: list[int]) -> None:
        """Take a step with the workers' options. `used` says which parameters have a gradient; the new parameters leave
        in the `order` of flats."""
        for mine, theirs in zip(self.optimizer.param_groups, options, strict=True):
            mine.update({name: value for name, value in theirs.items() if name not in self._written})
        with no_torch_function():
            for parameter, is_used in zip(self.runtime.backward.trained, used, strict=True):
                GRAD.__set__(parameter.parameter, parameter.handle if is_used else None)
        self.runtime.backward.num_gradients = sum(used)
        self.optimizer.step()
        self._send([self.flats[number] for number in order])
        self.optimizer.zero_grad()

    def _send(self, flats: list[Flat]) -> None:
        """Send this server's slices to all workers, each when its update is done."""
        numbers = {flat: number for number, flat in enumerate(self.flats)}
        under_way = []  # with what is read: it must stay until it is sent
        for flat in flats:
            self.runtime.gatherer.wait_updates(self.groups[flat])
            values = flat.rest.read(slice(0, flat.rest.numel))
            self.runtime.ledger.sent["gather"] += values.nbytes * self.link.num_workers
            for worker in self.link.workers:
                under_way.append((values, self.link.send(values, worker, PARAMETERS + numbers[flat])))
        for _, works in under_way:
            self.link.wait(works, "the transfer of new parameters to the workers")

    def save(
        self,
        path: AnyPath,
        extra: Any,
        keep: int | None,
        *,
        frozen: bool,
        has_optimizer: bool,
        buffers: dict[str, torch.Tensor],
    ) -> None:
        """Write a checkpoint, with the buffers of the first worker."""
        for name, buffer in buffers_of(self.runtime.model).items():
            buffer.copy_(buffers[name])
        optimizer = self.optimizer if has_optimizer else None
        save_checkpoint(self.runtime, optimizer, path, extra, keep, frozen=frozen, wait=True)
        self.link.answer(None)

    def load(self, path: AnyPath, *, has_optimizer: bool) -> None:
        """Load a checkpoint; answer with what the workers keep, and send all parameters."""
        extra = load_checkpoint(self.runtime, self.optimizer if has_optimizer else None, path)
        options = snapshot(self.optimizer.param_groups)
        self.link.answer((extra, buffers_of(self.runtime.model), options, self.runtime.backward.passes.num_steps))
        self._send(self.flats)

    def state(self) -> None:
        """Answer with the whole model."""
        self.link.answer(full_state(self.runtime, 0))
