"""The newest clean step of a rank after an error that ended its generation."""

from __future__ import annotations

import torch

from rekindle.rank.progress import CurrentStep
from rekindle.recovery.faults.fault import FaultKind
from rekindle.training.torch.faults.repairs import Repairs
from rekindle.training.torch.state.before_step import BeforeStep
from rekindle.training.torch.state.capture import Modes


def valid_steps_after(repairs: Repairs, error: BaseException) -> int | None:
    """Return the newest clean step that the rank knows after this error."""
    repairs.note(FaultKind.DEVICE_MEMORY, error)
    return repairs.valid_steps


def test_how_late_an_error_was_told_is_read_from_what_the_script_has_wrapped() -> None:
    """The rank also finds the device's error inside the script's error.

    A later error without information about the memory does not change the result.
    """
    repairs = Repairs(torch.device("cpu"), BeforeStep({}, Modes()), CurrentStep())
    repairs.took_state(0)
    for step in (1, 2):
        repairs.times.begin(step)
    original = RuntimeError("HBM MULTI BIT ECC ERROR")  # no time: it may be older than the newest
    wrapped = ValueError("no luck")
    wrapped.__cause__ = original
    assert valid_steps_after(repairs, original) == 1
    repairs.took_state(2)
    assert valid_steps_after(repairs, ValueError("no luck")) is None
    repairs.times.begin(3)
    assert valid_steps_after(repairs, wrapped) == 2
    assert valid_steps_after(repairs, ValueError("no luck")) == 2
