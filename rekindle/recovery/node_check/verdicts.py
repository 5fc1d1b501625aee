"""Decide the verdict on each node from the evidence inside and between blocks. Pure.

A failed or slow collective may have its cause in either of two nodes. A node counts as the cause
only if it fails or is slow with each of two nodes that work well with others. Otherwise the verdict
is unknown, and the check does not isolate a node. This occurs with two nodes of which one is
unhealthy, or if more than half of all nodes are unhealthy. The verdict is also unknown if there was
not enough memory for a measurement.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

import msgspec

from rekindle.recovery.faults.fault import Fault
from rekindle.recovery.journal.event import Event
from rekindle.recovery.node_check.evidence import (
    Evidence,
    Measurement,
    NodeCheckLimits,
    Pair,
    blocks,
)
from rekindle.recovery.node_check.rounds import REFERENCE_NODES, TRIES, is_reference

Sayings = dict[int, str]  # texts by node
Sides = tuple[tuple[int, ...], tuple[int, ...]]  # two blocks

_WORK = {
    Measurement.COMPUTE: "a product of matrices",
    Measurement.MEMORY: "a copy in memory",
    Measurement.LOCAL_LINK: "a collective of its devices",
    Measurement.LINK: "a collective with another node",
}


def cut_off(evidence: Evidence, sound: set[int], called: Mapping[int, str]) -> Sayings:
    """Return why the health of nodes that do not reach another block is unknown.

    `sound` holds nodes that work well with another node and are not at fault. Failures of other
    nodes are their own.
    """
    found: dict[int, list[str]] = {}
    for sides, pairs in _between(evidence, sound).items():
        failed = [pair for pair in pairs if pair.error]
        if len(failed) == len(pairs) > 1:
            one, other = (" and ".join(called[node] for node in side) for side in sides)
            reason = (
                f"{one} do not reach {other}, because all {len(failed)} collectives between "
                f"these two blocks failed: {failed[0].error}"
            )
            for node in sound & {node for side in sides for node in side}:
                found.setdefault(node, []).append(reason)
            continue
        for pair in failed:
            for node, partner in (pair.nodes, pair.nodes[::-1]):
                reason = (
                    f"its collective with {called[partner]} in another block failed, and its "
                    f"other collectives did not: {pair.error}"
                )
                found.setdefault(node, []).append(reason)
    return {node: "; ".join(reason) for node, reason in found.items()}


def slow_links(
    evidence: Evidence, limits: NodeCheckLimits, sound: set[int], called: Mapping[int, str]
) -> Sayings:
    """Return the remarks on nodes whose collective across blocks takes too long.

    `sound` holds nodes that are not slow themselves. The slowness of other nodes is their own.
    """
    found: Sayings = {}
    usual, limit = evidence.usual(Measurement.LINK), limits.of(Measurement.LINK)
    for pairs in _between(evidence, sound).values():
        for pair in pairs:
            if pair.error or not usual or pair.seconds / usual <= limit:
                continue
            for node, partner in (pair.nodes, pair.nodes[::-1]):
                found[node] = (
                    f"its collective with {called[partner]} in another block takes "
                    f"{pair.seconds / usual:.2f} times as long as collectives within blocks "
                    f"({limit:g} is the limit); this does not show that one of the two nodes is "
                    "slow"
                )
    return found


def _between(evidence: Evidence, sound: set[int]) -> dict[Sides, list[Pair]]:
    """Return the measurements between sound nodes, by their two blocks."""
    of = {node: tuple(block) for block in blocks(evidence.working) for node in block}
    found: dict[Sides, list[Pair]] = {}
    for edge, pair in evidence.across.items():
        if evidence.is_measured(pair) and sound.issuperset(edge):
            first, second = sorted(of[node] for node in edge)
            found.setdefault((first, second), []).append(pair)
    return found


class Health(str, enum.Enum):
    """Name the health of a node, according to the evidence."""

    HEALTHY = "healthy"
    FAULTY = "faulty"  # it cannot do the work of training
    STRAGGLER = "straggler"  # it can, but all other nodes would wait for it
    UNKNOWN = "unknown"


SICK = (Health.FAULTY, Health.STRAGGLER)


class NodeVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the verdict on one node, and its reason.

    `part` is its unhealthy part. `over` is the time of that part relative to healthy nodes.
    `seconds` holds the measurements, by part.
    """

    node: int
    health: Health
    reason: str = ""
    part: Measurement | None = None
    over: float = 1.0
    device: int = -1
    seconds: dict[Measurement, float] = {}

    def in_words(self) -> str:
        """Return the health and the measurements as text."""
        measured = ", ".join(f"{p.value} {each * 1e3:.3g} ms" for p, each in self.seconds.items())
        because = f": {self.reason}" if self.reason else ""
        return f"{self.health.value}{because}" + (f" ({measured})" if measured else "")


