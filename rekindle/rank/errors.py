"""Exceptions of a step: their chain, their text for a message, and the memory that they hold."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator

_LONGEST_TEXT = 500  # characters
_CANN = re.compile(r"\bE[A-Z]\d{4}\b|\bERR\d{5}\b")


class UnusableError(Exception):
    """Only a new process can use the device of this rank again."""


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, then each error that it came from: a script may wrap an error."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__ or each.__context__


def text_of(error: BaseException) -> str:
    """Return the type and the first line of an error, and its lines with codes of CANN.

    In at most 500 characters.
    """
    first, *rest = str(error).splitlines() or [""]
    lines = [first, *(line.strip() for line in rest if _CANN.search(line))]
    return f"{type(error).__name__}: {' / '.join(lines)}".removesuffix(": ")[:_LONGEST_TEXT]


def free_frames(error: BaseException) -> None:
    """Free what the functions of the broken step hold, above all its activations.

    A torch.futures.Future that raised an error keeps it in a cycle that the garbage collector does
    not see (torch 2.13). The cycle also keeps each frame that the error passed through.
    """
    for each in chain_of(error):
        traceback.clear_frames(each.__traceback__)  # skips frames that still run
