"""Find faults that are worse than their code, because they are frequent or last long. Pure.

The rules are those of MindCluster's device plugin. All times are seconds on one clock. A history
belongs to one device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from rekindle.recovery.faults.tables.rows import DurationRow, FrequencyRow


class Change(msgspec.Struct, frozen=True):
    """Record that a fault code of a device was reported at a time, or, not `present`, had ended."""

    code: str
    at: float
    present: bool = True


class Separated(msgspec.Struct, frozen=True):
    """Hold when a frequency rule last applied, and the `times` of the code that caused it."""

    since: float
    times: tuple[float, ...]


def in_order(changes: Iterable[Change], now: float) -> list[Change]:
    """Return the changes up to `now` by time; repeated reports count once.

    If a fault occurs and ends at the same time, the end is last, because such a fault is instant.
    """
    known = {(change.at, not change.present): change for change in changes if change.at <= now}
    return [known[key] for key in sorted(known)]


def too_long(rule: DurationRow, changes: Sequence[Change], now: float) -> tuple[bool, list[float]]:
    """Return whether the code lasts too long at `now`, and the times when that started.

    `changes` holds the changes of one code, `in_order`. A gap of at most `clear_after_s` does not
    end the period.
    """
    began: list[float] = []
    lasting = False
    # the last change of state: occurred (not lasting) or ended (lasting)
    since: float | None = None

    def pass_time(until: float) -> None:
        nonlocal lasting, since
        if since is None:
            return
        if not lasting and until - since > rule.after_s:
            lasting = True
            began.append(since + rule.after_s)
            since = None
        elif lasting and until - since > rule.clear_after_s:
            lasting, since = False, None

    for change in changes:
        pass_time(change.at)
        if change.present == lasting:
            since = None
        elif since is None:
            since = change.at
    pass_time(now)
    return lasting, began


def too_often(
    rule: FrequencyRow, times: Sequence[float], gone: Sequence[float], now: float
) -> Separated | None:
    """Return the separation of a device at `now`, because the code occurred too often, or None.

    `times` holds when the code occurred, and `gone` when it ended, both ascending. The window is
    closed: two occurrences exactly `window_s` apart are within it. Occurrences that led to a
    separation do not count for another.
    """
    recent: deque[float] = deque()
    separated: Separated | None = None
    changes = sorted([*((at, True) for at in times), *((at, False) for at in gone)])
    last = None
    for at, came in changes:
        if separated and _released(rule, last, at):
            separated = None
        last = at
        if not came:
            continue
        recent.append(at)
        while recent[0] < at - rule.window_s:
            recent.popleft()
        if len(recent) >= rule.times:
            separated = Separated(at, tuple(recent))
            recent.clear()
    return None if separated and _released(rule, last, now) else separated


def _released(rule: FrequencyRow, last: float | None, at: float) -> bool:
    return rule.release_s is not None and last is not None and at - last > rule.release_s
