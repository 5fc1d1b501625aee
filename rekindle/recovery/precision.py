"""How often it was right that a node had become slow: a fold over the journal. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from rekindle.profiling.findings import Finding, Slow
from rekindle.recovery.journal import Event, FaultSeen
from rekindle.recovery.node_check.event import NodeChecked
from rekindle.recovery.node_check.verdicts import SICK, Health
from rekindle.recovery.stragglers import Examined, Slowed, SlowOver


class Precision(msgspec.Struct, frozen=True):
    """Findings about nodes: how many were right, wrong, and of how many nobody knows."""

    right: int = 0
    wrong: int = 0
    unknown: int = 0

    def in_words(self) -> str:
        """Say it, with the share of those that are known."""
        known = self.right + self.wrong
        if not known + self.unknown:
            return "no node has become slow"
        share = f"precision {self.right / known:.0%}: " if known else ""
        unknown = f", {self.unknown} unknown" if self.unknown else ""
        return f"{share}{self.right} right, {self.wrong} wrong{unknown}"


def precision(events: Iterable[Event]) -> Precision:
    """Count what has become of each finding about a node, or a rank's own work.

    A check of the node tells, or a later fault of its hardware. That it passed by itself says that
    nobody should have been sent away for it.
    """
    unknown: dict[str, int] = {}  # findings, by host
    right = wrong = 0
    for event in events:
        match event:
            case Slowed(finding=found, hosts=hosts) if _accuses(found):
                for host in hosts:
                    unknown[host] = unknown.get(host, 0) + 1
            case SlowOver(finding=found, hosts=hosts) if _accuses(found):
                wrong += sum(unknown.pop(host, 0) for host in hosts)
            case Examined(host=host, verdict=verdict) | NodeChecked(host=host, verdict=verdict):
                if verdict.health in SICK:
                    right += unknown.pop(host, 0)
                elif verdict.health is Health.HEALTHY:
                    wrong += unknown.pop(host, 0)
            case FaultSeen(fault=fault) if fault.of_hardware:
                right += unknown.pop(fault.host, 0)
    return Precision(right, wrong, sum(unknown.values()))


def _accuses(found: Finding) -> bool:
    """Whether it names who is slow; of a slow link it names all that it may be."""
    return found.kind in (Slow.RANK, Slow.NODE)
