"""Combine all fault tables, including the shipped table of Ascend codes."""

from __future__ import annotations

import functools
import re
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from rekindle.recovery.faults.fault import SICK, Exit, FaultKind
from rekindle.recovery.faults.tables.escalation import Change, in_order, too_long, too_often
from rekindle.recovery.faults.tables.keys import ascend_key, is_chip_code, shown
from rekindle.recovery.faults.tables.loading import Rows, load
from rekindle.recovery.faults.tables.rows import (
    AscendRow,
    DurationRow,
    FrequencyRow,
    LevelRow,
    PatternRow,
    Row,
    XidRow,
)
from rekindle.recovery.faults.tables.verdict import (
    Blame,
    FaultOrigin,
    Severity,
    Urgency,
    Verdict,
    unlisted,
)
from rekindle.recovery.policy.dialect import Dialect

# Number of characters of a text to search: half from its start and half from its end. The output of
# a failing program has no bound, and the cause is at one end or the other.
LONGEST = 65_536

_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-f:.]{1,32})\): (\d{1,4})\b", re.IGNORECASE)
_EVENT = re.compile(r"event[ _]id\s{0,4}[=:]\s{0,4}\[?0x([0-9a-f]{8,9})\b", re.IGNORECASE)

# An exception's message, "TYPE: TEXT", and the types by which Python, torch, torchrun, MindSpore,
# CuPy, Ray, NVML and clients of services report a fault of the system. `Connect`:
# ConnectionResetError of Python, ConnectError of httpx, ClientConnectorError of aiohttp.
_TYPED = re.compile(r"(?:\w{1,64}\.){0,8}[A-Z]\w{0,64}[a-z]\w{0,64}: ")
_OF_SYSTEM = re.compile(
    r"(?:^|[\s.])(?:\w{0,32}RuntimeError|\w{0,32}OSError|IOError|SystemError|TimeoutError"
    r"|BrokenPipeError|AcceleratorError|CudaError|Deferred\w{1,16}CallError|ChildFailedError"
    r"|DistError|Dist(?:Backend|Network|Store)Error|NVMLError\w{0,64}|MaxRetryError|URLError"
    r"|ProtocolError|ChunkedEncodingError|Actor\w{1,16}Error|CheckpointError"
    r"|\w{0,64}Connect\w{0,64}): "
)
_OF_HARDWARE = (FaultKind.LINK, *SICK)

# The levels of a chip's code without an entry, by its severity. In the document, notices need
# nothing, minor and major faults can heal, and critical ones cannot. None: the severity is unknown.
_BY_DOCUMENT = {
    Severity.NOTICE: "NotHandleFault",
    Severity.MINOR: "RestartNPU",
    Severity.MAJOR: "RestartNPU",
    Severity.CRITICAL: "SeparateNPU",
    None: "SeparateNPU",
}
_BY_MINDCLUSTER = _BY_DOCUMENT | {Severity.MINOR: "NotHandleFault", Severity.MAJOR: "SeparateNPU"}

# An empty level: training cannot continue, and the place at fault is unknown.
_PLAIN = LevelRow(source="", name="", urgency=Urgency.NOW, says="")


