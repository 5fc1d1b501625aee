"""How often agents tell where their ranks are."""

from __future__ import annotations

from rekindle.runtime.heartbeat import SLOWEST_BEAT_S, beat_interval
from rekindle.runtime.lines import LOOK_S, PING_AFTER


def test_small_worlds_beat_four_times_a_second() -> None:
    """Nothing is spared where there is enough."""
    assert {beat_interval(nodes) for nodes in (1, 2, 64, 1024)} == {0.25}


def test_bigger_worlds_beat_more_slowly_but_never_below_a_limit() -> None:
    """The coordinator gets a bounded number of beats as long as that leaves each one every 2 s."""
    assert beat_interval(4096) == 1.0
    assert beat_interval(16384) == beat_interval(10**6) == SLOWEST_BEAT_S == 2.0


def test_a_beating_agent_is_not_asked_whether_it_lives() -> None:
    """The slowest beat comes before the coordinator's ping would."""
    assert SLOWEST_BEAT_S < PING_AFTER * LOOK_S
