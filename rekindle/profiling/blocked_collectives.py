"""Find the rank that has not joined a collective in which others wait, from the records. Pure.

The comparison counts the collectives of a group that each rank has joined since its last finished
step. It counts from there because profiling may have started in different steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from rekindle.profiling.markers import (
    COMMUNICATION,
    END,
    END_DEVICE,
    HOST,
    START,
    START_DEVICE,
    Marker,
    group_of,
    operation_of,
    step_of,
)
from rekindle.words import listed

_Place = tuple[int, int]  # the last finished step, and the number of collectives joined since


class CollectivePosition(msgspec.Struct, kw_only=True):
    """Hold the progress of a rank in its collectives.

    `step` is the last finished step. `joined` counts the collectives since then, by group. `groups`
    holds all groups in which the rank has appeared. `waits` is the group in whose collective the
    rank is, or empty. `doing` is the operation of that collective. `at` is the time of the newest
    record, in nanoseconds since the epoch. `since` is the time at which the generation was formed.
    Earlier records do not count.

    TaskD may record a range twice, with one Id: by the clocks of the host and of the device. Each
    range counts once. A collective lasts until its end on the device, because the host goes on
    while the device waits.
    """

    step: int = -1
    joined: dict[str, int] = {}
    groups: set[str] = set()
    waits: str = ""
    doing: str = ""
    at: int = 0
    since: int = 0
    process: int = 0
    open: int = -1  # the Id of the collective in which the rank is
    by_host: set[str] = set()  # the domains that the process records by the clock of the host
    by_device: bool = False  # the process records collectives by the clock of the device, too
    steps: dict[int, int] = {}  # the steps that have begun and not ended, by Id

    def place(self, group: str) -> _Place:
        """Return the last finished step and the number of joined collectives of a group."""
        return self.step, self.joined.get(group, 0)

    def read(self, marks: Iterable[Marker]) -> None:
        """Process new records of the rank."""
        for mark in marks:
            if mark.timestamp < self.since:
                continue
            self.at = max(self.at, mark.timestamp)
            process = mark.mspti_object_id.pt.process_id
            if process != self.process:  # another process has replaced it
                self.process, self.by_host, self.by_device, self.steps = process, set(), False, {}
                self._begin()
            if mark.flag in (START, START_DEVICE):
                self._start(mark)
            elif mark.flag in (END, END_DEVICE):
                self._end(mark)

    def formed(self, at: int) -> None:
        """Start a new generation: the rank is not in a collective any longer."""
        if at != self.since:
            self.since = at
            self._begin()

    def _begin(self) -> None:
        self.joined, self.waits, self.open = {}, "", -1

    def _start(self, mark: Marker) -> None:
        if mark.source_kind == HOST:
            self.by_host.add(mark.domain)
        else:
            self.by_device |= mark.domain == COMMUNICATION
            if mark.domain in self.by_host:
                return  # the host has recorded it already
        if (step := step_of(mark.name)) >= 0:
            self.steps[mark.id] = step
        group, operation = group_of(mark.name), operation_of(mark.name)
        if mark.domain != COMMUNICATION or not group or operation is None:
            return
        self.groups.add(group)
        self.joined[group] = self.joined.get(group, 0) + 1
        self.waits, self.doing, self.open = group, operation.op_name, mark.id

    def _end(self, mark: Marker) -> None:
        """Process the end of a range; its name and domain may differ from those of its start."""
        if mark.id == self.open and (mark.source_kind != HOST or not self.by_device):
            self.waits = ""
        step = self.steps.pop(mark.id, -1)  # the second end of a range ends nothing
        if step >= 0:
            self.step = step
            self._begin()


class Stuck(msgspec.Struct, frozen=True, kw_only=True):
    """Describe a collective of a group in which ranks wait for others.

    `step` is the current step. `number` is the position of the collective in that step and group,
    from 1.
    """

    group: str
    doing: str
    step: int
    number: int
    waiting: tuple[int, ...]
    missing: tuple[int, ...]

    def in_words(self) -> str:
        """Return the text: which ranks wait, and which ranks are missing."""
        which = f"{self.doing} no. {self.number} of {self.group} in step {self.step}"
        waiting, missing = listed("rank", self.waiting), listed("rank", self.missing)
        return f"{waiting} in {which}, which {missing} did not join"


def stuck(positions: Mapping[int, CollectivePosition]) -> list[Stuck]:
    """Return each collective that some ranks of its group have joined, and others have not.

    The result omits a group whose ranks have all joined. In that case the link is broken, or the
    ranks call different operations.
    """
    found = []
    for group in sorted({each.waits for each in positions.values()} - {""}):
        members = {rank: each for rank, each in positions.items() if group in each.groups}
        furthest = max(each.place(group) for each in members.values() if each.waits == group)
        waiting = [r for r, each in members.items() if each.place(group) >= furthest]
        missing = [r for r, each in members.items() if each.place(group) < furthest]
        if missing:
            step, number = furthest
            found.append(
                Stuck(
                    group=group,
                    doing=members[waiting[0]].doing,
                    step=step + 1,
                    number=number,
                    waiting=tuple(sorted(waiting)),
                    missing=tuple(sorted(missing)),
                )
            )
    return found