class AscendCodes:
    """Hold the entries for Ascend codes, and the rules for frequency and duration.

    The rules are those of the dialect.
    """

    def __init__(self, rows: Rows, dialect: Dialect) -> None:
        self._by_mindcluster = dialect is Dialect.MINDCLUSTER
        self._levels = {name: row for (of, name), row in rows.levels.items() if of == "ascend"}
        self._codes: dict[Any, AscendRow] = rows.by_key["ascend"]
        self._frequency: dict[Any, FrequencyRow] = {
            key: row
            for key, row in rows.by_key["frequency"].items()
            if row.dialect in (None, dialect)
        }
        self._duration: dict[Any, DurationRow] = rows.by_key["duration"]

    def listed(self, code: str) -> Verdict | None:
        """Return the verdict on a code with an entry, or None."""
        key = ascend_key(code)
        row = self._codes.get(key)
        return self._judge(row, self._spelling(key, code), row.level, row.says) if row else None

    def unlisted(self, code: str, severity: Severity | None, origin: FaultOrigin) -> Verdict:
        """Return the verdict on a code without an entry.

        Severity decides for chips. As in MindCluster, a port gets no new work, and unlisted public
        faults (9 digits) and faults of bus switches and nodes are ignored.
        """
        if not is_chip_code(code) or origin is FaultOrigin.NODE:
            text = f"Ascend fault code {shown(code)}: no table lists it, so Rekindle ignores it"
            return unlisted(FaultKind.UNKNOWN, text, Urgency.NONE)
        if origin is FaultOrigin.NETWORK:
            kind, level = FaultKind.LINK, "PreSeparateNPU"
        else:
            kind = FaultKind.DEVICE
            level = (_BY_MINDCLUSTER if self._by_mindcluster else _BY_DOCUMENT)[severity]
        rank = "of unknown severity" if severity is None else f"of severity {severity.name.lower()}"
        verdict = self._judge(
            Row(kind=kind), shown(code), level, f"no table lists it, and it is {rank}"
        )
        return msgspec.structs.replace(verdict, listed=False)

    def has_rule_for_repeats(self, code: str) -> bool:
        """Return whether these tables alone decide how often a code may occur.

        Those of MindCluster are complete: a code without a rule may occur at any rate.
        """
        key = ascend_key(code)
        return key is not None and (self._by_mindcluster or key in self._frequency)

    def escalated(self, changes: Iterable[Change], now: float) -> list[Verdict]:
        """Return verdicts on one device's history: codes that occur too often or last too long."""
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
        """Yield the level and the reason of each rule that applies."""
        came = [change.at for change in changes if change.present]
        gone = [change.at for change in changes if not change.present]
        if lasts := self._duration.get(key):
            # The frequency rule then counts how often it lasted too long, not how often it
            # occurred.
            lasting, came = too_long(lasts, changes, now)
            if lasting:
                yield lasts.level, f"it has lasted for more than {lasts.after_s:g} s"
        if repeats := self._frequency.get(key):
            if separated := too_often(repeats, came, gone, now):
                times = f"{len(separated.times)} times within {repeats.window_s:g} s"
                yield repeats.level, f"it occurred {times}"

    def _spelling(self, key: Any, code: str) -> str:
        row = self._codes.get(key)
        return row.spelling(key) if row else shown(code)

    def _fault(self, key: Any) -> Row:
        """Return the fault, without the demands of its own level."""
        row = self._codes.get(key)
        return Row(kind=row.kind, user_caused=row.user_caused) if row else Row()

    def _judge(self, row: Row, code: str, level: str, why: str) -> Verdict:
        meaning = self._levels[level]
        text = f"Ascend fault code {code} ({level}): {why or meaning.says}"
        return judge(row, text, code=code, level=meaning)


