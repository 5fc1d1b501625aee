"""The assignment of a stream's parts: in every sequence of worlds, each sample occurs once."""

from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rekindle.training.torch.data.elastic_stream import Item, Mark, PartAssignment

# The world's size and the steps done in it, several times.
WORLDS = st.lists(st.tuples(st.integers(1, 7), st.integers(0, 25)), min_size=1, max_size=6)


def read(
    assignment: PartAssignment, marks: list[Mark], reader: int, count: int, sizes: list[int]
) -> list[tuple[int, int]]:
    """Read `count` samples like a reader, and move its mark; return (item, place in it)."""
    seen: list[tuple[int, int]] = []
    for turn in itertools.count(marks[reader].turn):
        item = assignment.item(reader, turn)
        start = marks[reader].start if turn == marks[reader].turn else item.start
        for place in range(start, sizes[item.number % len(sizes)]):
            seen.append((item.number, place))
            if len(seen) == count:
                marks[reader] = Mark(turn, place + 1)
                return seen
    raise AssertionError


@given(WORLDS, st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any), st.integers(1, 5))
def test_every_sample_comes_once(
    worlds: list[tuple[int, int]], sizes: list[int], batch: int
) -> None:
    """Readers read each sample at most once; the next assignment has exactly the unread ones."""
    # A reader that has only empty parts would search without end, so no part is empty here.
    sizes = [max(1, size) for size in sizes]
    assignment, seen = PartAssignment((), 0, worlds[0][0]), []
    marks = assignment.beginning()
    for readers, steps in worlds:
        assignment = assignment.again(marks, readers)
        marks = assignment.beginning()
        for _ in range(steps):
            for reader in range(readers):
                seen += read(assignment, marks, reader, batch, sizes)
            if assignment.ahead(marks) > len(sizes):
                assignment = assignment.again(marks, readers)
                marks = assignment.beginning()
                assert assignment.ahead(marks) <= 0
    assert max(Counter(seen).values(), default=0) <= 1
    assignment = assignment.again(marks, 1)
    rest = {item.number: item.start for item in assignment.left}
    for number in range(assignment.fresh):
        read_so_far = {place for item, place in seen if item == number}
        assert read_so_far == set(range(rest.get(number, sizes[number % len(sizes)])))
    assert all(number < assignment.fresh for number, _ in seen)


def test_unfinished_items_come_first() -> None:
    """A new assignment first has the unfinished items, in ascending order, then new ones."""
    assignment = PartAssignment((), 0, 4).again([Mark(1, 5), Mark(0, 2), Mark(0, 0), Mark(2, 1)], 2)
    # From 0 to 11, the readers have finished 0, 3 and 7, and have begun 1, 4 and 11.
    assert assignment.left[:5] == (Item(1, 2), Item(2, 0), Item(4, 5), Item(5, 0), Item(6, 0))
    assert assignment.left[5:] == (Item(8, 0), Item(9, 0), Item(10, 0), Item(11, 1))
    assert assignment.fresh == 12
    assert [assignment.item(1, turn) for turn in (0, 4, 5)] == [
        Item(2, 0),
        Item(12, 0),
        Item(14, 0),
    ]


def test_ahead_is_told_of_items_that_wait() -> None:
    """`ahead` is the distance from the foremost reader to the first item that no reader began."""
    assignment = PartAssignment((), 0, 2)
    assert assignment.ahead(assignment.beginning()) == -1
    assert assignment.ahead([Mark(0, 9), Mark(4, 0)]) == 7
