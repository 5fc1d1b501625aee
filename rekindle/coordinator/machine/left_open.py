"""The unfinished work of a coordinator that died: folds over its attempt. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from rekindle.recovery.faults.fault import Fault, Kind
from rekindle.recovery.faults.tables.verdict import Urgency
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.history import heals
from rekindle.recovery.policy.policy import INNER, Strategy

# Nothing is decided about a failed link before its cause shows itself, and whoever takes a
# coordinator's place says itself that it was lost.
_NEVER_HELD = (Kind.LINK, Kind.COORDINATOR)


def held(own: Iterable[journal.Event]) -> tuple[Fault, ...]:
    """Return the faults that were seen while a decision waited for a person, and wait with it.

    An answer lets all be decided; a new start of all ranks is an answer to all.
    """
    found: list[Fault] = []
    awaiting = False
    for event in own:
        match event:
            case journal.FaultSeen(fault=fault, known=False) if awaiting:
                found += [fault] if fault.kind not in _NEVER_HELD else []
            case journal.Decided(strategy=strategy, approval=approval):
                awaiting = approval
                over = not approval and strategy not in INNER
                found = [] if over else [fault for fault in found if fault != event.fault]
            case journal.Answered(strategy=strategy, granted=granted):
                awaiting = False
                found = found if granted and strategy in INNER else []
    return tuple(found)


def leaving(own: Iterable[journal.Event]) -> frozenset[int]:
    """Return the nodes that were to leave a host, and have not come again since."""
    found: set[int] = set()
    for event in own:
        match event:
            case journal.Isolated(node=node):
                found.add(node)
            case journal.NodeJoined(node=node):
                found.discard(node)
    return frozenset(found)


def to_heal(own: Iterable[journal.Event]) -> frozenset[int]:
    """Return the ranks that wait for a reset of their device and have not started since."""
    found: set[int] = set()
    asked: set[int] = set()
    for event in own:
        match event:
            case journal.Decided(strategy=strategy, fault=fault):
                by_healing = strategy in (Strategy.RECOVER_IN_PLACE, Strategy.RESTART)
                asked = set()
                if not heals(fault) or not by_healing:
                    found -= {fault.rank} if fault.kind is Kind.DEVICE else set()
                elif event.approval:
                    asked = {fault.rank}
                else:
                    found.add(fault.rank)
            case journal.Answered(granted=True):
                found |= asked
            case journal.RanksStarted(ranks=ranks):
                found -= set(ranks)
    return frozenset(found)


def unmet(own: Iterable[journal.Event]) -> tuple[journal.SignSeen, ...]:
    """Return the signs of devices that no fault was made of while the same processes live."""
    found: list[journal.SignSeen] = []
    per_node = 1
    for event in own:
        match event:
            case journal.JobStarted():
                per_node = event.processes_per_node
            case journal.SignSeen(sign=sign, urgency=Urgency.NOW):
                found += [event] if sign.device >= 0 and not sign.gone else []
            case journal.RanksStarted(ranks=ranks):
                started = {divmod(rank, per_node) for rank in ranks}
                found = [e for e in found if (e.sign.node, e.sign.device) not in started]
            case journal.FaultSeen(fault=fault):
                place = fault.node, fault.device
                found = [e for e in found if (e.sign.node, e.sign.device) != place]
    return tuple(found)
