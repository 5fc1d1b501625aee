"""Format lists of ranks, nodes or steps, numbers of bytes, and tables."""

from __future__ import annotations

from collections.abc import Sequence

MOST = 16  # largest count of numbers that a list shows


def listed(noun: str, numbers: Sequence[int]) -> str:
    """Return e.g. "rank 3" or "ranks 0, 1, 5"; the first MOST numbers and a count of the rest."""
    shown = ", ".join(map(str, numbers[:MOST]))
    more = f" and {len(numbers) - MOST} more" if len(numbers) > MOST else ""
    return f"{noun}{'s' * (len(numbers) > 1)} {shown}{more}"


def known(number: int | None) -> str:
    """Return a number as text; "unknown" for None."""
    return "unknown" if number is None else str(number)


def size(count: float) -> str:
    """Return a number of bytes in about three digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if count >= 100 or unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Return the rows as lines, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
    return "\n".join(lines)
