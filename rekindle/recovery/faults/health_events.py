"""Track the health events of each device. Pure.

The job answers each health event once, and counts repeated ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rekindle.recovery.faults.classification import (
    EventSource,
    HealthEvent,
    gravest,
    verdict_of,
)
from rekindle.recovery.faults.fault import Fault
from rekindle.recovery.faults.tables.escalation import Change
from rekindle.recovery.faults.tables.verdict import Severity, Verdict
from rekindle.recovery.journal import journal

if TYPE_CHECKING:
    from rekindle.recovery.faults.tables.tables import Tables

Place = tuple[str, int]  # a host and the number of its device

DCMI = "DCMI"  # the reporter of the agents' readings of devices


def attributed(
    health: Severity,
    codes: Iterable[str],
    known: Mapping[str, Severity],
    acts: Callable[[str], bool],
) -> dict[str, Severity]:
    """Return the severity of each code of a device.

    DCMI reports only the severity of the device's worst fault (`health`). `known` has the earlier
    codes with their severities. If these do not explain the health, the new codes do: those about
    which a table demands something (`acts`), or all of them. Without a new code, all codes without
    an entry do. A code that explains nothing counts as a notice.
    """
    found = {code: known.get(code, Severity.NOTICE) for code in codes}
    if health > max(found.values(), default=Severity.NOTICE):
        new = [code for code in found if code not in known]
        raised = [code for code in new if acts(code)] or new
        found |= dict.fromkeys(raised or [code for code in found if not acts(code)], health)
    return found


class HealthEventLog:
    """Hold the health events of all devices from the journal.

    `unmet` holds faults from health events that no rank has met yet. `earlier` holds the health
    events that earlier coordinators recorded, and `until` is the end of their work. `starts` holds
    when they started the newest process on each device.
    """

    def __init__(
        self,
        earlier: Sequence[journal.HealthEventSeen] = (),
        until: float = 0.0,
        starts: Mapping[Place, float] | None = None,
    ) -> None:
        self._earlier = earlier, until
        self._present: dict[Place, dict[tuple[EventSource, str, str, int], HealthEvent]] = {}
        self._changes: dict[Place, list[Change]] = {}  # of Ascend codes
        self.unmet: list[Fault] = []
        self._answered: dict[Place, set[tuple[str, str]]] = {}
        self._read: dict[Place, set[str]] = {}  # the codes of DCMI's newest reading
        # Those that are older than the process on the device, and the time of the first reading
        # since its start; None: none yet.
        self._older: dict[Place, dict[str, float | None]] = {}
        for event in earlier:
            self.note(event.health_event, event.host, event.at)
        for place, at in (starts or {}).items():
            since = {each.code: each.at for each in self._changes.get(place, ()) if each.present}
            own = [code for code, each in self.codes(*place).items() if each.by == DCMI]
            self._read[place] = {*own}
            self._older[place] = {code: None for code in own if since[code] < at}

    def note(self, health_event: HealthEvent, host: str, at: float) -> bool:
        """Record a health event; return False if it is not new.

        A code that has become more severe is new, but has not occurred again.
        """
        place = (host, health_event.device)
        # An event of another pod is new, and so is one of a restarted container.
        name = (health_event.source, health_event.what, health_event.address, health_event.run)
        present = self._present.setdefault(place, {})
        known = present.get(name)
        if health_event.gone:
            if known is None:
                return False
            del present[name]
            self._read.get(place, set()).discard(health_event.what)
        elif known is None or _is_graver(health_event, known):
            present[name] = health_event
        else:
            return False
        if health_event.source is EventSource.ASCEND and (known is None or health_event.gone):
            change = Change(health_event.what, at, present=not health_event.gone)
            self._changes.setdefault(place, []).append(change)
        if not health_event.gone:
            self._answered.pop(place, None)
        return True

    def recall(self, judge: Callable[[], Tables]) -> None:
        """Mark the health events that earlier coordinators have answered as answered.

        `judge` reads the tables, which takes a moment. The method calls it only if there are health
        events.
        """
        earlier, until = self._earlier
        if not earlier:
            return
        newest = {
            (e.host, e.health_event.device): e.health_event
            for e in earlier
            if not e.health_event.gone
        }
        for (host, device), health_event in newest.items():
            self.answer(host, device, verdict_of(judge(), health_event))
        self.worse(judge(), until)

    def worse(self, judge: Tables, now: float) -> list[tuple[str, int, Verdict]]:
        """Return devices (host, number) whose codes occur too often or last too long, once each."""
        found = []
        for place, changes in self._changes.items():
            verdicts = judge.escalated(changes, now)
            if verdicts and self.answer(*place, verdict := gravest(verdicts)):
                found.append((*place, verdict))
        return found

    def answer(self, host: str, device: int, verdict: Verdict) -> bool:
        """Return whether the job must answer this verdict: only once until a new report."""
        return self._is_first((host, device), (verdict.code, verdict.urgency.value))

    def started(self, host: str, device: int) -> None:
        """Note that a process has started on the device: the codes of DCMI are older."""
        place = host, device
        self._older[place] = dict.fromkeys(self._read.get(place, ()))

    def read(
        self, host: str, device: int, codes: Collection[str], now: float, limit_s: float
    ) -> list[HealthEvent]:
        """Note a reading of DCMI. Return the codes that have outlasted a restart, once each.

        Such a code is older than the process on the device, and has been in all readings since its
        start, for `limit_s` seconds. Only the times of readings count: an agent may deliver old
        ones together, and the clocks of two coordinators may differ.
        """
        place = host, device
        self._read[place] = {*codes}
        older = {
            code: now if since is None else since
            for code, since in self._older.get(place, {}).items()
            if code in codes
        }
        known = self.codes(host, device)
        found = [c for c, since in older.items() if c in known and now - since >= limit_s]
        self._older[place] = {c: since for c, since in older.items() if c not in found}
        return [known[code] for code in found]

    def _is_first(self, place: Place, name: tuple[str, str]) -> bool:
        answered = self._answered.setdefault(place, set())
        if name in answered:
            return False
        answered.add(name)
        return True

    def present(self, host: str, device: int) -> list[tuple[EventSource, str]]:
        """Return the health events of a device that have not ended."""
        return sorted((source, what) for source, what, *_ in self._present.get((host, device), ()))

    def codes(self, host: str, device: int) -> dict[str, HealthEvent]:
        """Return the reports of the Ascend codes of a device that have not ended, by code."""
        present = self._present.get((host, device), {}).values()
        return {event.what: event for event in present if event.source is EventSource.ASCEND}

    @property
    def has_reports(self) -> bool:
        """Return whether there was any report."""
        return bool(self._present)

    @property
    def waits(self) -> bool:
        """Return whether an Ascend code is present; it may yet last too long."""
        return any(source is EventSource.ASCEND for s in self._present.values() for source, *_ in s)


def _is_graver(now: HealthEvent, before: HealthEvent) -> bool:
    """Return whether a present code is known to be more severe than at its last report."""
    if now.severity is None or before.severity is None:
        return False
    return now.severity > before.severity
