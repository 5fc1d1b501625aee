"""Late ranks: the tracker finds them from heartbeat pages and a simulated clock."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from rekindle.agent.lateness import (
    ENOUGH,
    FACTOR,
    LOOK_S,
    UNKNOWN_S,
    IdleTracker,
    LatenessTracker,
)
from rekindle.agent.process_activity import Activity
from rekindle.protocol.heartbeat_page import BUSY_S, PageReading, RankActivity

LEAST_S = 10.0
BETWEEN_S = 300.0
MOMENT_S = 2.0  # for the inspection of all ranks and the coordinator


class Rank:
    """A rank's page over time, and the tracker that looks at it at regular intervals."""

    def __init__(self, look_s: float = LOOK_S) -> None:
        self.watch = LatenessTracker(LEAST_S, BETWEEN_S)
        self.now = 0.0
        self.mark = PageReading(0, RankActivity.MEETING, 0)
        self._look_s = look_s
        self._next_look = 0.0

    def is_late(self) -> bool:
        return self.watch.look({0: self.mark}, self.now) == [0]

    def pass_time(self, seconds: float) -> float | None:
        """Let time pass; return after how many seconds the rank is late, or None."""
        begin, end = self.now, self.now + seconds
        while self._next_look <= end:
            self.now = self._next_look
            self._next_look += self._look_s
            if self.is_late():
                return self.now - begin
        self.now = end
        return None

    def begin(self, doing: RankActivity, *, finished: int | None = None, meetings: int = 0) -> None:
        done = self.mark.finished if finished is None else finished
        meetings = self.mark.meetings + meetings
        self.mark = PageReading(done, doing, int(self.now * 1e9), meetings)

    def do(self, doing: RankActivity, seconds: float) -> bool:
        """Do one activity for some seconds; return whether the tracker found the rank late."""
        self.begin(doing)
        late = self.pass_time(seconds) is not None
        if doing in (RankActivity.FIRST, RankActivity.STEP):
            self.begin(RankActivity.BETWEEN, finished=self.mark.finished + 1)
        return late

    def train(self, steps: int, seconds: float) -> None:
        """Do regular steps, and check that none of them is late."""
        self.do(RankActivity.FIRST, seconds)  # may be late: no duration is known yet
        for number in range(steps):
            assert not self.do(RankActivity.STEP, seconds), number


@pytest.mark.parametrize("seconds", [0.01, 0.5, 3.0, 5.0, 6.0, 20.0, 100.0])
def test_a_step_without_an_end_is_found_in_time(seconds: float) -> None:
    """The tracker finds a hanging step within 15 s or three times the longest step.

    This includes the time for a close inspection.
    """
    rank = Rank()
    rank.train(ENOUGH + 2, seconds)
    rank.begin(RankActivity.STEP)
    late = rank.pass_time(1000.0)
    assert late is not None
    assert max(LEAST_S, FACTOR * seconds) <= late <= max(15.0, 3 * seconds) - MOMENT_S


def lengths(shape: str, seed: int) -> Iterator[float]:
    """Yield random step times between 1 and 10."""
    chance = random.Random(seed)
    while True:
        yield 10 ** chance.random() if shape == "logarithmic" else chance.uniform(1.0, 10.0)


@pytest.mark.parametrize("shape", ["logarithmic", "even"])
@pytest.mark.parametrize("unit_s", [0.01, 0.4, 1.5, 4.0])
def test_steps_that_vary_by_ten_are_no_hang(shape: str, unit_s: float) -> None:
    """Among 10,000 steps that vary by a factor of ten, with checkpoints between, none is late."""
    rank = Rank(look_s=min(1.0, max(LOOK_S, unit_s / 4)))
    times = lengths(shape, seed=int(unit_s * 100))
    rank.do(RankActivity.FIRST, unit_s * next(times))
    for step in range(10_000):
        assert not rank.do(RankActivity.STEP, unit_s * next(times)), step
        if step % 100 == 0:
            assert not rank.do(RankActivity.CHECKPOINT, 30 * unit_s)


