"""Lists of numbers, sizes, and tables as text."""

from __future__ import annotations

import pytest

from rekindle.words import columns, listed, size


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((3,), "rank 3"),
        ((0, 1), "ranks 0, 1"),
        (range(16), "ranks 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15"),
        (range(1024), "ranks 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 and 1008 more"),
    ],
)
def test_many_numbers_are_counted(numbers: tuple[int, ...], text: str) -> None:
    assert listed("rank", numbers) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (999_600, "1 MB"), (2.5e15, "2.5e+03 TB")],
)
def test_bytes_have_the_unit_that_suits_them(count: float, text: str) -> None:
    assert size(count) == text


def test_a_column_is_as_wide_as_its_widest_cell() -> None:
    """A column has the width of its widest cell, and no line ends with spaces."""
    assert columns([("node", "state"), ("a", "lost"), ("host-10", "")]) == (
        "node     state\na        lost\nhost-10"
    )
