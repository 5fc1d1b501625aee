"""The heartbeat page of a rank, and the interval at which agents report their ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

from rekindle import names
from rekindle.coordinator.agent_connection import LOOK_S, PING_AFTER
from rekindle.errors import SessionError
from rekindle.protocol.heartbeat_page import (
    DIGESTS,
    RECENT,
    SLOWEST_BEAT_S,
    HeartbeatPage,
    RankActivity,
    StateDigest,
    beat_interval,
)
from rekindle.rank import environment
from rekindle.rank.progress import ProgressReporter, phase_of


def test_small_worlds_beat_four_times_a_second() -> None:
    """With at most 1,024 nodes, an agent reports every 0.25 s."""
    assert {beat_interval(nodes) for nodes in (1, 2, 64, 1024)} == {0.25}


def test_bigger_worlds_beat_more_slowly_but_never_below_a_limit() -> None:
    """With more nodes the interval grows, which limits the load of the coordinator, up to 2 s."""
    assert beat_interval(4096) == 1.0
    assert beat_interval(16384) == beat_interval(10**6) == SLOWEST_BEAT_S == 2.0


def test_a_beating_agent_is_not_asked_whether_it_lives() -> None:
    """The longest interval between reports is shorter than the time before a ping."""
    assert SLOWEST_BEAT_S < PING_AFTER * LOOK_S


@pytest.fixture
def pages() -> Iterator[tuple[HeartbeatPage, HeartbeatPage]]:
    """Yield one page as its rank and as its agent see it."""
    fd = HeartbeatPage.create("test")
    both = HeartbeatPage(fd), HeartbeatPage(fd)
    os.close(fd)
    yield both
    for page in both:
        page.close()


def test_the_agent_sees_what_the_rank_is_at(pages: tuple[HeartbeatPage, HeartbeatPage]) -> None:
    """The page shows each activity of a rank, and the first step of each generation separately."""
    rank, agent = ProgressReporter(pages[0]), pages[1]
    activities = [agent.mark.doing]
    for generation in range(2):
        for act in (
            rank.meet,
            lambda: rank.formed(0),
            rank.begin_step,
            lambda: rank.end_step(1),
            rank.begin_step,
            rank.leave,
        ):
            act()
            activities.append(agent.mark.doing)
        assert (agent.mark.finished, agent.mark.meetings) == (1, generation + 1)
    way = [
        RankActivity.MEETING,
        RankActivity.BETWEEN,
        RankActivity.FIRST,
        RankActivity.BETWEEN,
        RankActivity.STEP,
        RankActivity.OUTSIDE,
    ]
    assert activities == [RankActivity.OUTSIDE, *way, *way]


def test_a_phase_ends_however_it_is_left(pages: tuple[HeartbeatPage, HeartbeatPage]) -> None:
    """If a phase ends with an error, the earlier activity starts again."""
    rank, agent = ProgressReporter(pages[0]), pages[1]
    rank.begin_step()
    begun = agent.mark
    with contextlib.suppress(ValueError), rank.at(phase_of("evaluate")):
        assert agent.mark.doing is RankActivity.EVALUATE
        raise ValueError("it found a wrong label")
    assert agent.mark.doing is begun.doing
    assert agent.mark.since_ns > begun.since_ns


def test_a_phase_that_does_not_exist() -> None:
    """The error for an unknown phase names the valid phases."""
    with pytest.raises(SessionError, match="choose from evaluate, checkpoint, compile"):
        phase_of("lunch")


def test_the_newest_collectives_are_remembered(pages: tuple[HeartbeatPage, HeartbeatPage]) -> None:
    """The page keeps the newest collectives in order until the rank forms a new process group."""
    rank, agent = pages
    for mark in range(RECENT + 5):
        rank.begin_operation(mark)
    assert agent.operations == RECENT + 5
    assert agent.recent == tuple(range(5, RECENT + 5))
    rank.form()
    assert (agent.operations, agent.recent) == (0, ())


def test_a_new_process_is_at_nothing_its_predecessor_was_at(
    pages: tuple[HeartbeatPage, HeartbeatPage],
) -> None:
    """A new process keeps the number of finished steps, but not the activity of the old process."""
    rank, agent = pages
    rank.beat(7)
    rank.begin(RankActivity.STEP)
    rank.wait(True)
    agent.new_life()
    assert (rank.finished, rank.mark.doing, rank.waiting_since_ns) == (7, RankActivity.OUTSIDE, 0)


def test_without_an_agent_there_is_a_page_that_no_process_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without an agent, a rank reports its progress to a page of its own."""
    monkeypatch.delenv(names.ENV_HEARTBEAT_FD, raising=False)
    progress, other = ProgressReporter(environment.page()), environment.page()
    progress.begin_step()
    progress.end_step(3)
    assert progress.page.finished == 3
    assert (other.finished, other.mark.doing) == (0, RankActivity.OUTSIDE)


def test_the_agent_reads_each_digest_once(pages: tuple[HeartbeatPage, HeartbeatPage]) -> None:
    """The page has the newest digests. Their numbers are exact, also negative ones."""
    rank, agent = pages
    written = [StateDigest(step, 1, 0, (-1) ** step * (2**62 + step)) for step in range(1, 100)]
    for each in written[:3]:
        rank.put_digest(each)
    count, found = agent.digests_after(0)
    assert (count, list(found)) == (3, written[:3])
    assert agent.digests_after(count) == (3, ())
    for each in written[3:]:
        rank.put_digest(each)
    count, found = agent.digests_after(count)
    assert (count, list(found)) == (99, written[100 - DIGESTS :])


def test_a_rank_sees_the_newest_equal_step(pages: tuple[HeartbeatPage, HeartbeatPage]) -> None:
    """The rank shows the newest compared step, and its agent the newest equal one."""
    rank, agent = pages
    rank.put_digest(StateDigest(8, 1, 0, 5))
    agent.agreed(4)
    assert rank.compared == (8, 4)
