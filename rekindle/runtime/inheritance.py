"""What a coordinator takes over from earlier ones: folds over the journal. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from rekindle.recovery import journal
from rekindle.recovery.classification import explains
from rekindle.recovery.fault import Fault
from rekindle.recovery.history import Past
from rekindle.recovery.ladder import Decision
from rekindle.recovery.policy import INNER, Strategy
from rekindle.recovery.suspicion import Suspicion, suspicions
from rekindle.runtime.state import RESCHEDULED


class Earlier(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for all attempts of a job.

    generation, incident: the newest; their numbers only ever rise. suspicions: what ranks have said
    to be wrong. signs: what was reported of devices. past: what was decided. placements: the agents
    (address, process) of each node.
    """

    generation: int = 0
    incident: int = 0
    suspicions: tuple[Suspicion, ...] = ()
    signs: tuple[journal.SignSeen, ...] = ()
    past: tuple[Past, ...] = ()
    placements: dict[int, frozenset[tuple[str, int]]] = {}


def earlier(events: Sequence[journal.Event]) -> Earlier:
    """Fold the events of all attempts so far."""
    formed = (event.generation for event in events if isinstance(event, journal.Formed))
    return Earlier(
        generation=max(formed, default=0),
        incident=max((getattr(event, "incident", 0) for event in events), default=0),
        suspicions=tuple(suspicions(events)),
        signs=tuple(event for event in events if isinstance(event, journal.SignSeen)),
        past=_past(events),
        placements=_placements(events),
    )


class Inheritance(msgspec.Struct, frozen=True, kw_only=True):
    """What the coordinator that died in this attempt had decided, and what it left open.

    incident: number of the open incident, 0: none; restarts: restarts of all ranks so far.
    resumed: the step after which all ranks last began to train together.
    awaiting: what a person has yet to approve.
    left_out: nodes that the newest world went on without. stopping: why the attempt was being
    ended, if it was; outcome: how it would have ended.
    """

    restarts: int
    incident: int
    faults: tuple[Fault, ...]
    resumed: int = 0
    awaiting: tuple[Fault, Decision] | None = None
    left_out: tuple[int, ...] = ()
    stopping: str = ""
    outcome: str = "stopped"


def inheritance(events: Iterable[journal.Event], attempt: int) -> Inheritance | None:
    """Fold the events of `attempt`; None: it has not begun, so there is nothing to take over."""
    own: list[journal.Event] = []
    for event in events:
        if isinstance(event, journal.JobStarted):
            own = []
        own.append(event)
    if not own or not isinstance(own[0], journal.JobStarted) or own[0].attempt != attempt:
        return None
    formed = [event for event in own if isinstance(event, journal.Formed)]
    left_open = [i for i in journal.incidents(own) if not i.closed]
    decided = [event for event in own if isinstance(event, journal.Decided)]
    return Inheritance(
        restarts=max((e.restart for e in own if isinstance(e, journal.RanksStarted)), default=0),
        incident=left_open[-1].number if left_open else 0,
        faults=tuple(left_open[-1].faults) if left_open else (),
        resumed=_resumed(own),
        awaiting=_awaiting(own),
        left_out=formed[-1].left_out if formed else (),
        stopping=next((e.reason for e in own if isinstance(e, journal.Stopping)), ""),
        outcome=_OUTCOMES.get(decided[-1].strategy, "stopped") if decided else "stopped",
    )


_OUTCOMES = {
    Strategy.DUMP: "failed",
    Strategy.FAIL: "failed",
    Strategy.RESCHEDULE_JOB: RESCHEDULED,
    Strategy.RESCHEDULE_JOB_ISOLATED: RESCHEDULED,
}


def _resumed(own: Iterable[journal.Event]) -> int:
    """Return the step of the first generation since the last restart."""
    step, anew = 0, True
    for event in own:
        if isinstance(event, journal.Decided):
            anew = anew or event.strategy not in INNER
        elif isinstance(event, journal.Formed) and anew:
            step, anew = event.step, False
    return step


def _awaiting(own: Iterable[journal.Event]) -> tuple[Fault, Decision] | None:
    """Return the newest decision if it needs an approval that nobody has given or refused."""
    fault: Fault | None = None
    open_: tuple[Fault, Decision] | None = None
    for event in own:
        match event:
            case journal.FaultSeen():
                fault = event.fault
            case journal.Decided(approval=True) if fault is not None:
                asked = Decision(
                    strategy=event.strategy,
                    reason=event.reason,
                    roll_back=event.roll_back,
                    approval=True,
                )
                open_ = fault, asked
            case journal.Answered() | journal.Decided():
                open_ = None
    return open_


def _past(events: Iterable[journal.Event]) -> tuple[Past, ...]:
    """Pair each decision with the fault that it was about: the one seen last.

    An attempt that somebody began after the one before had ended begins with budgets of its own.
    """
    past: list[Past] = []
    fault: Fault | None = None
    ended = ""
    for event in events:
        match event:
            case journal.Ended():
                ended = event.outcome
            case journal.JobStarted():
                past = past if ended in ("", RESCHEDULED) else []
                ended = ""
            case journal.FaultSeen():
                fault = event.fault
                if past and explains(fault, past[-1].fault):  # what it was is known only now
                    past[-1] = msgspec.structs.replace(past[-1], fault=fault)
            case journal.Decided() if fault is not None:
                decided = Past(
                    fault=fault,
                    strategy=event.strategy,
                    newest=event.newest,
                    incident=event.incident,
                    resumed=event.resumed,
                    rolled_back=event.roll_back,
                )
                past.append(decided)
    return tuple(past)


def _placements(events: Iterable[journal.Event]) -> dict[int, frozenset[tuple[str, int]]]:
    found: dict[int, set[tuple[str, int]]] = {}
    for event in events:
        if isinstance(event, journal.NodeJoined):
            found.setdefault(event.node, set()).add((event.address, event.pid))
    return {node: frozenset(agents) for node, agents in found.items()}
