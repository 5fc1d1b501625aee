"""A rank whose generation broke: what it tells of its fault, and how it gets fit for the next."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Any

import torch

from rekindle.protocol import agent as protocol
from rekindle.rank.channel import Channel
from rekindle.rank.current_step import StepUnderWay
from rekindle.recovery.faults.fault import Kind
from rekindle.training.devices import Damage, device_for
from rekindle.training.devices.ecc import UpdateTimes
from rekindle.training.torch.faults.classify import chain_of
from rekindle.training.torch.state.capture import capture
from rekindle.training.torch.state.module_buffers import BufferGuard


class Repairs:
    """The device and the module's buffers of one rank, across generations.

    kind: what the generation ended of, as far as this rank knows. clean: what StepFailed says of
    that, until the rank has another state. times: when its updates began.
    step: where it broke off, the module's buffers may be changed.
    """

    def __init__(
        self, slot: int, device: torch.device, module: torch.nn.Module, step: StepUnderWay
    ) -> None:
        self.device = device_for(device)
        self.times = UpdateTimes(self.device.clock_us)
        self.buffers = BufferGuard(module)
        self.kind = Kind.LINK
        self.clean: int | None = None
        self._step = step
        self._slot = slot
        self._name = device

    def report(
        self,
        channel: Channel,
        error: BaseException,
        *,
        generation: int,
        finished: int,
    ) -> None:
        """Tell the coordinator why the step failed."""
        told = [self.clean, *map(self.times.clean_after, chain_of(error))]
        self.clean = min((step for step in told if step is not None), default=None)
        text = (str(error).splitlines() or [type(error).__name__])[0]
        failed = protocol.StepFailed(
            rank=self._slot,
            generation=generation,
            kind=self.kind,
            error=text[:500],
            finished=finished,
            clean=self.clean,
        )
        channel.send(failed)

    def took_state(self, step: int) -> None:
        """The rank has the state of `step` that a plan named: nothing is wrong with that one."""
        self.clean = None
        self.times.at(step)

    def repair(
        self,
        channel: Channel,
        named: Mapping[str, Any],
        generation: int,
        finished: int,
        *,
        restores: bool,
    ) -> bool:
        """Make the device usable after `generation`; say whether the state it holds is whole.

        restores: the state is, so the buffers are put back to what they were before the step.
        Ends this process if the device cannot be used by it again: it is then replaced.
        """
        kind, self.kind = self.kind, Kind.LINK
        in_step = self._step.take_broken()
        try:
            damage = self.device.repair(kind, lambda: list(capture(named).tensors.values()))
            if in_step and restores and damage is Damage.NONE:
                self.buffers.restore()
            if damage is Damage.DEVICE:
                raise RuntimeError(f"{self._name} cannot be used again by this process")
        except Exception as error:  # whatever it is, only a new process can go on
            self.kind = Kind.DEVICE
            self.report(channel, error, generation=generation, finished=finished)
            os.kill(os.getpid(), signal.SIGKILL)
        return damage is Damage.NONE
