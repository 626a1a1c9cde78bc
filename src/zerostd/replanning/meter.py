"""The meter: how many bytes of the device are allocated, and how many there are.

An accelerator has torch's statistics. A CPU has no allocator to ask: there the ledger knows model state, and
activations are those that were counted.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping

import torch

from zerostd.engine.runtime import Runtime
from zerostd.measuring.identity import free_bytes
from zerostd.monitoring.texts import size_text
from zerostd.planning import ModelProfile, Plan
from zerostd.planning.demands import NUM_BUFFERS
from zerostd.policy import Tier, Way, parse_bytes
from zerostd.preparing.budgets import MARGIN
from zerostd.replanning.trials import is_same

HARDLY = 1.01  # times a peak: steps of one plan differ by as much
SURPLUS = 1.25  # times the most bytes that were allocated at once


class DeviceMeter:
    """Reads the device's memory for one prepared model."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._device = runtime.world.device
        self._ledger = runtime.ledger
        self._activations = runtime.backward.activations
        self.has_allocator = self._device.type != "cpu"
        self._num_short = self._read_num_short()
        budget = runtime.settings.budget.device
        self._budget = None if budget is None else parse_bytes(budget)
        self._pass_bytes = 0  # of passes that `note_pass` was told of, since `reset`
        self.grown_bytes = 0  # of the model, in a first pass: its gradients
        self._held_before = 0  # bytes of the model, before the pass that `begin_pass` was told of
        self._part_before: float | None = None  # of the device, that torch's allocator might use before `cap`
        self._most_read = 0  # bytes that were allocated at once, when the allocator was last asked
        self._most_noted = 0  # the same while the model was watched
        self._beside = 0  # the most of them that were not the model's
        self._accepted: tuple[Plan | None, int] = (None, 0)  # a plan, and the peak that it has for no known reason

    def now(self) -> int:
        """Return the bytes that are allocated now."""
        return (
            torch.accelerator.memory_allocated(self._device) if self.has_allocator else self._ledger.held[Tier.DEVICE]
        )

    def peak(self) -> int:
        """Return the most that were allocated at once since `reset`. A loop may reset torch's peak too: then it is the
        most that was seen of it."""
        if self.has_allocator:
            self._most_read = max(self._most_read, torch.accelerator.max_memory_allocated(self._device))
            return self._most_read
        return self._ledger.most[Tier.DEVICE] + self._activations.counted().total

    def reset(self) -> None:
        """Measure the peak from here on."""
        if self.has_allocator:
            torch.accelerator.reset_peak_memory_stats(self._device)
        self._ledger.most[Tier.DEVICE] = self._ledger.held[Tier.DEVICE]
        self._pass_bytes = 0
        self._most_read = 0
        self._most_noted = 0
        self._beside = 0

    def begin_pass(self) -> None:
        """Remember what the model holds before a pass."""
        self._held_before = self._ledger.held[Tier.DEVICE]

    def note_pass(self, *, is_first: bool) -> None:
        """Read the peak of a pass, before a loop resets torch's. Of a first pass remember what it took, before a step
        makes states. Gradients that came during the pass count too, because they may have been there at its peak."""
        if is_first:
            self.grown_bytes = max(self.grown_bytes, self._ledger.held[Tier.DEVICE] - self._held_before)
            self._pass_bytes = max(self._pass_bytes, self.peak() - self._held_before)
        elif self.has_allocator:
            self.peak()

    def shortage(self) -> str:
        """Return what the device lacked since `reset`; empty: nothing. The allocator had to free its cache to find
        memory, or failed, or the peak passed the user's limit."""
        before = self._num_short
        self._num_short = self._read_num_short()
        if self._num_short > before:
            return "the device ran out of memory"
        plan, most = self._accepted
        present = self._runtime.settings.plan
        most = most if plan is not None and present is not None and is_same(plan, present) else 0
        if self._budget is not None and self.peak() > max(self._budget, most):
            return f"the device held {size_text(self.peak())}, more than its budget of {size_text(self._budget)}"
        return ""

    def accept_peak(self) -> None:
        """Do not report this peak again while the plan stays, or one that is hardly higher. Measure from here on."""
        self._accepted = (self._runtime.settings.plan, int(HARDLY * self.peak()))
        self.reset()

    def missing(self, otherwise: float) -> float:
        """Return the bytes by which the peak passed the user's limit; if it did not, `otherwise`."""
        passed = 0 if self._budget is None else self.peak() - self._budget
        return passed if passed > 0 else otherwise

    def cap(self, *, is_on: bool) -> None:
        """Let torch's allocator refuse bytes above the user's limit in a first pass. The cap counts cached blocks too,
        so it is lifted for later passes, whose peaks are known."""
        if self._budget is None or self._device.type != "cuda" or is_on == (self._part_before is not None):
            return
        part = self._part_before
        if is_on:
            gc.collect()  # an earlier model may not have gone yet, and its bytes count
            self._part_before = torch.cuda.get_per_process_memory_fraction(self._device)
            part = min(self._part_before, self._budget / torch.cuda.mem_get_info(self._device)[1])
        else:
            self._part_before = None
        assert part is not None
        self.give_cache_back()
        torch.cuda.set_per_process_memory_fraction(part, self._device)
        self._num_short = self._read_num_short()  # the cap made the allocator search

    def _read_num_short(self) -> int:
        module = torch.get_device_module(self._device) if self.has_allocator else None
        if module is None or not hasattr(module, "memory_stats"):
            return 0
        stats = module.memory_stats(self._device)
        return int(stats.get("num_alloc_retries", 0)) + int(stats.get("num_ooms", 0))

    def give_cache_back(self) -> None:
        """Give torch's cached memory back to the device."""
        if self.has_allocator:
            torch.accelerator.empty_cache()

    def give_surplus_back(self) -> None:
        """Give cached memory back if it is much more than is used at once. The next step allocates again what it
        needs, which delays that step."""
        if self.has_allocator and torch.accelerator.memory_reserved(self._device) > SURPLUS * self.peak():
            self.give_cache_back()

    def room(self) -> dict[Tier, int]:
        """Return the bytes of this model plus the free ones. If the device is the CPU, its memory is the host's."""
        free = free_bytes(self._device, None)
        room = {Tier.HOST: self._ledger.held[Tier.HOST] + free["host"] // self._runtime.world.local_size}
        if self.has_allocator:
            room[Tier.DEVICE] = free["device"] + self.now()
        return room

    def room_now(self) -> int:
        """Return the bytes of the device that may still be taken at this moment."""
        limit = self._budget if self._budget is not None or not self.has_allocator else self.room()[Tier.DEVICE]
        return sys.maxsize if limit is None else max(0, limit - self.now())

    def limits(self, room: Mapping[Tier, int] | None = None) -> dict[Tier, int]:
        """Return the bytes to plan with: those of the budget, or the available ones less a margin. Bytes of the device
        outside the model, such as the user's own tensors, are left out."""
        settings = self._runtime.settings
        assert settings.plan is not None
        limits = dict(settings.plan.limits)
        for tier, size in (self.room() if room is None else room).items():
            if tier is Tier.DEVICE and settings.budget.device is None:
                limits[tier] = size
            limits[tier] = min(limits.get(tier, 0), int((1 - MARGIN) * size))
        return limits

    def needs(self, tier: Tier) -> int:
        """Return the bytes planned for a tier or held there; on an accelerator also those that are not the model's.
        Gradients have no memory between steps, so the held bytes alone are too few."""
        plan = self._runtime.settings.plan
        held = self._ledger.held[tier]
        others = self.now() - held if tier is Tier.DEVICE else 0
        return others + max(held, 0 if plan is None else plan.predicted.total(tier))

    def watch_model(self, *, is_on: bool) -> None:
        """Begin or end watching the model's bytes on the device, to tell them from activations at a peak. Beginning
        resets the meter. While the model is watched, each change of its bytes asks the allocator for its peak."""
        watchers = self._ledger.watchers
        if self._note in watchers:
            self._note(Tier.DEVICE)
            watchers.remove(self._note)
        if is_on:
            self.reset()
            watchers += [self._note] * self.has_allocator

    def _note(self, tier: Tier) -> None:
        """Note a new peak, before the bytes of a tier change."""
        peak = self.peak() if tier is Tier.DEVICE else 0
        if peak > self._most_noted:
            self._most_noted = peak
            self._beside = max(self._beside, peak - self._ledger.held[Tier.DEVICE])

    def late_bytes(self) -> int:
        """Return how many bytes of activations the peak does not show, in the steps that were watched. Activations are
        largest before all gradients have come, so as many bytes of the model are not on the device at that moment."""
        return max(0, self._beside - max(0, self.peak() - self._ledger.most[Tier.DEVICE]))

    def activation_bytes(self) -> int | None:
        """Return the most bytes held besides model state since `reset`; None if only counts are known."""
        if not self.has_allocator:
            return None
        return max(0, self._pass_bytes, self.peak() - self._ledger.most[Tier.DEVICE])

    def activations_of(self, plan: Plan, profile: ModelProfile) -> int:
        """Return the bytes of activations under a plan: those that groups keep, from a counted profile, plus the
        working memory of a pass."""
        left = 0.0
        inside = 0.0  # of a group that is recomputed
        leaving = 0.0  # of a group whose activations, or inputs, go to the host
        for group in profile.groups:
            way = Way(plan.activations_of(group.name) or Way.DEVICE)
            is_recomputed = way.recomputes and group.boundary_bytes < group.kept_bytes
            size = group.boundary_bytes if is_recomputed else group.kept_bytes
            if way.tier is Tier.DEVICE:
                left += size
            else:
                leaving = max(leaving, size)
            inside = max(inside, group.kept_bytes if is_recomputed else 0.0)
        seen = self._activations.counted()
        beside: float = (self.activation_bytes() or 0) - seen.left  # in the passes that were seen,
        beside -= NUM_BUFFERS * min(leaving, seen.leaving)  # with what was on its way to the host
        return int(left + NUM_BUFFERS * leaving + max(inside, beside))
