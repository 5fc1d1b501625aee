"""What a rank did in each step, from its records. Pure.

In synchronous training a step takes all ranks the same time: who is slow is waited for by the
others, in a collective. So what counts is a rank's own work: the step without its waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from rekindle.profiling.markers import COMMUNICATION, DATA_LOADER, FORWARD, SAVE, Range, group_of

MOST_LINKS = 16


class StepTimes(msgspec.Struct, frozen=True, gc=False):
    """Seconds of one step of one rank.

    own: its own work, with loading, without saves inside the step. waiting: in collectives, while
    it did nothing else; 0 where collectives were not recorded. saving: training stood still for,
    since the step before, in this one as well. links: in each collective of each group, with what
    was waited for others there; of more than MOST_LINKS the next one adds to the first again.
    """

    step: int
    start: int  # nanoseconds since the epoch
    seconds: float
    own: float
    waiting: float = 0.0
    loading: float = 0.0
    forward: float = 0.0
    saving: float = 0.0
    links: tuple[tuple[str, tuple[float, ...]], ...] = ()

    @property
    def compute(self) -> float:
        """Own work without waiting for data."""
        return max(self.own - self.loading, 0.0)


class Steps:
    """The steps of a rank, as its ranges come."""

    def __init__(self) -> None:
        self._pending: list[Range] = []  # since the step before
        self._last = Range("", "", 0, 0)

    def read(self, ranges: Iterable[Range]) -> Iterator[StepTimes]:
        """Yield each step as it ends; of one that was done again each time that it ended well.

        One that device and host tell of is told by whoever does so first.
        """
        for made in ranges:
            if made.step < 0:
                self._pending.append(made)
            elif made.step == self._last.step and made.start < self._last.end:
                continue
            else:
                yield _times(made, self._pending)
                self._last, self._pending = made, []


def step_times(ranges: Iterable[Range]) -> Iterator[StepTimes]:
    """Yield all steps of a rank."""
    return Steps().read(ranges)


def _times(step: Range, before: list[Range]) -> StepTimes:
    """What a rank did in a step, of all that it has done since the step before."""
    inside = [each for each in before if step.start <= each.start < step.end]
    collectives = [each for each in inside if each.domain == COMMUNICATION]
    waits = _waits(step, collectives)
    saves = [(each.start, min(each.end, step.end)) for each in inside if each.name == SAVE]
    return StepTimes(
        step=step.step,
        start=step.start,
        seconds=step.seconds,
        own=step.seconds - _covered([*waits, *saves]),  # ranks may wait for each other in a save
        waiting=_covered(waits),
        loading=sum(each.seconds for each in inside if each.name == DATA_LOADER),
        forward=sum(each.seconds for each in inside if each.name == FORWARD),
        saving=sum(each.seconds for each in before if each.name == SAVE),
        links=_links(collectives),
    )


def _links(collectives: list[Range]) -> tuple[tuple[str, tuple[float, ...]], ...]:
    found: dict[str, list[float]] = {}
    for each in collectives:
        group = group_of(each.name)
        if group:
            found.setdefault(group, []).append(each.seconds)
    return tuple(
        (
            group,
            tuple(sum(seconds[first::MOST_LINKS]) for first in range(MOST_LINKS)[: len(seconds)]),
        )
        for group, seconds in found.items()
    )


_Span = tuple[int, int]  # nanoseconds since the epoch


def _waits(step: Range, collectives: list[Range]) -> list[_Span]:
    """When the rank did nothing but wait.

    While a collective is under way and the rank joins another, it has worked meanwhile: gradients
    are reduced while earlier layers compute theirs. So it waits only from its last joining on.
    """
    waits, last = [], 0
    collectives.sort(key=lambda each: each.start)
    for index, each in enumerate(collectives):
        joins_next = collectives[index + 1].start if index + 1 < len(collectives) else step.end
        last = max(last, each.end)
        end = min(last, step.end)
        if end <= joins_next:
            waits.append((each.start, end))
    return waits


def _covered(spans: list[_Span]) -> float:
    """Seconds in any of these."""
    covered = until = 0
    for start, end in sorted(spans):
        covered += max(end - max(start, until), 0)
        until = max(until, end)
    return covered / 1e9