def verdicts(
    evidence: Evidence, limits: NodeCheckLimits, names: Mapping[int, str] | None = None
) -> list[NodeVerdict]:
    """Return one verdict for each node, in order. `names` are the displayed names of the nodes."""
    called = names or {node: f"node {node}" for node in evidence.nodes}
    references = {node for node in evidence.nodes if is_reference(evidence, limits, node)}
    found = {node: _verdict(evidence, limits, node, references, called) for node in evidence.nodes}
    faulty = {node for node, each in found.items() if each.health is Health.FAULTY}
    sound = {node for node in evidence.nodes if node not in faulty and _works(evidence, node)}
    cut = cut_off(evidence, sound, called)
    fast = {node for node in sound if found[node].health is not Health.STRAGGLER}
    slow = slow_links(evidence, limits, fast, called)
    for node, verdict in found.items():
        unexplained = evidence.failed_with(node) - faulty
        if verdict.health is Health.HEALTHY and unexplained:
            met = " and ".join(called[other] for other in sorted(unexplained))
            reason = f"its collective with {met} failed, and its other collectives did not"
            found[node] = msgspec.structs.replace(
                verdict, health=Health.UNKNOWN, part=Measurement.LINK, reason=reason
            )
        elif verdict.health is Health.HEALTHY and node in cut:
            found[node] = msgspec.structs.replace(
                verdict, health=Health.UNKNOWN, part=Measurement.LINK, reason=cut[node]
            )
    for node, verdict in found.items():
        notes = [slow.get(node, ""), *(each.note for each in evidence.alone[node][-1:])]
        reason = "; ".join(filter(None, (verdict.reason, *notes)))
        found[node] = msgspec.structs.replace(verdict, reason=reason)
    return list(found.values())


def _works(evidence: Evidence, node: int) -> bool:
    """Return whether the node works well with any other.

    Then another node may be the cause of its failed collectives.
    """
    return bool(evidence.worked_with(node)) or evidence.reaches_across(node)


def _verdict(
    evidence: Evidence,
    limits: NodeCheckLimits,
    node: int,
    references: set[int],
    called: Mapping[int, str],
) -> NodeVerdict:
    measured = {part: evidence.seconds(part, node) for part in Measurement}
    verdict = NodeVerdict(
        node=node,
        health=Health.HEALTHY,
        seconds={part: round(each, 6) for part, each in measured.items() if each is not None},
    )
    if evidence.is_broken(node):
        return _broken(evidence, node, verdict)
    failed = _failed(evidence, node, references, called)
    if failed is not None:
        health, reason = failed
        return msgspec.structs.replace(verdict, health=health, part=Measurement.LINK, reason=reason)
    slow = _slow_part(evidence, limits, node, references)
    if slow is not None:
        part, over = slow
        reason = (
            f"{_WORK[part]} takes it {over:.2f} times as long as healthy nodes "
            f"({limits.of(part):g} is the limit)"
        )
        return msgspec.structs.replace(
            verdict, health=Health.STRAGGLER, part=part, over=round(over, 3), reason=reason
        )
    return verdict


def _broken(evidence: Evidence, node: int, verdict: NodeVerdict) -> NodeVerdict:
    """Return the verdict on a node that failed alone."""
    last = evidence.alone[node][-1]
    if evidence.is_measured(last):
        reason = f"{last.error} ({evidence.failures(node)} times)"
        return msgspec.structs.replace(
            verdict,
            health=Health.FAULTY,
            part=Measurement.COMPUTE,
            reason=reason,
            device=last.device,
        )
    reason = f"not measured: {last.error} ({evidence.unmeasured(node)} times)"
    return msgspec.structs.replace(
        verdict, health=Health.UNKNOWN, reason=reason, device=last.device
    )


def _failed(
    evidence: Evidence, node: int, references: set[int], called: Mapping[int, str]
) -> tuple[Health, str] | None:
    """Return the verdict on a node without a successful collective, if it has tried some."""
    tried = evidence.pairs_of[node]
    if not tried or _works(evidence, node):
        return None
    errors = [pair.error for pair in tried if evidence.is_measured(pair)]
    if not errors:
        return Health.UNKNOWN, f"not measured with another node: {tried[-1].error}"
    error = errors[-1]
    # A partner that also fails with other working nodes may be the cause itself.
    against = sorted(
        other
        for other in evidence.failed_with(node) & references
        if not any(evidence.worked_with(each) for each in evidence.failed_with(other))
    )
    if len(against) >= REFERENCE_NODES:
        others = " and ".join(called[other] for other in against)
        return Health.FAULTY, (
            f"its collectives with {others} failed, but these nodes work well with others: {error}"
        )
    if len(evidence.nodes) == 2:
        return (
            Health.UNKNOWN,
            f"one of 2 nodes is faulty, and the check cannot find out which one: {error}",
        )
    return (
        Health.UNKNOWN,
        f"too few nodes work well, so the check cannot find out which node is faulty: {error}",
    )


def _slow_part(
    evidence: Evidence, limits: NodeCheckLimits, node: int, references: set[int]
) -> tuple[Measurement, float] | None:
    """Return the first slow part; a slow device slows links down, but not the reverse."""
    for part in Measurement:
        over = evidence.over(part, node)
        if part is Measurement.LINK:
            sure = len(evidence.worked_with(node) & references) >= REFERENCE_NODES
        else:
            sure = evidence.tries(node) >= TRIES
        if sure and over > limits.of(part):
            return part, over
    return None


class NodeChecked(Event, frozen=True, kw_only=True, tag="node-checked"):
    """Record a check of a node before the job admitted it, with its verdict.

    `fault` is set if the job rejected the node and requests another. The rejection is then an
    incident of its own.
    """

    host: str
    address: str
    pid: int
    verdict: NodeVerdict
    fault: Fault | None = None
    incident: int = 0

    def in_words(self) -> str:
        """Return the event as text."""
        where = self.host or self.address
        if self.fault is not None:
            return f"incident {self.incident}: {self.fault.message}; the job requests another node"
        return f"the job checked {where}: {self.verdict.in_words()}"
