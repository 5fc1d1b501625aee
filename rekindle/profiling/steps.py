"""Compute the times of each step of a rank from its records. Pure.

In synchronous training a step takes the same time on all ranks, because the others wait for a slow
rank in a collective. Therefore the relevant time is a rank's own work: the step without its waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from rekindle.profiling.markers import COMMUNICATION, DATA_LOADER, FORWARD, SAVE, Range, group_of

MOST_LINKS = 16
_Span = tuple[int, int]  # nanoseconds since the epoch


class StepTimes(msgspec.Struct, frozen=True, gc=False):
    """Hold the seconds of one step of one rank.

    `own` is the rank's own work, with loading, but without saves inside the step. `waiting` is the
    time in collectives in which the rank did nothing else. It is 0 if the rank did not record
    collectives. `saving` is the time for which saves halted training since the previous step,
    including this step. `links` holds the time in each collective of each group, including the wait
    for others. The collective after the first MOST_LINKS adds to the first entry again, and so
    forth.
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
        """Return the own work without the wait for data."""
        return max(self.own - self.loading, 0.0)


class Steps:
    """Compute the steps of a rank from its ranges as they arrive."""

    def __init__(self) -> None:
        self._pending: list[Range] = []  # ranges since the previous step
        self._last = Range("", "", 0, 0)

    def read(self, ranges: Iterable[Range]) -> Iterator[StepTimes]:
        """Yield each step when it ends; a repeated step occurs once for each time that it ended.

        If both device and host record a step, the first record counts.
        """
        for span in ranges:
            if span.step < 0:
                self._pending.append(span)
            elif span.step == self._last.step and span.start < self._last.end:
                continue
            else:
                yield _times(span, self._pending)
                self._last, self._pending = span, []


def _times(step: Range, before: list[Range]) -> StepTimes:
    """Return the times of a step from the ranges since the previous step."""
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


def _waits(step: Range, collectives: list[Range]) -> list[_Span]:
    """Return the spans in which the rank only waited.

    If the rank joins another collective during a collective, it has worked in between. For example,
    it reduces gradients while earlier layers compute their own. Therefore it waits only after it
    has joined its last collective.
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
    """Return the seconds that these spans cover."""
    covered = until = 0
    for start, end in sorted(spans):
        covered += max(end - max(start, until), 0)
        until = max(until, end)
    return covered / 1e9