class Tables:
    """Hold all tables. A lookup does not use files, a clock or state.

    `dialect` is that of the job's policy.
    """

    def __init__(self, rows: Rows, dialect: Dialect) -> None:
        self._rows = rows.by_key
        self._xids: dict[int, XidRow] = rows.by_key["xid"]
        self._xid_levels = {name: row for (of, name), row in rows.levels.items() if of == "xid"}
        self._ascend = AscendCodes(rows, dialect)
        self._kernel = _Patterns(rows.by_key["kernel"])
        self._texts = _Patterns(rows.by_key["text"])
        self._own_texts = _Patterns(rows.own_texts)

    @classmethod
    def load(cls, user_file: Path | None = None, dialect: Dialect = Dialect.NONE) -> Tables:
        """Read the shipped tables and the user's file, which has priority.

        Raises UsageError: the user's file is invalid; the message names the line.
        """
        return cls(load(user_file), dialect)

    def ascend(
        self, code: str, severity: Severity | None = None, origin: FaultOrigin = FaultOrigin.CHIP
    ) -> Verdict:
        """Return the verdict on a fault code of a chip, bus switch or node, or on a public fault.

        `severity` is the driver's severity of the event. It matters for unlisted codes of a chip.
        """
        return self._ascend.listed(code) or self._ascend.unlisted(code, severity, origin)

    def escalated(self, changes: Iterable[Change], now: float) -> list[Verdict]:
        """Return verdicts on the history of one Ascend device: frequent or long-lasting codes.

        The order of the changes does not matter. The method ignores changes later than `now`
        (seconds, on the clock of the changes). If a code has both kinds of rule, each time that it
        lasted too long counts, instead of each occurrence.
        """
        return self._ascend.escalated(changes, now)

    def has_rule_for_repeats(self, code: str) -> bool:
        """Return whether `escalated` alone decides how often an Ascend code may occur."""
        return self._ascend.has_rule_for_repeats(code)

    def xid(self, number: int, device: str = "") -> Verdict:
        """Return the verdict on an XID of NVIDIA's driver.

        For unused XIDs, the catalogue refers users to support without an action. This method does
        the same for an XID without an entry.
        """
        row = self._xids.get(number)
        level = self._xid_levels[row.level if row else "CONTACT_SUPPORT"]
        if row is None:
            text = f"XID {number}: no table lists it"
            return unlisted(FaultKind.DEVICE, text, level.urgency, code=str(number), device=device)
        text = f"XID {number} ({level.name}): {row.says or level.says}"
        return judge(row, text, code=str(number), level=level, device=device)

    def kernel_line(self, line: str) -> Verdict:
        """Return the verdict on a line of the kernel's log.

        A line without an entry is not a fault.
        """
        known = self._coded(line) or self._kernel.search(line)
        return known or unlisted(
            FaultKind.UNKNOWN, "no table lists this line of the kernel's log", Urgency.NONE
        )

    def text(self, message: str) -> Verdict:
        """Return the verdict on an exception's message ("TypeError: ...") or a line of output."""
        known = self._coded(message) or self._texts.search(message)
        return known or unlisted(FaultKind.UNKNOWN, "no table lists this message")

    def exception(self, message: str, *, text_of_script: bool = False) -> Verdict:
        """Return the verdict on the exception that ended a rank; `message` is "TYPE: TEXT".

        If the script chose the text, only the user's own entries count. Otherwise the type decides
        first. Types of the system and its libraries can report a link or a device. Other types
        cannot: entries of these kinds do not count for them.
        """
        verdict = self.text(message)
        if self._own_texts.search(message):
            return verdict
        if text_of_script:
            return unlisted(FaultKind.USER_CODE, "the script raised this error itself")
        if verdict.kind not in _OF_HARDWARE:
            return verdict
        if _TYPED.match(message) and not _OF_SYSTEM.search(_ends(message)):
            return unlisted(FaultKind.USER_CODE, "the script raised an exception of its own type")
        return verdict

    def exit(self, exit_: Exit) -> Verdict:
        """Return the verdict on the unexpected end of a process.

        Shells and containers report a signal as a status above 128; this applies without an entry.
        """
        rows = self._rows["exit"]
        code, number = exit_.code, exit_.signal
        if number is None and code is not None and code > 128 and code not in rows:
            number = code - 128 if _signal_name(code - 128) else None
        row = rows.get(code if number is None else _signal_name(number))
        if row is not None:
            return judge(row, f"{exit_}: {row.says}")
        if number is not None:
            return unlisted(FaultKind.PROCESS, f"{exit_}: a signal ended the process")
        return unlisted(FaultKind.USER_CODE, f"{exit_}: the script chose this status itself")

    def node_condition(self, condition: str, status: str) -> Verdict:
        """Return the verdict on a Kubernetes node condition; status is True, False or Unknown."""
        row = self._rows["node_condition"].get((condition, status))
        text = f"node condition {condition} is {status}"
        if row is None:
            return unlisted(
                FaultKind.UNKNOWN, f"{text}: no table lists it as a fault", Urgency.NONE
            )
        return judge(row, f"{text}: {row.says}")

    def pod_reason(self, reason: str, exit_code: int | None = None) -> Verdict:
        """Return the verdict on why a pod or container does not run, or must leave.

        The exit status of its container is that of its agent, so it is only explained.
        """
        row = self._rows["pod_reason"].get(reason)
        text = f"pod reason {reason}: {row.says if row else 'no table lists it'}"
        if exit_code is not None:
            text += f"; its container ended with {self.exit(Exit(code=exit_code)).explanation}"
        return judge(row, text) if row else unlisted(FaultKind.UNKNOWN, text)

    def _coded(self, text: str) -> Verdict | None:
        """Return the verdict on a code in the text; an unlisted Ascend code does not count."""
        text = _ends(text)
        if xid := _XID.search(text):
            return self.xid(int(xid[2]), device=xid[1])
        event = _EVENT.search(text)
        return self._ascend.listed(event[1]) if event else None


@functools.cache
def shipped_tables() -> Tables:
    """Return the tables without a user's file.

    A process reads them once, because it takes a moment.
    """
    return Tables.load()


class _Patterns:
    """Search patterns in order; the first match decides."""

    def __init__(self, rows: dict[Any, PatternRow]) -> None:
        self._patterns = [(text.pattern, row) for text, row in rows.items()]

    def search(self, text: str) -> Verdict | None:
        text = _ends(text)
        for pattern, row in self._patterns:
            if pattern.search(text):
                return judge(row, row.says)
        return None


def _ends(text: str) -> str:
    half = LONGEST // 2
    return text if len(text) <= LONGEST else f"{text[:half]}\n{text[-half:]}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal, or not a signal
        return ""


def judge(
    row: Row, text: str, *, code: str = "", level: LevelRow = _PLAIN, device: str = ""
) -> Verdict:
    """Return the verdict of an entry; its level supplies missing values."""
    kind = row.kind or FaultKind.DEVICE
    urgency = row.urgency or level.urgency
    user_caused = kind is FaultKind.USER_CODE if row.user_caused is None else row.user_caused
    at_fault = row.at_fault or level.at_fault
    if user_caused or urgency is Urgency.NONE:
        at_fault = Blame.NOTHING
    return Verdict(
        kind=kind,
        urgency=urgency,
        at_fault=at_fault,
        explanation=text,
        code=code,
        level=level.name,
        user_caused=user_caused,
        counts=kind is not FaultKind.EVICTION if row.counts is None else row.counts,
        reset_helps=level.reset_helps if row.reset_helps is None else row.reset_helps,
        restart_heals=level.restart_heals if row.restart_heals is None else row.restart_heals,
        device=device,
    )
