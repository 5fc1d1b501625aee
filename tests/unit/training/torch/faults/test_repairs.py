"""What a rank tells the coordinator of an error that ended its generation."""

from __future__ import annotations

from typing import Any

import torch

from rekindle.protocol import agent as protocol
from rekindle.rank.current_step import StepUnderWay
from rekindle.recovery.faults.fault import Kind
from rekindle.training.torch.faults.repairs import Repairs


class Line:
    """A channel that keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        """Keep it."""
        self.sent.append(message)


def reported(repairs: Repairs, error: BaseException) -> protocol.StepFailed:
    """What is told of an error in the third step."""
    line: Any = Line()
    repairs.kind = Kind.DEVICE_MEMORY
    repairs.report(line, error, generation=1, finished=2)
    (message,) = line.sent
    assert isinstance(message, protocol.StepFailed)
    return message


def test_how_late_an_error_was_told_is_read_from_what_the_script_has_wrapped() -> None:
    """Where the device's own words are not the outermost error, and the oldest doubt stays."""
    repairs = Repairs(0, torch.device("cpu"), torch.nn.Linear(1, 1), StepUnderWay())
    repairs.took_state(0)
    for step in (1, 2):
        repairs.times.begin(step)
    told = RuntimeError("HBM MULTI BIT ECC ERROR")  # no time: it may be older than the newest
    wrapped = ValueError("no luck")
    wrapped.__cause__ = told
    assert reported(repairs, told).clean == 1
    repairs.took_state(2)
    assert reported(repairs, ValueError("no luck")).clean is None
    repairs.times.begin(3)
    assert reported(repairs, wrapped).clean == 2
    assert reported(repairs, ValueError("no luck")).clean == 2
