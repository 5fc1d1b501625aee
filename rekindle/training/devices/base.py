"""What every device adapter can do."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, Protocol

import torch

from rekindle.recovery.faults.fault import Kind


class Damage(str, enum.Enum):
    """What a fault has damaged, least first."""

    NONE = "none"  # nothing that lasts: the step can be done again
    STATE = "state"  # parameters or optimizer state: they have to come from elsewhere
    DEVICE = "device"  # the device cannot be used again by this process


class Mark(Protocol):
    """A moment in what a device was asked to do: torch's events are such."""

    def query(self) -> bool:
        """Whether it is over. Raises RuntimeError: the device has a fault."""

    def elapsed_time(self, end_event: Any, /) -> float:
        """Milliseconds from it to another one."""


class Device(Protocol):
    """One rank's device. `stop` is for any thread, the rest for the main thread."""

    def stop(self) -> None:
        """Abort what runs there, so that a main thread that waits for it raises."""

    def wait(self) -> None:
        """Wait until all that was asked of it is done. Raises RuntimeError: what went wrong."""

    def clock_us(self) -> int:
        """Microseconds, by the clock that the device's errors tell their time in."""

    def mark(self) -> Mark | None:
        """Mark the moment when all that was asked of it so far is done; None: that is now."""

    def free(self) -> None:
        """Give back memory that is kept for later steps: while this rank waits, a check needs it.

        Raises nothing: a device that has a fault tells of it again.
        """

    def repair(self, kind: Kind, state: Callable[[], list[torch.Tensor]]) -> Damage:
        """Make the device usable after a fault, and say what is lost.

        kind: of this rank's own fault; LINK where only a peer had one.
        state: gives the tensors of the training state, which are written anew after STATE.
        """
