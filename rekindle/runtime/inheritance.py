"""What a coordinator takes over from one that died in the same attempt: a fold over the journal."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from rekindle.recovery import journal
from rekindle.recovery.fault import Fault
from rekindle.recovery.policy import Past, Strategy


class Inheritance(msgspec.Struct, frozen=True, kw_only=True):
    """What the dead coordinator had decided, and the incident it left open.

    incident: number of the open incident, 0: none; restarts: restarts of all ranks so far.
    left_out: nodes that the newest world went on without. stopping: why the job was being ended, if
        it was; failed: it was a failure.
    """

    past: tuple[Past, ...]
    restarts: int
    incident: int
    faults: tuple[Fault, ...]
    left_out: tuple[int, ...] = ()
    stopping: str = ""
    failed: bool = False


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
    return Inheritance(
        past=tuple(_past(own)),
        restarts=max((e.restart for e in own if isinstance(e, journal.RanksStarted)), default=0),
        incident=left_open[-1].number if left_open else 0,
        faults=tuple(left_open[-1].faults) if left_open else (),
        left_out=formed[-1].left_out if formed else (),
        stopping=next((e.reason for e in own if isinstance(e, journal.Stopping)), ""),
        failed=any(
            isinstance(e, journal.Decided) and e.strategy in (Strategy.DUMP, Strategy.FAIL)
            for e in own
        ),
    )


def _past(events: Iterable[journal.Event]) -> Iterable[Past]:
    """Pair each decision with the fault that it was about: the one seen last."""
    fault: Fault | None = None
    for event in events:
        if isinstance(event, journal.FaultSeen):
            fault = event.fault
        elif isinstance(event, journal.Decided) and fault is not None:
            yield Past(fault=fault, strategy=event.strategy, newest=fault.finished)
