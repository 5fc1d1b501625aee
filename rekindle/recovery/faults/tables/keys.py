"""Define the keys of entries, and the spellings of Ascend fault codes."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

# Hexadecimal: 8 digits (chip, node) or 9 (public); or a bus switch with its fault, peer and port.
_CODE = re.compile(r"(?:0x)?([0-9a-f]{8,9})", re.IGNORECASE)
_SWITCH = re.compile(r"\[0x[0-9a-f]{8},(?:\d+|na),(?:cpu|npu|l2|na),(?:\d+|na)\]", re.IGNORECASE)

# A range with more codes than this is a mistake.
_LONGEST_RANGE = 4096


def ascend_key(code: str) -> int | str | None:
    """Return the canonical form of a code, in which equal codes are equal; None: not a code.

    Case, 0x, spaces and leading zeros do not matter, because the device plugin reads codes as
    numbers.
    """
    plain = code.replace(" ", "")
    if match := _CODE.fullmatch(plain):
        return int(match[1], 16)
    return plain.lower() if _SWITCH.fullmatch(plain) else None


def ascend_keys(codes: str) -> list[int | str]:
    """Return the keys of an entry's text: a code, or all codes of a range (A-B).

    The result is empty for other texts.
    """
    first, _, last = codes.partition("-")
    begin = ascend_key(first)
    if begin is None or not last:
        return [] if begin is None else [begin]
    end = ascend_key(last)
    if not isinstance(begin, int) or not isinstance(end, int):
        return []
    return list(range(begin, end + 1)) if 0 <= end - begin < _LONGEST_RANGE else []


def shown(code: str) -> str:
    """Return the maker's spelling of a code: capitals without 0x, but lower case for a switch."""
    plain = code.replace(" ", "")
    return plain.lower() if plain.startswith("[") else plain.upper().removeprefix("0X")


def is_chip_code(code: str) -> bool:
    """Return whether the code has the form of a chip's or node's code: 8 digits."""
    return ascend_key(code) is not None and len(shown(code)) == 8


class AscendCode(str):
    """Hold the text of a code, or of a range A-B. Raises ValueError: the text is neither."""

    def __new__(cls, text: str) -> AscendCode:
        if not ascend_keys(text):
            raise ValueError(
                f"{text!r} is not an Ascend code; write 8 or 9 hexadecimal digits, a range of "
                "codes (A-B), or [alarm,fault,peer,port] of a bus switch"
            )
        return super().__new__(cls, text)


class Key(NamedTuple):
    """Hold the key of an entry, and the field and element that contain it."""

    key: Any
    field: str
    element: int
