"""The precision of findings about slow nodes, derived from later events."""

from __future__ import annotations

from rekindle.profiling.findings import Finding, Slow
from rekindle.recovery.faults.stragglers import Examined, Slowed, SlowOver
from rekindle.recovery.node_check.verdicts import Health, NodeVerdict
from rekindle.reporting.summary import Precision, precision


def slow(rank: int) -> Finding:
    return Finding(kind=Slow.RANK, ranks=(rank,), factor=1.5, since=1, found=2)


def slowed(rank: int, host: str = "h") -> Slowed:
    return Slowed(finding=slow(rank), nodes=(0,), hosts=(host,))


def over(rank: int, host: str = "h") -> SlowOver:
    return SlowOver(finding=slow(rank), hosts=(host,))


def examined(health: Health, host: str = "h") -> Examined:
    verdict = NodeVerdict(node=0, health=health)
    return Examined(node=0, host=host, suspect=True, verdict=verdict)


def test_what_passes_says_nothing_of_another_rank_of_its_host() -> None:
    """A rank that is fast again does not settle the finding about another rank of its host.

    A check of the host settles the other finding.
    """
    events = [slowed(0), slowed(1), over(1)]
    assert precision(events) == Precision(wrong=1, unknown=1)
    assert precision([*events, examined(Health.STRAGGLER)]) == Precision(right=1, wrong=1)
    assert precision([*events, examined(Health.HEALTHY)]) == Precision(wrong=2)


def test_a_check_tells_of_all_ranks_of_its_host_alone() -> None:
    events = [slowed(0), slowed(1), slowed(2, "other"), slowed(2, "other")]
    assert precision([*events, examined(Health.FAULTY)]) == Precision(right=2, unknown=2)
    assert precision([*events, over(2)]) == Precision(unknown=4)
