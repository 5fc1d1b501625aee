"""Faults that are worse than their code says, since they come often or stay long. Pure.

The rules are those of MindCluster's device plugin. All times are seconds on one clock, and a
history is that of one device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from rekindle.recovery.faults.tables.rows import DurationRow, FrequencyRow


class Change(msgspec.Struct, frozen=True):
    """A fault code was reported for a device at a time, or, not `present`, was gone again."""

    code: str
    at: float
    present: bool = True


class Separated(msgspec.Struct, frozen=True):
    """When a frequency rule came true last, and the `times` of the code that did it."""

    since: float
    times: tuple[float, ...]


def in_order(changes: Iterable[Change], now: float) -> list[Change]:
    """Sort the changes up to `now` by time; what was reported twice counts once.

    Where a fault comes and goes at the same time, it went last: such a fault was an instant one.
    """
    known = {(change.at, not change.present): change for change in changes if change.at <= now}
    return [known[key] for key in sorted(known)]


def too_long(rule: DurationRow, changes: Sequence[Change], now: float) -> tuple[bool, list[float]]:
    """Say whether the code is present for too long at `now`, and all times when that began.

    changes: those of one code, `in_order`. A gap of at most `clear_after_s` ends nothing.
    """
    began: list[float] = []
    lasting = False
    since: float | None = None  # the last change of state: came (not lasting) or went (lasting)

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
    """Say whether a device is to be kept apart at `now`, since the code came too often.

    times: when the code came, ascending; gone: when it went, ascending. The window is closed: two
    occurrences just `window_s` apart are within it. What led to a separation counts to no other.
    """
    recent: deque[float] = deque()
    separated: Separated | None = None
    seen = sorted([*((at, True) for at in times), *((at, False) for at in gone)])
    last = None
    for at, came in seen:
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
