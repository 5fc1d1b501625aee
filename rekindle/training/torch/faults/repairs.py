"""A rank whose generation broke: what it tells of its fault, and how it gets fit for the next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rekindle.rank.current_step import StepUnderWay
from rekindle.rank.errors import UnusableError, chain_of, text_of
from rekindle.recovery.faults.fault import Kind
from rekindle.training.devices import Damage, device_for
from rekindle.training.devices.ecc import UpdateTimes
from rekindle.training.torch.state.capture import capture
from rekindle.training.torch.state.module_buffers import BufferGuard


class Repairs:
    """The device and the module's buffers of one rank, across generations.

    kind: what the generation ended of, as far as this rank knows. clean: what StepFailed says of
    that, until the rank has another state. times: when its updates began.
    step: where it broke off, the module's buffers may be changed.
    """

    def __init__(self, device: torch.device, module: torch.nn.Module, step: StepUnderWay) -> None:
        self.device = device_for(device)
        self.times = UpdateTimes(self.device.clock_us)
        self.buffers = BufferGuard(module)
        self.kind = Kind.LINK
        self.clean: int | None = None
        self._step = step
        self._name = device

    def note(self, kind: Kind, error: BaseException) -> None:
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
        kind, self.kind = self.kind, Kind.LINK
        in_step = self._step.take_broken()
        try:
            damage = self.device.repair(kind, lambda: list(capture(named).tensors.values()))
            if in_step and restores and damage is Damage.NONE:
                self.buffers.restore()
        except Exception as error:
            self.note(Kind.DEVICE, error)
            raise UnusableError(text_of(error)) from error
        if damage is Damage.DEVICE:
            raise UnusableError(f"{self._name} cannot be used again by this process")
        return damage is Damage.NONE
