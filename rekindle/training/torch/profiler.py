"""What of light profiling is torch's: the forward pass, by its device's own time, and collectives.

A device computes behind the host's back: how long a pass took there is known some time after the
host has asked for it. Until then what comes after it waits here, for records are in their order.
"""

from __future__ import annotations

import collections
from typing import NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from rekindle.profiling.markers import DEFAULT, FORWARD, Range
from rekindle.protocol.rank import Profile
from rekindle.rank.profiler import Profiler
from rekindle.training.devices import Device, DeviceEvent, device_for
from rekindle.training.torch.groups import gloo_waits as waits

MOST_HELD = 10_000  # ranges behind a pass that a device does not finish


class _Pass(NamedTuple):
    """A forward pass that the host has asked for. at: when it began to, nanoseconds."""

    at: int
    begin: DeviceEvent
    end: DeviceEvent


class TorchProfiler(Profiler):
    """The records of a rank that trains this model; hooks are there only while it writes."""

    def __init__(self, slot: int, device: int, model: torch.nn.Module) -> None:
        super().__init__(slot, device)
        self._model = model
        self._hooks: list[RemovableHandle] = []
        self._accelerator: Device = device_for(torch.device("cpu"))
        self._began_at: DeviceEvent | None = None
        self._held: collections.deque[_Pass | Range] = collections.deque(maxlen=MOST_HELD)

    def switched(self) -> None:
        """Hook into the model and its collectives, or out of them."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._held.clear()
        if self.on.forward:
            first = next((each.device for each in self._model.parameters()), None)
            self._accelerator = device_for(first or torch.device("cpu"))
            self._hooks = [
                self._model.register_forward_pre_hook(self.begin_forward),
                self._model.register_forward_hook(self.end_forward),
            ]
        waits.record(self.joined if self.on.communication else None)

    def begin_step(self, step: int, asked: Profile) -> None:
        """A step's body begins; earlier passes may be done by now."""
        self._settle()
        super().begin_step(step, asked)

    def end_step(self) -> None:
        """It has ended well; where the script waits for the device so have its passes."""
        super().end_step()
        self._settle()

    def close(self) -> None:
        """Write what is left, and known."""
        self._settle()
        super().close()

    def begin_forward(self, *_: object) -> None:
        """A forward pass begins: a hook of the model's."""
        super().begin_forward()
        self._began_at = self._accelerator.mark()

    def add_forward(self, began: int) -> None:
        """Write a forward pass down that was asked for; nanoseconds since the epoch."""
        end = self._accelerator.mark()
        if self._began_at is None or end is None:
            super().add_forward(began)
        else:
            self._held.append(_Pass(began, self._began_at, end))

    def keep(self, made: Range) -> None:
        """Have it written, behind the passes that were asked for before."""
        if self._held:
            self._held.append(made)
        else:
            super().keep(made)

    def _settle(self) -> None:
        """Let what is done be written."""
        try:
            while self._held:
                first = self._held[0]
                if isinstance(first, _Pass):
                    if not first.end.query():
                        return
                    took = round(first.begin.elapsed_time(first.end) * 1e6)
                    first = Range(FORWARD, DEFAULT, first.at, first.at + took)
                self._held.popleft()
                super().keep(first)
        except RuntimeError:  # of a device with a fault, which tells whoever asks it next
            self._held.clear()
