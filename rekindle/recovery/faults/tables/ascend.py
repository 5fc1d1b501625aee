"""Fault codes of Ascend chips, their ports, bus switches and nodes, and public faults."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from rekindle.recovery.faults.fault import Kind
from rekindle.recovery.faults.tables.code_format import ascend_key, is_chip_code, shown
from rekindle.recovery.faults.tables.defaults import judge, unlisted
from rekindle.recovery.faults.tables.escalation import Change, in_order, too_long, too_often
from rekindle.recovery.faults.tables.loading import Rows
from rekindle.recovery.faults.tables.rows import AscendRow, Row
from rekindle.recovery.faults.tables.rules import DurationRow, FrequencyRow
from rekindle.recovery.faults.tables.verdict import Origin, Severity, Urgency, Verdict


class AscendCodes:
    """The entries for Ascend codes, and the rules of how often and how long."""

    def __init__(self, rows: Rows) -> None:
        self._levels = {name: row for (of, name), row in rows.levels.items() if of == "ascend"}
        self._codes: dict[Any, AscendRow] = rows.by_key["ascend"]
        self._frequency: dict[Any, FrequencyRow] = rows.by_key["frequency"]
        self._duration: dict[Any, DurationRow] = rows.by_key["duration"]

    def listed(self, code: str) -> Verdict | None:
        """Judge a code that has an entry; None: it has none."""
        key = ascend_key(code)
        row = self._codes.get(key)
        return self._judge(row, self._spelling(key, code), row.level, row.says) if row else None

    def unlisted(self, code: str, severity: Severity | None, origin: Origin) -> Verdict:
        """Judge a code without an entry as MindCluster does.

        Chips and their ports: by severity. Public faults (9 digits), bus switches and nodes:
        ClusterD, the device plugin and NodeD pass over what they do not list.
        """
        if not is_chip_code(code) or origin is Origin.NODE:
            text = f"Ascend fault code {shown(code)}: no table lists it, so it is passed over"
            return unlisted(Kind.UNKNOWN, text, Urgency.NONE)
        kind, level = Kind.DEVICE, "SeparateNPU"
        if origin is Origin.NETWORK:
            kind, level = Kind.LINK, "PreSeparateNPU"
        elif severity is not None and severity <= Severity.MINOR:
            level = "NotHandleFault"
        rank = "of unknown severity" if severity is None else f"of severity {severity.name.lower()}"
        verdict = self._judge(
            Row(kind=kind), shown(code), level, f"no table lists it; it is {rank}"
        )
        return msgspec.structs.replace(verdict, listed=False)

    def escalated(self, changes: Iterable[Change], now: float) -> list[Verdict]:
        """Judge the history of one device: codes that came too often, or have stayed too long."""
        by_key: dict[Any, list[Change]] = {}
        for change in changes:
            key = ascend_key(change.code)
            if key in self._duration or key in self._frequency:
                by_key.setdefault(key, []).append(change)
        return [
            self._judge(self._fault(key), self._spelling(key, own[0].code), level, why)
            for key, own in by_key.items()
            for level, why in self._reasons(key, in_order(own, now), now)
        ]

    def _reasons(self, key: Any, changes: list[Change], now: float) -> Iterator[tuple[str, str]]:
        """Yield the level of each rule that holds, and why it does."""
        came = [change.at for change in changes if change.present]
        gone = [change.at for change in changes if not change.present]
        if lasts := self._duration.get(key):
            # What counts then is how often it stayed too long, not how often it came.
            lasting, came = too_long(lasts, changes, now)
            if lasting:
                yield lasts.level, f"it has lasted for more than {lasts.after_s:g} s"
        if repeats := self._frequency.get(key):
            if separated := too_often(repeats, came, gone, now):
                times = f"{len(separated.times)} times within {repeats.window_s:g} s"
                yield repeats.level, f"it came {times}"

    def _spelling(self, key: Any, code: str) -> str:
        row = self._codes.get(key)
        return row.spelling(key) if row else shown(code)

    def _fault(self, key: Any) -> Row:
        """Give what the fault is, without what its own level asks for."""
        row = self._codes.get(key)
        return Row(kind=row.kind, user_caused=row.user_caused) if row else Row()

    def _judge(self, row: Row, code: str, level: str, why: str) -> Verdict:
        meaning = self._levels[level]
        text = f"Ascend fault code {code} ({level}): {why or meaning.says}"
        return judge(row, text, code=code, level=meaning)
