"""A group: parameters that are gathered, released, reduced and updated together.

Hooks, the gatherer, the optimizer and checkpoints decide when to call its methods; how they work is decided here. The
states and the only moves between them:

    RELEASED --start_gather--> GATHERING --wait_gather--> GATHERED --release--> RELEASED
    GATHERED --hide--> RELEASED --show--> GATHERED while a model sleeps
    GATHERED --expire--> RELEASED where ranks update slices of it, GATHERING where updates alone bring the new values
"""

from __future__ import annotations

import contextlib
import enum
import functools
import weakref
from collections.abc import Iterator, Sequence

import torch

from zerostd.communication import Wires
from zerostd.errors import MisuseError
from zerostd.monitoring.events import Span
from zerostd.parameters.blueprints import Blueprint
from zerostd.parameters.flat import Flat
from zerostd.tiers import Done, Transfer, Uploader


class GroupState(enum.Enum):
    """States of a group by the memory that it holds."""

    RELEASED = "this rank's shards; parameters show NaN"
    GATHERING = "shards, and buffers that are being filled"
    GATHERED = "shards, and all parameters on the device (nothing extra where they are not sharded)"


class Group:
    """The flat buffers of one group, and everything that is in flight for them."""

    def __init__(
        self, blueprint: Blueprint, place: int, flats: Sequence[Flat], wires: Wires, uploader: Uploader
    ) -> None:
        self.blueprint = blueprint  # what it was made from
        self.flats = tuple(flats)
        self.place = place  # in the order in which forward needs groups, as far as known
        self.gathered_bytes = sum(flat.full.nbytes for flat in self.flats if flat.gives_back)  # that a gather allocates
        self.state = GroupState.GATHERED
        self.gathers: list[Transfer] = []  # in flight, one for each flat
        self.updates: list[Transfer] = []  # that were started; the next gather waits for them
        self.num_pins = 0  # users that hold its values
        self.borrowed: dict[str, Group] = {}  # other groups whose parameters its modules read, learnt as they do
        self.in_backward = False  # its backward has begun and still needs it, whatever forward ends in between
        self._wires = wires
        self._uploader = uploader
        self._span: Span | None = None  # of the gather in flight, while events are recorded
        self._has_inputs = False  # whether inputs of a forward get gradients
        self._awaited: weakref.WeakSet[object] = weakref.WeakSet()  # forwards that backward has not passed
        if self.gives_back:
            self.release()

    @property
    def name(self) -> str:
        return self.blueprint.name

    @functools.cached_property
    def trainable(self) -> list[Flat]:
        """Its flats that have gradients; hooks ask often."""
        return [flat for flat in self.flats if flat.gradient is not None]

    @functools.cached_property
    def gives_back(self) -> bool:
        """Whether releasing gives memory back: parameters never move to another tier."""
        return any(flat.gives_back for flat in self.flats)

    @property
    def is_updated_later(self) -> bool:
        """Whether its updates continue after the step has returned."""
        return any(not shard.is_resident for flat in self.flats for shard in flat.state_shards)

    @property
    def ends_in_backward(self) -> bool:
        """Whether the group is released or updated, or its gradient freed, when backward no longer needs it."""
        frees = any(flat.gradient is not None and not flat.gradient.is_kept for flat in self.flats)
        return frees or self.gives_back or self.is_updated_later

    @functools.cached_property
    def is_in_slices(self) -> bool:
        """Whether ranks update different slices of the group, so that it must be gathered after an update."""
        return any(flat.region.stop - flat.region.start < flat.layout.numel for flat in self.trainable)

    @property
    def needed(self) -> tuple[Group, ...]:
        """The groups its modules need: itself, and those whose parameters they read."""
        return (self, *self.borrowed.values())

    @property
    def gather_name(self) -> str:
        """The name of its gather in errors. The name says if the gather is inside the node: if one rank alone wrote to
        parameters, it is in another gather than its peers."""
        is_inside = bool(self.flats) and all(flat.secondary and flat.secondary.is_current for flat in self.flats)
        return f"the gather of group {self.name!r}{' inside the node' if is_inside else ''}"

    # Gather and release

    def start_gather(self, *, at_once: bool = False) -> None:
        """Start filling the buffers of a released group, when its updates are done. If the device has no memory for
        them it takes none. With `at_once`, nothing else uses the link; see `Uploader.upload`."""
        assert self.state is GroupState.RELEASED, f"group {self.name!r} is {self.state.name}: it cannot be gathered"
        self.wait_updates()
        world = self._wires.world
        ledger = self._wires.ledger
        ledger.work_on(self.name)
        if ledger.events.is_on and world.num_shards > 1:
            self._span = ledger.events.begin("gather", "wire", self.name, self._full_bytes, device=world.device)
        try:
            for flat in self.flats:
                flat.allocate()
                if flat.secondary is not None:
                    flat.secondary.await_values()
        except torch.OutOfMemoryError:
            for flat in self.flats:
                flat.free()
            self._span = None
            raise
        self.gathers = [
            self._gather(flat, flat.full, to_compute=flat.is_sharded, at_once=at_once) for flat in self.flats
        ]
        self.state = GroupState.GATHERING

    def _gather(self, flat: Flat, full: torch.Tensor, *, to_compute: bool, at_once: bool = False) -> Transfer:
        """Bring this rank's part of a flat to the device, and from there to all ranks. Values for computing may be
        rounded on the way, and may come from secondary shards."""
        if to_compute and flat.secondary is not None and flat.secondary.is_current:
            return flat.secondary.gather(full)
        world = self._wires.world
        if world.is_worker:  # the servers have what trains
            return Done() if flat.gradient is None else self._wires.gather(full)
        if world.num_shards == 1:
            return self._uploader.upload(flat.rest, full, self.name, at_once=at_once)
        mine = flat.rest.tensor if flat.is_sharded else full[flat.layout.shard(world.shard_rank)]
        if mine is None or mine.device != full.device:
            mine = full[flat.layout.shard(world.shard_rank)] if flat.is_sharded else full
            self._uploader.upload(flat.rest, mine, self.name).wait()
        return self._wires.gather_weights(full, mine) if to_compute else self._wires.gather(full, mine)

    def copy(self) -> dict[Flat, torch.Tensor]:
        """Return the values of a group that is kept elsewhere, in new memory. Every rank must call it."""
        self.wait_updates()
        copies = {flat: torch.empty_like(flat.full) for flat in self.flats}
        for transfer in [self._gather(flat, full, to_compute=False) for flat, full in copies.items()]:
            transfer.wait()
        return copies

    def keep_edits(self) -> None:
        """Keep what the user wrote in place to parameters that show their values, before their memory is freed."""
        for flat in self.flats:
            if flat.has_edits:
                self.check_exact(flat)
                flat.keep_all(flat.full)

    def commit_edits(self) -> None:
        """Let masters follow what the user wrote to parameters."""
        for flat in self.flats:
            if flat.awaits_commit:
                if flat.has_edits:
                    self.check_exact(flat)
                flat.commit_edits()

    def check_exact(self, flat: Flat) -> None:
        """Refuse an edit of values that were rounded on the wire: it would make the other rounded values permanent."""
        if self.state is GroupState.GATHERED and flat.is_sharded and self._wires.rounds_weights:
            raise MisuseError(
                f"{flat.layout.intervals[0].name!r} or a parameter of its group was changed inside forward, where "
                "Placement(codec={'gather': ...}) shows rounded values: change it outside, or inside "
                "zerostd.gathered(module, write=True)"
            )

    def wait_gather(self) -> None:
        """Wait until a gather has ended and its updates are done; parameters show their values from then on."""
        assert self.state is GroupState.GATHERING, f"group {self.name!r} is {self.state.name}: nothing to wait for"
        self.wait_updates()
        for gather in self.gathers:
            gather.wait()
        self.gathers = []
        self._wires.ledger.events.end(self._span, self._wires.world.device)
        self._span = None
        for flat in self.flats:
            if flat.secondary is not None:
                flat.secondary.keep(flat.full)
        self.show_values()
        self.state = GroupState.GATHERED

    def show_values(self) -> None:
        """Let parameters show what the gathered buffers hold."""
        for flat in self.flats:
            flat.show_values()

    def release(self) -> None:
        """Give the memory of a gathered group back; its parameters show NaN."""
        assert self.state is GroupState.GATHERED, f"group {self.name!r} is {self.state.name}: it cannot be released"
        assert self.is_releasable, f"group {self.name!r} has nothing to give back"
        ledger = self._wires.ledger
        ledger.work_on(self.name)
        if ledger.events.is_on:
            device = self._wires.world.device
            span = ledger.events.begin("release", "compute", self.name, self._full_bytes, device=device)
            ledger.events.end(span, device)
        self.keep_edits()
        for flat in self.flats:
            flat.show_nan()
            flat.free()
        self.state = GroupState.RELEASED

    @property
    def is_releasable(self) -> bool:
        """Whether there is memory to give back."""
        return self.gives_back and self.state is not GroupState.RELEASED

    def drop_secondary(self) -> None:
        """Give back the secondary shards of parameters that train: an update begins. Those of frozen ones stay."""
        for gather in self.gathers:  # it may read them
            gather.wait()
        for flat in self.trainable:
            if flat.secondary is not None:
                flat.secondary.give_back()

    def expire(self) -> None:
        """Let parameters show NaN until the values that an update is writing are here. For groups that stay on the
        device: if ranks update slices, the group is gathered again; otherwise it waits for updates."""
        assert not self.gives_back and not self.gathers, f"group {self.name!r} is released instead, or is in flight"
        for flat in self.flats:
            flat.show_nan()
        self.state = GroupState.RELEASED if self.is_in_slices else GroupState.GATHERING

    def hide(self) -> None:
        """Let parameters show NaN while others use their memory. Backward through an older graph then fails."""
        for flat in self.flats:
            flat.show_nan()
            flat.mark_updated()
        self.state = GroupState.RELEASED

    def show(self) -> None:
        """Let parameters show their values again, after `hide`; those that are kept elsewhere stay released."""
        if not self.gives_back:
            self.show_values()
            self.state = GroupState.GATHERED

    @contextlib.contextmanager
    def pinned(self) -> Iterator[None]:
        """Note that the group's values are held inside the context: it cannot be updated there."""
        self.num_pins += 1
        try:
            yield
        finally:
            self.num_pins -= 1

    def add_update(self, update: Transfer) -> None:
        """Note an update of its parameters that was started: the next gather waits for it."""
        self.updates.append(update)

    def wait_updates(self) -> None:
        """Wait until its parameters are updated."""
        for update in self.updates:
            update.wait()
        self.updates.clear()

    def add_reader(self, reader: Transfer) -> None:
        """Keep values and states as they are until `reader` is done with them: a checkpoint, or an average."""
        for flat in self.flats:
            flat.readers.append(reader)

    def wait_readers(self) -> None:
        """Wait until all reads of values and states have ended."""
        for flat in self.flats:
            flat.wait_readers()

    @property
    def _full_bytes(self) -> int:
        return sum(flat.full.nbytes for flat in self.flats)

    # Its part in forward and backward

    def begin_backward(self) -> None:
        """Note that its backward has begun: it stays gathered until `end_backward`, whatever forward ends."""
        self.in_backward = True

    def end_backward(self) -> None:
        """Note that backward has finished with the group."""
        self.in_backward = False

    def await_inputs(self, forward: object) -> None:
        """Note a forward whose inputs will get gradients; backward has passed it when they have them. Hooks on its
        inputs keep the noted forward alive, until their graph is freed."""
        self._has_inputs = True
        self._awaited.add(forward)

    def inputs_arrived(self, forward: object) -> None:
        """Note that the gradients of one forward's inputs are known."""
        self._awaited.discard(forward)

    @property
    def is_passed(self) -> bool:
        """Whether backward has passed all forwards of the group. False if inputs get no gradient."""
        return self._has_inputs and not self._awaited

    def end_pass(self, *, is_backward: bool) -> None:
        """Forget what a pass has noted. Forwards are awaited until a backward has ended."""
        self.in_backward = False
        if is_backward:
            self._has_inputs = False
            self._awaited.clear()
