"""Fold a log of the events on machines across all jobs. Pure.

A node of a job is a place in its world. A host is the real or simulated machine in that place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.journal import journal
from rekindle.recovery.journal.event import read_lines
from rekindle.recovery.node_check.evidence import FACTOR, Measurement
from rekindle.recovery.node_check.verdicts import Health

# Few machines break jobs repeatedly although checks find no fault (1.3 % at Meta), but they cost
# much. Placement without them reduced the failures of large jobs from 14 % to 4 % (Kokolis et al.,
# "Revisiting Reliability in Large-Scale Machine Learning Research Clusters").
LEMON_FAULTS = 3
LEMON_JOBS = 2
LEMON_WINDOW_S = 28 * 86_400.0

# number of newest checks for each host, in addition to the best check of each part
CHECKS_KEPT = 20
DRIFT = FACTOR  # a part is slow from this factor, relative to the best time of the same host


class HostEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Describe one event on a host; `at` is seconds since the epoch.

    `source` identifies the origin of the event, so that the log has it once. It is empty for an
    event from a person.
    """

    host: str
    at: float
    source: str = ""

    def is_same_source(self, other: HostEvent) -> bool:
        """Return whether both come from one event of one job, which may be reported repeatedly.

        A later job of the same name has events with the same numbers, but with other times.
        """
        return bool(self.source) and (self.source, self.at) == (other.source, other.at)


class HostFault(HostEvent, frozen=True, kw_only=True, tag="fault"):
    """Record that a job met a fault of the host or of one of its devices (-1: no device).

    `incident` is its number in the job, or 0 in old logs. All reports about one host in one
    incident are one fault.
    """

    job_id: str
    kind: FaultKind
    message: str
    device: int = -1
    code: str = ""
    incident: int = 0

    def is_same_as(self, other: HostFault) -> bool:
        """Return whether this adds to the same fault, for example its kind or a failed reset."""
        ours, theirs = (self.job_id, self.incident), (other.job_id, other.incident)
        return self.incident > 0 and ours == theirs


class HostIsolated(HostEvent, frozen=True, kw_only=True, tag="isolated"):
    """Record that the host is isolated until its release; `by` is the job or person."""

    by: str
    reason: str


class HostReleased(HostEvent, frozen=True, kw_only=True, tag="released"):
    """Record that the host is usable again; this clears its earlier faults."""

    by: str


class HostChecked(HostEvent, frozen=True, kw_only=True, tag="checked"):
    """Record a check of devices and links before a job admits the host.

    `seconds` holds the time of each part.
    """

    health: Health
    seconds: dict[Measurement, float] = {}


AnyHostEvent = HostFault | HostIsolated | HostReleased | HostChecked


class Host(msgspec.Struct, kw_only=True):
    """Hold the current state of one host.

    `isolated` is the reason, or empty. `faults` holds the faults since the last release. `checks`
    holds the newest checks, the oldest first. `best` is the least time of each part in seconds. A
    slow drift is visible only in comparison with the best time.
    """

    host: str
    isolated: str = ""
    isolated_by: str = ""
    isolated_at: float = 0.0
    faults: list[HostFault] = []
    checks: list[HostChecked] = []
    best: dict[Measurement, float] = {}

    def drift(self) -> dict[Measurement, float]:
        """Return the time of each part relative to the best time on this host."""
        latest = self.checks[-1].seconds if self.checks else {}
        return {part: now / self.best[part] for part, now in latest.items() if part in self.best}

    def checked(self) -> str:
        """Return the result of the last check, and the parts that became slower, as text."""
        if not self.checks:
            return "-"
        slower = (
            f"{part.value} {over:.2f}x" for part, over in self.drift().items() if over > DRIFT
        )
        return ", ".join((self.checks[-1].health.value, *slower))

    def is_lemon(self, now: float) -> bool:
        """Return whether the host has broken several jobs recently."""
        recent = [fault for fault in self.faults if now - fault.at <= LEMON_WINDOW_S]
        jobs = {fault.job_id for fault in recent}
        return len(recent) >= LEMON_FAULTS and len(jobs) >= LEMON_JOBS

    def state(self, now: float) -> str:
        """Return the use of the host in one or two words."""
        if self.isolated:
            return "isolated"
        return "lemon" if self.is_lemon(now) else "in use"


