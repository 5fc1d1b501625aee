"""Samplers, ranks and states that StepSampler refuses, each with its reason."""

from __future__ import annotations

import pytest

from rekindle.errors import SessionError
from rekindle.training.sampler import StepSampler


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0, 1), {}, "length must be from 1 to 1099511627776, not 0"),
        ((2**40 + 1, 1), {}, "length must be from 1"),
        ((2.5, 1), {}, "length must be an integer, not 2.5"),
        ((10, 0), {}, "batch_size must be from 1"),
        ((10, 1), {"seed": -1}, "seed must be from 0"),
    ],
)
def test_impossible_samplers_are_refused(arguments, options, message: str) -> None:
    """StepSampler refuses arguments that allow no samples, and names the wrong one."""
    with pytest.raises(SessionError, match=message):
        StepSampler(*arguments, **options)


@pytest.mark.parametrize(("rank", "world_size"), [(0, 0), (-1, 2), (2, 2)])
def test_impossible_ranks_are_refused(rank: int, world_size: int) -> None:
    """The sampler refuses a rank outside of its world."""
    with pytest.raises(SessionError, match="must be from"):
        StepSampler(10, 1).bind(rank, world_size)


def test_fewer_shares_than_ranks_are_refused() -> None:
    """The sampler refuses fewer shares than ranks, because a rank would have no samples."""
    with pytest.raises(SessionError, match="shares must be from 4"):
        StepSampler(10, 1).bind(0, 4, 3)


def test_use_before_binding_is_refused() -> None:
    """An unbound sampler raises SessionError when it is used, but it can load a state."""
    sampler = StepSampler(10, 1)
    for use in (
        sampler.indices,
        sampler.advance,
        lambda: sampler.shares,
        lambda: next(iter(sampler)),
    ):
        with pytest.raises(SessionError, match="does not belong to a rank yet"):
            use()
    sampler.load_state_dict({**sampler.state_dict(), "position": 7})
    assert sampler.position == 7


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": 11}, "length is 11 there, 10 here"),
        ({"seed": 1, "shuffle": False}, "seed is 1 there, 0 here; shuffle is False there, True"),
        ({"position": -1}, "position must be from 0"),
        ({"position": None}, "position must be an integer"),
    ],
)
def test_states_of_another_stream_are_refused(change, message: str) -> None:
    """The sampler refuses a state of another stream, and its own position does not change."""
    sampler = StepSampler(10, 1)
    sampler.bind(0, 1)
    sampler.advance()
    with pytest.raises(SessionError, match=message):
        sampler.load_state_dict({**sampler.state_dict(), **change})
    assert sampler.position == 1


def test_an_incomplete_state_is_refused() -> None:
    """For an incomplete state, the error names the missing entries."""
    with pytest.raises(SessionError, match="not have position, seed"):
        StepSampler(10, 1).load_state_dict({"length": 10, "shuffle": True})
