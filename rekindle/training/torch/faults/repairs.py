"""A rank after its generation broke: device, buffers, and the updates that are clean."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping
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
    """Keeps a copy of those buffers of a module that change.

    Constant buffers (masks, tables) are copied once: their version counters never move. Those of
    the normalisations are copied each time: torch's kernels write them without counting.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._places: list[tuple[dict[str, torch.Tensor | None], str, bool]] = []
        self._kept: list[_Kept] = []

    def look(self) -> None:
        """Find the module's buffers; once per generation, for it walks through all its parts."""
        self._places = [
            (private.buffers_of(part), name, isinstance(part, private.NormBase))
            for part in self._module.modules()
            for name in private.buffers_of(part)
        ]
        self._kept = [_Kept(None, None, 0) for _ in self._places]

    def keep(self) -> None:
        """Keep the buffers as they are now."""
        for index, (place, name, uncounted) in enumerate(self._places):
            buffer, kept = place[name], self._kept[index]
            if buffer is None:
                continue
            if buffer is not kept.buffer:
                self._kept[index] = _Kept(buffer, buffer.detach().clone(), buffer._version)
            elif uncounted or buffer._version != kept.version:
                with torch.no_grad():
                    kept.copy_from(buffer)

    def restore(self) -> None:
        """Put back what was kept."""
        for (place, name, uncounted), kept in zip(self._places, self._kept, strict=True):
            if kept.buffer is None:
                continue
            place[name] = kept.buffer
            if uncounted or kept.buffer._version != kept.version:
                with torch.no_grad():
                    kept.copy_back()


class _Kept:
    """A buffer, a copy of what it held, and its version counter at that time."""

    def __init__(
        self, buffer: torch.Tensor | None, copy: torch.Tensor | None, version: int
    ) -> None:
        self.buffer, self._copy, self.version = buffer, copy, version

    def copy_from(self, buffer: torch.Tensor) -> None:
        assert self._copy is not None
        self._copy.copy_(buffer)
        self.version = buffer._version

    def copy_back(self) -> None:
        assert self.buffer is not None
        assert self._copy is not None
        self.buffer.copy_(self._copy)
        self.version = self.buffer._version


_ERROR = re.compile(r"HBM MULTI BIT ECC", re.IGNORECASE)
# torch-npu 2.14 says "time is <us>", what MindIO looks for is "time us=<us>". Other errors that are
# told with it have times of their own, in units of their own.
_TIME = re.compile(_ERROR.pattern + r"[^\n]*?time (?:is|us\s*=)\s*(\d+)", re.IGNORECASE)
_KEPT = 1024  # updates; an error is not told later than so many


class UpdateTimes:
    """When the updates began that led to this rank's state: (steps finished by it, microseconds).

    clock_us: the clock that errors are told in.
    """

    def __init__(self, clock_us: Callable[[], int]) -> None:
        self._clock_us = clock_us
        self._began: deque[tuple[int, int]] = deque(maxlen=_KEPT)
        self._least: int | None = None  # nothing that this process has done is in an older state

    def begin(self, step: int) -> None:
        """The update begins that finishes step `step`, or another optimizer's part of it."""
        self._drop_from(step)
        self._began.append((step, self._clock_us()))

    def at(self, step: int) -> None:
        """The rank has the state of `step`: its own, without any update, or from elsewhere."""
        self._drop_from(step + 1)
        self._least = step if self._least is None else min(step, self._least)
        if not self._began or self._began[-1][0] < step:
            self._began.append((step, self._clock_us()))

    def _drop_from(self, step: int) -> None:
        while self._began and self._began[-1][0] >= step:
            self._began.pop()

    def clean_after(self, error: BaseException) -> int | None:
        """The newest step that is right for sure; None: the error spoils nothing that was done.

        That may be the newest of this rank; a peer may have done one more with its gradients.
        """
        text = str(error)
        if not _ERROR.search(text) or not self._began:
            return None
        told = [int(found) for found in _TIME.findall(text)]
        if told:
            right = [step for step, at_us in self._began if at_us < min(told)]
            newest = right[-1] if right else self._began[0][0] - 1
        else:
            newest = self._began[-1][0] - 1  # it may be older than the newest update
        return max(newest, self._least or 0)


class Repairs:
    """The device and the module's buffers of one rank, across generations.

    kind: what the generation ended of, as far as this rank knows. clean: what StepFailed says of
    that, until the rank has another state. times: when its updates began.
    step: where it broke off, the module's buffers may be changed.
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
        """Note which fault ended the generation, and which states it leaves clean."""
        self.kind = kind
        known = [self.clean, *map(self.times.clean_after, chain_of(error))]
        self.clean = min((step for step in known if step is not None), default=None)

    def took_state(self, step: int) -> None:
        """The rank has the state of `step` that a plan named: nothing is wrong with that one."""
        self.clean = None
        self.times.at(step)

    def repair(self, named: Mapping[str, Any], *, restores: bool) -> bool:
        """Make the device usable after a generation; return whether the state it holds is whole.

        restores: the state is whole, so the buffers get the values from before the broken step.
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
    """Marks the window on the heartbeat page, once the update's gradients are known to be real.

    together: no rank begins its update before all have their gradients. Of a sharded state a step
        is lost where one shard's ranks have done it and another's could not; this way all do it,
        for an update itself asks nothing of others. It costs an all-reduce of one number per step.
        On an NPU too: errors that are told when gradients are waited for cost no step then.
    group: the ranks of the generation that this rank is in.
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
        """Have every optimizer among these tell when it begins."""
        for thing in named.values():
            if isinstance(thing, torch.optim.Optimizer):
                thing.register_step_pre_hook(lambda *_: self._begin())

    def _begin(self) -> None:
        """The gradients are about to be used: they must be real, not those of a severed group.

        An accelerator's collectives do not hold the host up, and raise nothing when aborted.
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
