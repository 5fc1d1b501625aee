"""Sets of indexes in the format of a Job's status, for example `0-2,5`."""

from __future__ import annotations

from collections.abc import Iterable


def parse(text: str | None) -> set[int]:
    found: set[int] = set()
    for part in (text or "").split(","):
        first, dash, last = part.partition("-")
        if dash:
            found |= set(range(int(first), int(last) + 1))
        elif first:
            found.add(int(first))
    return found


def in_words(indexes: Iterable[int]) -> str:
    parts: list[str] = []
    run: list[int] = []
    for index in [*sorted(indexes), None]:
        if index is not None and run and index == run[-1] + 1:
            run.append(index)
            continue
        if run:
            # Two consecutive indexes are listed, three or more are a range.
            if len(run) == 1:
                parts.append(str(run[0]))
            elif len(run) == 2:
                parts += [str(run[0]), str(run[1])]
            else:
                parts.append(f"{run[0]}-{run[-1]}")
        run = [] if index is None else [index]
    return ",".join(parts)