def test_the_first_step_of_a_job_has_time() -> None:
    """The first step has a fixed limit, which is longer for a computing process: it may compile."""
    rank = Rank()
    rank.begin(RankActivity.FIRST)
    assert rank.pass_time(UNKNOWN_S - 1.0) is None
    assert rank.watch.limit_s(0, busy=False) == UNKNOWN_S
    assert rank.watch.limit_s(0, busy=True) == BUSY_S


@pytest.mark.parametrize(
    "before",
    [None, PageReading(0, RankActivity.OUTSIDE, 0), PageReading(0, RankActivity.MEETING, 0, 1)],
)
def test_a_first_step_between_two_looks_is_known(before: PageReading | None) -> None:
    """A first step between two looks counts as a known duration, so the next limit is shorter.

    It took no longer than the time between the looks.
    """
    rank = Rank()
    rank.watch.look({}, -LOOK_S)  # a rank may start and train between two looks
    for mark in filter(
        None,
        (before, PageReading(1, RankActivity.STEP, 1, 1), PageReading(1, RankActivity.FIRST, 2, 2)),
    ):
        rank.mark = mark
        assert rank.pass_time(1.0) is None
    assert rank.watch.limit_s(0, busy=False) == LEAST_S


def test_state_that_a_rank_was_given_is_no_first_step() -> None:
    """A received state with more finished steps teaches the tracker no duration of a step."""
    rank = Rank()
    for mark in (
        PageReading(0, RankActivity.MEETING, 0, 1),
        PageReading(9, RankActivity.BETWEEN, 1, 1),
    ):
        rank.mark = mark
        assert rank.pass_time(1.0) is None
    rank.mark = PageReading(9, RankActivity.FIRST, 2, 1)
    assert rank.pass_time(1.0) is None
    assert rank.watch.limit_s(0, busy=False) == UNKNOWN_S


def test_a_few_steps_say_little() -> None:
    """A step may take ten times as long as the longest of a few."""
    rank = Rank()
    rank.train(3, 4.0)
    assert not rank.do(RankActivity.STEP, 39.0)


def test_whoever_computes_in_a_step_has_no_more_time() -> None:
    """A computing process extends the limit between two steps, but not within a step.

    An endless loop computes as well. Between two steps the script may evaluate its model.
    """
    rank = Rank()
    rank.train(ENOUGH + 2, 0.1)
    rank.begin(RankActivity.STEP)
    rank.pass_time(1.0)
    assert rank.watch.limit_s(0, busy=True) == LEAST_S
    rank.begin(RankActivity.BETWEEN)
    rank.pass_time(1.0)
    assert rank.watch.limit_s(0, busy=False) == BETWEEN_S
    assert rank.watch.limit_s(0, busy=True) == BUSY_S


def test_work_between_two_steps_has_a_limit_of_its_own() -> None:
    """A rank may rest between two steps for longer than in a step, but not without end."""
    rank = Rank()
    rank.train(ENOUGH + 2, 0.1)
    rank.begin(RankActivity.BETWEEN)
    late = rank.pass_time(1000.0)
    assert late is not None
    assert BETWEEN_S <= late <= BETWEEN_S + 1.0


@pytest.mark.parametrize(
    "doing", [RankActivity.EVALUATE, RankActivity.CHECKPOINT, RankActivity.COMPILE]
)
def test_what_the_script_says_takes_long_has_time(doing: RankActivity) -> None:
    """A declared phase has its own long limit, even if the steps are short."""
    rank = Rank()
    rank.train(1000, 0.01)
    assert not rank.do(doing, BUSY_S - 1.0)
    assert not rank.do(RankActivity.STEP, 0.01)


