"""What entries are found by, and how a mistake in one is told."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from rekindle.recovery.faults.tables.code_format import ascend_keys


class Wrong(Exception):
    """What is wrong with a field of an entry, or with one element of it."""

    def __init__(self, field: str, problem: str, element: int | None = None) -> None:
        super().__init__(problem)
        self.field, self.problem, self.element = field, problem, element


class Key(NamedTuple):
    """What an entry is found by, and the field (and its element) where it is written."""

    key: Any
    field: str
    element: int


def keys_of(field: str, keys: Iterable[Any]) -> list[Key]:
    return [Key(key, field, element) for element, key in enumerate(keys)]


def keys_of_codes(codes: list[str]) -> list[Key]:
    return [
        Key(key, "codes", element)
        for element, code in enumerate(codes)
        for key in ascend_keys(code)
    ]


def check_codes(codes: list[str]) -> None:
    if not codes:
        raise Wrong("codes", "codes is empty; name at least one")
    for index, code in enumerate(codes):
        if not ascend_keys(code):
            problem = (
                "is no Ascend code: write 8 or 9 hexadecimal digits, a range of those (A-B), "
                "or [alarm,fault,peer,port] of a bus switch"
            )
            raise Wrong("codes", f"{code!r} {problem}", index)
