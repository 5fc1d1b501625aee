"""Profile torch: the forward pass, by its device's own time, and collectives.

A device computes asynchronously. So the time of a pass is known only some time after the host has
launched it. Later records wait here until then, because records are written in order.
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

MOST_HELD = 10_000  # the limit of ranges that wait for a pass that a device does not finish


class _Pass(NamedTuple):
    """A launched forward pass. at: the time of its launch on the host, in nanoseconds."""

    at: int
    begin: DeviceEvent
    end: DeviceEvent


class TorchProfiler(Profiler):
    """The records of a rank that trains this model; hooks exist only while it writes."""

    def __init__(self, slot: int, device: int, model: torch.nn.Module) -> None:
        super().__init__(slot, device)
        self._model = model
        self._hooks: list[RemovableHandle] = []
        self._accelerator: Device = device_for(torch.device("cpu"))
        self._began_at: DeviceEvent | None = None
        self._held: collections.deque[_Pass | Range] = collections.deque(maxlen=MOST_HELD)

    def switched(self) -> None:
        """Add hooks to the model and its collectives, or remove them."""
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
        """Begin a step's body; earlier passes may be done by now."""
        self._settle()
        super().begin_step(step, asked)

    def end_step(self) -> None:
        """End a step; its passes are done if the script waits for the device."""
        super().end_step()
        self._settle()

    def close(self) -> None:
        """Write the remaining records whose times are known."""
        self._settle()
        super().close()

    def begin_forward(self, *_: object) -> None:
        """Begin a forward pass: a hook of the model."""
        super().begin_forward()
        self._began_at = self._accelerator.mark()

    def add_forward(self, began: int) -> None:
        """Record a launched forward pass. began: its start, in nanoseconds since the epoch."""
        end = self._accelerator.mark()
        if self._began_at is None or end is None:
            super().add_forward(began)
        else:
            self._held.append(_Pass(began, self._began_at, end))

    def keep(self, span: Range) -> None:
        """Write a range, after the passes that were launched before it."""
        if self._held:
            self._held.append(span)
        else:
            super().keep(span)

    def _settle(self) -> None:
        """Write the records that are complete."""
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
        except RuntimeError:  # the device has a fault, which its next caller gets too
            self._held.clear()
