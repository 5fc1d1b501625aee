"""The place in a file to which an error of a struct refers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rekindle.user_file import FieldError, Place, place_of


class Pair(msgspec.Struct):
    """Two numbers in ascending order."""

    numbers: list[int]

    def __post_init__(self) -> None:
        if self.numbers != sorted(self.numbers):
            raise FieldError("the smaller one first", "numbers", 0)


class Pairs(msgspec.Struct, forbid_unknown_fields=True):
    """Some pairs."""

    pairs: list[Pair] = []


@pytest.mark.parametrize(
    ("values", "problem", "place"),
    [
        (3, "Expected `object`, got `int`", ()),
        ({"colour": 3}, "Object contains unknown field `colour`", ()),
        ({"pairs": [3]}, "Expected `object`, got `int`", ("pairs", 0)),
        ({"pairs": [{"numbers": [""]}]}, "Expected `int`, got `str`", ("pairs", 0, "numbers", 0)),
        ({"pairs": [{"numbers": [2, 1]}]}, "the smaller one first", ("pairs", 0, "numbers", 0)),
    ],
)
def test_the_place_leads_from_the_outermost_struct(values: Any, problem: str, place: Place) -> None:
    """The place of an error starts with the outermost struct, also for a struct's own check."""
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(values, Pairs)
    assert place_of(caught.value) == (problem, place)
