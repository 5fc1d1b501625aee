"""How often it was right that a node had become slow: a fold over the journal. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from rekindle.profiling.findings import Finding, Slow
from rekindle.recovery.faults.stragglers import Examined, Slowed, SlowOver
from rekindle.recovery.journal.journal import Event, FaultSeen
from rekindle.recovery.node_check.verdicts import SICK, Health, NodeChecked


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
    unknown: Counter[_Blamed] = Counter()
    right = wrong = 0
    for event in events:
        match event:
            case Slowed(finding=found, hosts=hosts) if _blames(found):
                unknown.update((host, found.ranks) for host in hosts)
            case SlowOver(finding=found, hosts=hosts) if _blames(found):
                wrong += sum(unknown.pop((host, found.ranks), 0) for host in hosts)
            case Examined(host=host, verdict=verdict) | NodeChecked(host=host, verdict=verdict):
                if verdict.health in SICK:
                    right += _settle(unknown, host)
                elif verdict.health is Health.HEALTHY:
                    wrong += _settle(unknown, host)
            case FaultSeen(fault=fault) if fault.of_hardware:
                right += _settle(unknown, fault.host)
    return Precision(right, wrong, unknown.total())


_Blamed = tuple[str, tuple[int, ...]]  # a host, and which ranks were said to be slow there


def _settle(unknown: Counter[_Blamed], host: str) -> int:
    """Return how many findings about a host are known now, and take them out."""
    return sum(unknown.pop(each) for each in list(unknown) if each[0] == host)


def _blames(found: Finding) -> bool:
    """Whether it names who is slow; of a slow link it names all that it may be."""
    return found.kind in (Slow.RANK, Slow.NODE)
