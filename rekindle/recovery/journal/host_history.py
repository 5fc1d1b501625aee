"""What is known of machines across all jobs: a fold over a log of what happened on them. Pure.

A node of a job is a place in its world; a host is the machine (or simulated one) that fills it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.journal import journal
from rekindle.recovery.node_check.evidence import FACTOR, Measurement
from rekindle.recovery.node_check.verdicts import Health

# Machines that break jobs again and again without ever being found broken are few (1.3 % at Meta)
# and cost much: keeping work away from them took the failures of large jobs from 14 % to 4 %
# (Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning Research Clusters").
LEMON_FAULTS = 3
LEMON_JOBS = 2
LEMON_WINDOW_S = 28 * 86_400.0


class HostEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """One thing that happened on a host; at: seconds since the epoch.

    source: what it was learned from, so that it is noted once; empty: a person said so.
    """

    host: str
    at: float
    source: str = ""

    def is_same_source(self, other: HostEvent) -> bool:
        """Whether both were learned from one event of one job, which may be told many times.

        A later job of the same name has events of the same numbers, at other times.
        """
        return bool(self.source) and (self.source, self.at) == (other.source, other.at)


class HostFault(HostEvent, frozen=True, kw_only=True, tag="fault"):
    """A job met a fault of the host or of one of its devices (-1: of none).

    incident: its number in the job; 0: in logs of before. What is seen of one host in one incident
    is one fault.
    """

    job_id: str
    kind: FaultKind
    message: str
    device: int = -1
    code: str = ""
    incident: int = 0

    def is_same_as(self, other: HostFault) -> bool:
        """Whether more is said of the same fault, as what it was, or that a reset has failed."""
        ours, theirs = (self.job_id, self.incident), (other.job_id, other.incident)
        return self.incident > 0 and ours == theirs


class HostIsolated(HostEvent, frozen=True, kw_only=True, tag="isolated"):
    """Nothing is placed there until it is released; by: the job or person."""

    by: str
    reason: str


class HostReleased(HostEvent, frozen=True, kw_only=True, tag="released"):
    """It may be used again, and what happened before is forgiven."""

    by: str


class HostChecked(HostEvent, frozen=True, kw_only=True, tag="checked"):
    """Its devices and links were measured before a job took it in; seconds: of each part."""

    health: Health
    seconds: dict[Measurement, float] = {}


AnyHostEvent = HostFault | HostIsolated | HostReleased | HostChecked
CHECKS_KEPT = 20  # of each host, the newest; beside them those that hold the best of a part
DRIFT = FACTOR  # times of its own best, from when on a part of a host is said to have become slow


class Host(msgspec.Struct, kw_only=True):
    """One host as it is now.

    isolated: why, or empty; faults: since it was released last; checks: the newest, oldest first.
    best: seconds, the least that each part has ever taken: what gets slower bit by bit is never far
    from what it took lately.
    """

    host: str
    isolated: str = ""
    isolated_by: str = ""
    isolated_at: float = 0.0
    faults: list[HostFault] = []
    checks: list[HostChecked] = []
    best: dict[Measurement, float] = {}

    def drift(self) -> dict[Measurement, float]:
        """Return how many times as long each part takes as it has taken this host at best."""
        latest = self.checks[-1].seconds if self.checks else {}
        return {part: now / self.best[part] for part, now in latest.items() if part in self.best}

    def checked(self) -> str:
        """Say how it was when it was checked last, and which parts are slower than they were."""
        if not self.checks:
            return "-"
        slower = (
            f"{part.value} {over:.2f}x" for part, over in self.drift().items() if over > DRIFT
        )
        return ", ".join((self.checks[-1].health.value, *slower))

    def is_lemon(self, now: float) -> bool:
        """Whether it has broken several jobs lately."""
        recent = [fault for fault in self.faults if now - fault.at <= LEMON_WINDOW_S]
        jobs = {fault.job_id for fault in recent}
        return len(recent) >= LEMON_FAULTS and len(jobs) >= LEMON_JOBS

    def state(self, now: float) -> str:
        """Say in a word or two whether it is used."""
        if self.isolated:
            return "isolated"
        return "lemon" if self.is_lemon(now) else "in use"


def fold(events: Iterable[AnyHostEvent]) -> dict[str, Host]:
    """Return all hosts that anything is known of, by name."""
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
    """Return those of one host's checks that say what each part has taken at best."""
    parts = {part for check in checks for part in check.seconds}
    having = [(part, [each for each in checks if each.seconds.get(part)]) for part in parts]
    return [min(some, key=lambda each: each.seconds[part]) for part, some in having if some]


def condensed(events: Iterable[AnyHostEvent], now: float) -> list[AnyHostEvent]:
    """Return the events that say what is so now; faults that make nobody a lemon are left out."""
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
    """Return the hosts that may be used: lemons last, else as they were given."""
    usable = [name for name in names if name not in known or not known[name].isolated]
    return sorted(usable, key=lambda name: name in known and known[name].is_lemon(now))


def learned_from(job_id: str, event: journal.AnyEvent) -> AnyHostEvent | None:
    """Return what an event of a job's journal says about a host, if it says anything."""
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
    """Decode a log. Raises JobError as `journal.read_lines` does."""
    return journal.read_lines(lines, _DECODER.decode, "the log of hosts")