def test_a_watcher_that_was_held_up_counts_nothing() -> None:
    """Time during which the agent itself was suspended does not count for the rank."""
    rank = Rank()
    rank.train(ENOUGH + 2, 0.1)
    rank.begin(RankActivity.STEP)
    for _ in range(5):
        assert rank.pass_time(1.0) is None
        rank.now += 3600.0
        rank._next_look = rank.now
        assert not rank.is_late()
    assert rank.watch.elapsed_s(0) < LEAST_S


def test_a_step_that_was_broken_off_teaches_nothing() -> None:
    """If a regroup or the process's end interrupts a step, the tracker learns no duration."""
    rank = Rank()
    rank.train(ENOUGH + 2, 0.1)
    rank.begin(RankActivity.STEP)
    rank.pass_time(9.0)
    rank.begin(RankActivity.BETWEEN, meetings=1)  # before the next look
    rank.pass_time(0.1)
    rank.begin(RankActivity.STEP)
    rank.pass_time(9.0)
    rank.begin(RankActivity.OUTSIDE)
    rank.pass_time(1.0)
    rank.begin(RankActivity.STEP, meetings=1)
    assert rank.watch.limit_s(0, busy=True) == float("inf")  # the tracker has not looked yet
    late = rank.pass_time(100.0)
    assert late is not None
    assert late < LEAST_S + 1.0


@pytest.mark.parametrize("doing", [RankActivity.OUTSIDE, RankActivity.MEETING])
def test_nobody_is_late_where_others_set_the_limits(doing: RankActivity) -> None:
    """A rank in a meeting or outside of its Session is never late.

    The coordinator has its own limits for a meeting. The agent knows nothing about the script.
    """
    rank = Rank(look_s=1.0)
    assert not rank.do(doing, 10_000.0)


def test_a_rank_that_is_gone_is_forgotten() -> None:
    """If a rank disappears, its successor begins with zero elapsed time."""
    rank = Rank()
    rank.begin(RankActivity.BETWEEN)
    rank.pass_time(50.0)
    rank.watch.look({}, rank.now)
    assert rank.watch.elapsed_s(0) == 0.0
    assert rank.pass_time(50.0) is None


def activity(cpu_s: float, io_bytes: int = 0) -> dict[int, Activity]:
    return {0: Activity(cpu_s, io_bytes, "S")}


def test_processes_rest_while_they_neither_compute_nor_read_nor_write() -> None:
    """A process is idle if it neither computes nor reads nor writes.

    A few milliseconds of a timer do not count as activity; a printed line does.
    """
    rest = IdleTracker()
    rest.look(activity(1.0), 5.0)
    assert rest.rested_s(0) == 0.0
    rest.look(activity(1.0), 5.0)
    rest.look(activity(1.04), 5.0)
    assert rest.rested_s(0) == 10.0
    rest.look(activity(1.04, 7), 5.0)
    assert rest.rested_s(0) == 0.0
    rest.look(activity(1.04, 7), 5.0)
    rest.look(activity(2.0, 7), 5.0)
    assert rest.rested_s(0) == 0.0


def test_a_device_that_computes_by_itself_is_a_sign_of_life() -> None:
    """A varying utilisation of the device shows activity; a constant one, low or high, does not."""
    rest = IdleTracker()
    rest.look(activity(1.0), 5.0)
    for use in (100, 100, 99):
        rest.look(activity(1.0), 5.0, {0: use})
    assert rest.rested_s(0) == 15.0
    rest.look(activity(1.0), 5.0, {0: 60})
    assert rest.rested_s(0) == 0.0
    rest.look(activity(1.0), 5.0)
    rest.look(activity(1.0), 5.0, {0: 0})
    assert rest.rested_s(0) == 10.0


def test_what_a_look_itself_has_caused_is_no_sign_of_life() -> None:
    """Activity that the agent itself causes, such as written stacks, does not end the idle time."""
    rest = IdleTracker()
    for _ in range(3):
        rest.look(activity(1.0), 5.0)
    rest.overlook(0, activity(1.1, 4000)[0])
    rest.look(activity(1.1, 4000), 5.0)
    assert rest.rested_s(0) == 15.0
