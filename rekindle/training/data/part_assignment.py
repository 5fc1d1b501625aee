"""Which parts of a stream each reader reads, one after the other: pure, and alike on all ranks.

The parts of all epochs are one endless queue of items: first those of epoch 0, then those of epoch
1, and so on. They are dealt to the readers in turn, and each reader reads its items from beginning
to end. How long an item is, nobody knows before its end. When the number of readers changes, what
is left is dealt anew: items that were begun go on where their reader stood, and those that a fast
reader would have passed come before all that is untouched. So every sample comes exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Item(NamedTuple):
    """A part in one epoch, by its number in the queue; `start`: samples of it that are trained."""

    number: int
    start: int


class Mark(NamedTuple):
    """How far a reader has come: in the how manieth of its items, and behind how many samples."""

    turn: int
    start: int


@dataclass(frozen=True, slots=True)
class Deal:
    """Items for so many readers.

    left: those that are not finished, and of which somebody knows, in ascending order.
    fresh: from this number on nobody has had any.
    """

    left: tuple[Item, ...]
    fresh: int
    readers: int

    def item(self, reader: int, turn: int) -> Item:
        """The n-th item of a reader, from 0."""
        place = reader + turn * self.readers
        if place < len(self.left):
            return self.left[place]
        return Item(self.fresh + place - len(self.left), 0)

    def beginning(self) -> list[Mark]:
        """Where the readers begin."""
        return [Mark(0, self.item(reader, 0).start) for reader in range(self.readers)]

    def again(self, marks: Sequence[Mark], readers: int) -> Deal:
        """Deal what is left behind these marks to so many readers."""
        begun = max(reader + mark.turn * self.readers for reader, mark in enumerate(marks)) + 1
        dealt = max(begun, len(self.left))
        done = min(mark.turn for mark in marks) * self.readers
        left = []
        for place in range(done, dealt):
            turn, reader = divmod(place, self.readers)
            mark, item = marks[reader], self.item(reader, turn)
            if turn == mark.turn:
                left.append(Item(item.number, mark.start))
            elif turn > mark.turn:
                left.append(item)
        return Deal(tuple(sorted(left)), self.fresh + dealt - len(self.left), readers)

    def ahead(self, marks: Sequence[Mark]) -> int:
        """How many items the foremost reader is ahead of one that nobody has begun."""
        places = range(self.readers)
        foremost = max(self.item(reader, marks[reader].turn).number for reader in places)
        waiting = min(self.item(reader, marks[reader].turn + 1).number for reader in places)
        return foremost - waiting
