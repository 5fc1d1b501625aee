"""Compute the precision of findings about slow nodes: a fold over the journal. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from rekindle.profiling.findings import Finding, Slow
from rekindle.recovery.faults.stragglers import Examined, Slowed, SlowOver
from rekindle.recovery.journal.journal import Event, FaultSeen
from rekindle.recovery.node_check.verdicts import SICK, Health, NodeChecked


class Precision(msgspec.Struct, frozen=True):
    """Count the findings about nodes: right, wrong, and unknown."""

    right: int = 0
    wrong: int = 0
    unknown: int = 0

    def in_words(self) -> str:
        """Return the counts as text, with the share of right ones among the known."""
        known = self.right + self.wrong
        if not known + self.unknown:
            return "no node has become slow"
        share = f"precision {self.right / known:.0%}: " if known else ""
        unknown = f", {self.unknown} unknown" if self.unknown else ""
        return f"{share}{self.right} right, {self.wrong} wrong{unknown}"


def precision(events: Iterable[Event]) -> Precision:
    """Count the outcome of each finding about a node, or a rank's own work.

    A check of the node decides it, or a later fault of its hardware. If the slowness ended without
    an action, a replacement would have been wrong.
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


_Blamed = tuple[str, tuple[int, ...]]  # a host, and its ranks that a finding called slow


def _settle(unknown: Counter[_Blamed], host: str) -> int:
    """Return the number of unknown findings about a host, and remove them."""
    return sum(unknown.pop(each) for each in list(unknown) if each[0] == host)


def _blames(found: Finding) -> bool:
    """Return whether the finding names the slow rank or node; a slow link names several ranks."""
    return found.kind in (Slow.RANK, Slow.NODE)
