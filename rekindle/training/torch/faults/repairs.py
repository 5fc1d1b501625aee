"""Repair a rank after its generation broke: device, buffers, and the list of clean updates."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rekindle.errors import StaleError
from rekindle.protocol.heartbeat_page import HeartbeatPage
from rekindle.rank.held_state import CurrentStep
from rekindle.rank.member import UnusableError, chain_of, text_of
from rekindle.recovery.faults.fault import FaultKind
from rekindle.training.devices import Damage, device_for
from rekindle.training.torch import private
from rekindle.training.torch.groups.generation_group import Group
from rekindle.training.torch.state.capture import capture
from rekindle.training.torch.state.transfer import wire_device


class BufferGuard:
    """Keeps a copy of a module's buffers that change.

    It copies constant buffers (masks, tables) once: their version counters never change. It copies
    the buffers of normalisations each time, because torch's kernels write them without counting. It
    copies all buffers on a device each time, because the replay of a CUDA graph does not count.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._places: list[tuple[dict[str, torch.Tensor | None], str, bool]] = []
        self._kept: list[_Kept | None] = []

    def look(self) -> None:
        """Find the module's buffers; once per generation, because it visits all modules."""
        self._places = [
            (private.buffers_of(part), name, isinstance(part, private.NormBase))
            for part in self._module.modules()
            for name in private.buffers_of(part)
        ]
        self._kept = [None] * len(self._places)

    def keep(self) -> None:
        """Keep the buffers' current values."""
        changed: list[_Kept] = []
        for index, (place, name, uncounted) in enumerate(self._places):
            buffer, kept = place[name], self._kept[index]
            if buffer is None:
                continue
            if kept is None or buffer is not kept.buffer:
                self._kept[index] = _Kept(buffer, buffer.detach().clone(), buffer._version)
            elif kept.may_differ(uncounted=uncounted):
                kept.version = buffer._version
                changed.append(kept)
        if changed:
            with torch.no_grad():  # one call: for small buffers, calls take longer than the bytes
                private.copy_all([kept.copy for kept in changed], [kept.buffer for kept in changed])

    def restore(self) -> None:
        """Restore the kept values."""
        for (place, name, uncounted), kept in zip(self._places, self._kept, strict=True):
            if kept is None:
                continue
            place[name] = kept.buffer
            if kept.may_differ(uncounted=uncounted):
                with torch.no_grad():
                    kept.buffer.copy_(kept.copy)
                kept.version = kept.buffer._version


@dataclass(slots=True)
class _Kept:
    """A buffer, a copy of its values, and its version counter at the time of the copy."""

    buffer: torch.Tensor
    copy: torch.Tensor
    version: int

    def may_differ(self, *, uncounted: bool) -> bool:
        """Return whether the buffer may have changed since the copy."""
        return uncounted or not self.buffer.is_cpu or self.buffer._version != self.version


_ERROR = re.compile(r"HBM MULTI BIT ECC", re.IGNORECASE)
# torch-npu 2.14 writes "time is <us>"; MindIO searches for "time us=<us>". Other errors in the same
# text have other times, in other units.
_TIME = re.compile(_ERROR.pattern + r"[^\n]*?time (?:is|us\s*=)\s*(\d+)", re.IGNORECASE)
_KEPT = 1024  # updates; a report of an error comes at most this many updates later


class UpdateTimes:
    """The start times of the updates that led to this rank's state: (finished step, microseconds).

    clock_us: the clock that the device's errors use.
    """

    def __init__(self, clock_us: Callable[[], int]) -> None:
        self._clock_us = clock_us
        self._began: deque[tuple[int, int]] = deque(maxlen=_KEPT)
        self._least: int | None = None  # an older state contains no work of this process

    def begin(self, step: int) -> None:
        """Record the start of the update that finishes `step`, or of an optimizer's part of it."""
        self._drop_from(step)
        self._began.append((step, self._clock_us()))

    def at(self, step: int) -> None:
        """Record that the rank has the state of `step`: without an update, or a received one."""
        self._drop_from(step + 1)
        self._least = step if self._least is None else min(step, self._least)
        if not self._began or self._began[-1][0] < step:
            self._began.append((step, self._clock_us()))

    def _drop_from(self, step: int) -> None:
        while self._began and self._began[-1][0] >= step:
            self._began.pop()

    def clean_after(self, error: BaseException) -> int | None:
        """Return the newest certainly correct step; None: the error damages no finished step.

        It may be this rank's newest step. A peer may have done one more step with its gradients.
        """
        text = str(error)
        if not _ERROR.search(text) or not self._began:
            return None
        told = [int(found) for found in _TIME.findall(text)]
        if told:
            right = [step for step, at_us in self._began if at_us < min(told)]
            newest = right[-1] if right else self._began[0][0] - 1
        else:
            newest = self._began[-1][0] - 1  # the error may be older than the newest update
        return max(newest, self._least or 0)


