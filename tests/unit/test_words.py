"""Numbers in words."""

from __future__ import annotations

import pytest

from rekindle.words import listed


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