def fold(events: Iterable[AnyHostEvent]) -> dict[str, Host]:
    """Return all known hosts, by name."""
    found: dict[str, Host] = {}
    for event in events:
        host = found.setdefault(event.host, Host(host=event.host, faults=[], checks=[], best={}))
        match event:
            case HostFault():
                others = [fault for fault in host.faults if not event.is_same_as(fault)]
                host.faults = [*others, event]
            case HostIsolated():
                host.isolated = event.reason
                host.isolated_by, host.isolated_at = event.by, event.at
            case HostReleased():
                host.isolated, host.isolated_by, host.isolated_at = "", "", 0.0
                host.faults = []
            case HostChecked():
                host.checks = [*host.checks, event][-CHECKS_KEPT:]
                for part, seconds in event.seconds.items():
                    if seconds > 0.0:
                        host.best[part] = min(seconds, host.best.get(part, seconds))
    return found


def best_checks(checks: Sequence[HostChecked]) -> list[HostChecked]:
    """Return the checks of one host that contain the best time of each part."""
    parts = {part for check in checks for part in check.seconds}
    having = [(part, [each for each in checks if each.seconds.get(part)]) for part in parts]
    return [min(some, key=lambda each: each.seconds[part]) for part, some in having if some]


def condensed(events: Iterable[AnyHostEvent], now: float) -> list[AnyHostEvent]:
    """Return the events that define the current state, without faults too old for a lemon."""
    kept: dict[str, list[AnyHostEvent]] = {}
    for event in events:
        before = kept.setdefault(event.host, [])
        match event:
            case HostReleased():
                before[:] = [each for each in before if isinstance(each, HostChecked)]
            case HostChecked():
                others = [each for each in before if not isinstance(each, HostChecked)]
                checks = [each for each in before if isinstance(each, HostChecked)]
                best, new = best_checks([*checks, event]), [*checks, event][-CHECKS_KEPT:]
                old = [each for each in checks[: 1 - CHECKS_KEPT] if each in best]
                before[:] = [*others, *old, *new]
            case HostIsolated():
                before[:] = [each for each in before if not isinstance(each, HostIsolated)]
                before.append(event)
            case HostFault():
                before[:] = [
                    each
                    for each in before
                    if not (isinstance(each, HostFault) and event.is_same_as(each))
                ]
                if now - event.at <= LEMON_WINDOW_S:
                    before.append(event)
    return [event for each in kept.values() for event in each]


def in_order(names: Iterable[str], known: dict[str, Host], now: float) -> list[str]:
    """Return the usable hosts: lemons last, otherwise in the given order."""
    usable = [name for name in names if name not in known or not known[name].isolated]
    return sorted(usable, key=lambda name: name in known and known[name].is_lemon(now))


def learned_from(job_id: str, event: journal.AnyEvent) -> AnyHostEvent | None:
    """Return what an event of a job's journal reports about a host, or None."""
    source = f"{job_id}#{event.seq}"
    match event:
        case journal.FaultSeen(fault=fault, incident=number) if fault.host and fault.of_hardware:
            return HostFault(
                host=fault.host,
                at=event.at,
                source=source,
                job_id=job_id,
                kind=fault.kind,
                message=fault.message,
                device=fault.device,
                code=fault.code,
                incident=number,
            )
        case journal.Isolated(host=host, reason=reason):
            return HostIsolated(host=host, at=event.at, source=source, by=job_id, reason=reason)
        case journal.NodeChecked(host=host, verdict=verdict) if host:
            return HostChecked(
                host=host,
                at=event.at,
                source=source,
                health=verdict.health,
                seconds=verdict.seconds,
            )
    return None


_DECODER: msgspec.json.Decoder[AnyHostEvent] = msgspec.json.Decoder(AnyHostEvent)


def read(lines: Iterable[bytes]) -> list[AnyHostEvent]:
    """Decode a log. Raises JobError: `read_lines` cannot decode a line."""
    return read_lines(lines, _DECODER.decode, "the log of hosts")
