"""Which rank has not joined a collective that others wait in, by what they have written down. Pure.

Ranks are compared by how many collectives of a group they have joined since the last step that
they have finished: profiling may have begun in different steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from rekindle.profiling.markers import (
    COMMUNICATION,
    END,
    END_DEVICE,
    START,
    Marker,
    group_of,
    operation_of,
    step_of,
)
from rekindle.words import listed

_Place = tuple[int, int]  # the last step that was finished, and collectives joined since


class CollectivePosition(msgspec.Struct, kw_only=True):
    """Where a rank stands.

    step: the last one that it has finished; joined: collectives since, by group; groups: all that
    it has ever been seen in. waits: the name of the group in whose collective it is, empty: in
    none; doing: what that is; at: of its newest record, nanoseconds since the epoch. since: when
    its generation was formed; what it did before does not count.
    """

    step: int = -1
    joined: dict[str, int] = {}
    groups: set[str] = set()
    waits: str = ""
    doing: str = ""
    at: int = 0
    since: int = 0
    process: int = 0
    open: int = -1  # the Id of that collective

    def place(self, group: str) -> _Place:
        """Return how far it is with that group's collectives."""
        return self.step, self.joined.get(group, 0)

    def read(self, marks: Iterable[Marker]) -> None:
        """Take in what the rank has written."""
        for mark in marks:
            if mark.timestamp < self.since:
                continue
            self.at = max(self.at, mark.timestamp)
            process = mark.mspti_object_id.pt.process_id
            if process != self.process:  # another one took its place
                self.process = process
                self._begin()
            step = step_of(mark.name) if mark.flag in (END, END_DEVICE) else -1
            if step >= 0:
                self.step = step
                self._begin()
            elif mark.domain == COMMUNICATION:
                self._communicate(mark)

    def formed(self, at: int) -> None:
        """A generation was formed: whatever was under way is over."""
        if at != self.since:
            self.since = at
            self._begin()

    def _begin(self) -> None:
        self.joined, self.waits, self.open = {}, "", -1

    def _communicate(self, mark: Marker) -> None:
        if mark.flag in (END, END_DEVICE) and mark.id == self.open:
            self.waits = ""
        if mark.flag != START:  # a device that begins it is not done with it
            return
        group = group_of(mark.name)
        operation = operation_of(mark.name)
        if not group or operation is None:
            return
        self.groups.add(group)
        self.joined[group] = self.joined.get(group, 0) + 1
        self.waits, self.doing, self.open = group, operation.op_name, mark.id


class Stuck(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks wait in a collective of a group, and others have not joined it.

    step: the one that they are in; number: of the collective in it, in this group, from 1.
    """

    group: str
    doing: str
    step: int
    number: int
    waiting: tuple[int, ...]
    missing: tuple[int, ...]

    def in_words(self) -> str:
        """Say who waits, and for whom."""
        which = f"{self.doing} no. {self.number} of {self.group} in step {self.step}"
        waiting, missing = listed("rank", self.waiting), listed("rank", self.missing)
        return f"{waiting} in {which}, which {missing} did not join"


def stuck(standings: Mapping[int, CollectivePosition]) -> list[Stuck]:
    """Return each collective that some ranks of its group have joined, and others have not.

    Of a group whose ranks have all joined, nothing is said: their link is what is broken, or they
    do different things in it.
    """
    found = []
    for group in sorted({each.waits for each in standings.values()} - {""}):
        members = {rank: each for rank, each in standings.items() if group in each.groups}
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