class Repairs:
    """The device and the module's buffers of one rank, across generations.

    kind: the fault that ended the generation, if this rank knows it. clean: StepFailed's value for
    that fault, until the rank has another state. times: the start times of its updates.
    step: a step that broke off may have changed the module's buffers.
    """

    def __init__(self, device: torch.device, module: torch.nn.Module, step: CurrentStep) -> None:
        self.device = device_for(device)
        self.times = UpdateTimes(self.device.clock_us)
        self.buffers = BufferGuard(module)
        self.kind = FaultKind.LINK
        self.clean: int | None = None
        self._step = step
        self._name = device

    def note(self, kind: FaultKind, error: BaseException) -> None:
        """Record the fault that ended the generation, and the newest state that it leaves clean."""
        self.kind = kind
        known = [self.clean, *map(self.times.clean_after, chain_of(error))]
        self.clean = min((step for step in known if step is not None), default=None)

    def took_state(self, step: int) -> None:
        """Record that the rank has the plan's state of `step`, which has no damage."""
        self.clean = None
        self.times.at(step)

    def repair(self, named: Mapping[str, Any], *, restores: bool) -> bool:
        """Make the device usable after a generation; return whether its state is complete.

        restores: the state is complete, so the buffers get the values from before the broken step.
        Raises UnusableError: only a new process can use the device again.
        """
        kind, self.kind = self.kind, FaultKind.LINK
        in_step = self._step.take_broken()
        try:
            damage = self.device.repair(kind, lambda: list(capture(named).tensors.values()))
            if in_step and restores and damage is Damage.NONE:
                self.buffers.restore()
        except Exception as error:
            self.note(FaultKind.DEVICE, error)
            raise UnusableError(text_of(error)) from error
        if damage is Damage.DEVICE:
            raise UnusableError(f"{self._name} cannot be used again by this process")
        return damage is Damage.NONE


class Updates:
    """Marks the update on the heartbeat page, after a check that the update's gradients are real.

    together: no rank begins its update before all ranks have their gradients. A sharded state would
        lose a step that one shard's ranks have done and another shard's ranks could not. With
        `together`, all ranks do it, because an update does not depend on other ranks. It needs an
        all-reduce of one number per step. An NPU uses it too: an error that its wait for gradients
        raises then loses no step.
    group: the ranks of this rank's generation.
    """

    def __init__(
        self, page: HeartbeatPage, repairs: Repairs, group: Group, *, together: bool
    ) -> None:
        self.group = group
        self._page = page
        self._device = repairs.device
        self._times = repairs.times
        self._together = together

    def watch(self, named: Mapping[str, Any]) -> None:
        """Register a hook in every optimizer among these objects: it runs when an update begins."""
        for thing in named.values():
            if isinstance(thing, torch.optim.Optimizer):
                thing.register_step_pre_hook(lambda *_: self._begin())

    def _begin(self) -> None:
        """Check that the gradients are real, and not those of a severed group; mark the update.

        An accelerator's collectives do not block the host, and raise nothing when they are aborted.
        """
        self._device.wait()
        if self.group.severed:
            raise StaleError("the generation ended before the update")
        if self._together and not self._page.in_update:
            have = torch.ones(1, device=wire_device())
            dist.all_reduce(have)
            if int(have.item()) != dist.get_world_size():
                raise StaleError("the generation ended while the ranks met for the update")
        self._times.begin((self._page.finished or 0) + 1)
        self._page.begin_update()
