"""The state that a coordinator takes over from earlier ones, as pure functions of the journal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from rekindle.job.spec import JobSpec
from rekindle.names import SPARE
from rekindle.profiling.switch import Switch
from rekindle.protocol.rank import Profile
from rekindle.recovery.faults.classification import explains
from rekindle.recovery.faults.fault import Fault, FaultKind
from rekindle.recovery.faults.health_events import Place
from rekindle.recovery.faults.stragglers import BY_TRACE, Profiled
from rekindle.recovery.faults.tables.verdict import Urgency
from rekindle.recovery.journal import attempts, journal
from rekindle.recovery.journal.journal import RESCHEDULED
from rekindle.recovery.policy.decide import Decision
from rekindle.recovery.policy.history import Past, besides, resets
from rekindle.recovery.policy.interval import Interval
from rekindle.recovery.policy.policy import INNER, RESET_BY
from rekindle.states import Suspicion

# More orders with a number than one coordinator gives between two events of the journal.
_SERIALS = 1_000_000

# The machine does not decide about a failed link before its cause appears. A coordinator that takes
# over reports the loss of the earlier one itself.
_NEVER_HELD = (FaultKind.LINK, FaultKind.COORDINATOR)
Placement = tuple[int, str, int]  # an agent: attempt, address and process; process numbers recur


def held(own: Iterable[journal.Event]) -> tuple[Fault, ...]:
    """Return the faults that occurred while a decision waited for a user, and wait with it.

    After an answer, the machine decides about all of them. A restart of all ranks answers all of
    them.
    """
    found: list[Fault] = []
    awaiting = False
    for event in own:
        match event:
            case journal.FaultSeen(fault=fault, explained=False) if awaiting:
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
    """Return the nodes that had to leave a host, and have not joined again since."""
    found: set[int] = set()
    for event in own:
        match event:
            case journal.Isolated(node=node) if node != SPARE:  # otherwise it has not joined
                found.add(node)
            case journal.NodeJoined(node=node):
                found.discard(node)
    return frozenset(found)


def to_reset(own: Iterable[journal.Event]) -> frozenset[int]:
    """Return the ranks that wait for a reset of their device, and have not started since."""
    found: set[int] = set()
    asked: set[int] = set()
    for event in own:
        match event:
            case journal.Decided(strategy=strategy, fault=fault):
                asked = set()
                if not resets(fault) or strategy not in RESET_BY:
                    found -= {fault.rank} if fault.kind is FaultKind.DEVICE else set()
                elif event.approval:
                    asked = {fault.rank}
                else:
                    found.add(fault.rank)
            case journal.Answered(granted=True):
                found |= asked
            case journal.RanksStarted(ranks=ranks):
                found -= set(ranks)
    return frozenset(found)


def unmet(own: Iterable[journal.Event]) -> tuple[journal.HealthEventSeen, ...]:
    """Return the health events of devices that did not lead to a fault.

    The result has only those after which the same processes live.
    """
    found: list[journal.HealthEventSeen] = []
    per_node = 1
    for event in own:
        match event:
            case journal.JobStarted():
                per_node = event.processes_per_node
            case journal.HealthEventSeen(health_event=health_event, urgency=Urgency.NOW):
                found += [event] if health_event.device >= 0 and not health_event.gone else []
            case journal.RanksStarted(ranks=ranks):
                started = {divmod(rank, per_node) for rank in ranks}
                found = [
                    e for e in found if (e.health_event.node, e.health_event.device) not in started
                ]
            case journal.FaultSeen(fault=fault):
                place = fault.node, fault.device
                found = [e for e in found if (e.health_event.node, e.health_event.device) != place]
    return tuple(found)


def moves(own: Iterable[journal.Event]) -> tuple[journal.MoveRequested, ...]:
    """Return the planned moves of nodes that are not over."""
    found: dict[int, journal.MoveRequested] = {}
    for event in own:
        match event:
            case journal.MoveRequested(incident=incident):
                found[incident] = event
            case journal.Moved(incident=incident) | journal.MoveEnded(incident=incident):
                found.pop(incident, None)
    return tuple(found.values())


def late(own: Iterable[journal.Event]) -> frozenset[int]:
    """Return the moves whose deadline has passed, and after it the ranks wrote a checkpoint."""
    passed, written = set[int](), frozenset[int]()
    for event in own:
        match event:
            case journal.MoveLate(incident=incident):
                passed.add(incident)
            case journal.Checkpointed():
                written = frozenset(passed)
    return written


class Interruption(msgspec.Struct, frozen=True):
    """The end of all ranks that no incident of the journal explains.

    step: the newest finished step in the journal. Ranks may have finished later ones, unless
    `exact` is true. what: the text of the end. since: the time of the last event, unless an end of
    the attempt is in the journal.
    """

    step: int
    exact: bool
    what: str
    since: float = 0.0


def interruption(events: Sequence[journal.Event]) -> Interruption | None:
    """Return how the work of the ranks has ended; None: an incident explains it, or none started.

    Without an end in the journal, the newest step is unknown.
    """
    own = attempts.newest(events)
    if not any(isinstance(event, journal.RanksStarted) for event in own):
        return None
    found = journal.incidents(events)
    end = next((event for event in own if isinstance(event, journal.Ended)), None)
    if end is None:
        if any(not (one.closed or one.planned) for one in found):
            return None
        steps = (e.step for e in own if isinstance(e, journal.FirstStep | journal.Checkpointed))
        text = "the coordinator and all agents of the job ended"
        return Interruption(max(steps, default=0), False, text, since=events[-1].at)
    if any(one.steps_lost is None for one in found):
        return None
    return Interruption(end.finished, True, f"the earlier attempt ended ({end.reason})")


class JobHistory(msgspec.Struct, frozen=True, kw_only=True):
    """The state that holds for all attempts of a job.

    generation, incident: the newest numbers, which only rise. suspicions: states that may be wrong.
    health_events: the reported ones of devices. device_starts: of the newest process on each.
    past: the decisions so far. placements: the agents of each node. at: time of the newest event.

    checkpoint_every: steps, as last chosen; 0: never chosen. profile: the profiling settings.
    traced: the last position of MindCluster's switch.

    faults, seconds: number of incidents with faults, and duration of all attempts.

    interruption: the end of the ranks' work that no incident explains.

    serial: no earlier order has a higher number. A coordinator records that a node joins before it
    sends an order to the node, so each coordinator begins at another number.
    """

    generation: int = 0
    incident: int = 0
    suspicions: tuple[Suspicion, ...] = ()
    health_events: tuple[journal.HealthEventSeen, ...] = ()
    device_starts: dict[Place, float] = {}
    past: tuple[Past, ...] = ()
    placements: dict[int, frozenset[Placement]] = {}
    at: float = 0.0
    checkpoint_every: int = 0
    profile: Profile = Profile()
    traced: Switch = Switch()
    faults: int = 0
    seconds: float = 0.0
    interruption: Interruption | None = None
    serial: int = 0


def earlier(events: Sequence[journal.Event]) -> JobHistory:
    """Return the history of all attempts in these events."""
    formed = (event.generation for event in events if isinstance(event, journal.Formed))
    profiled = [event for event in events if isinstance(event, Profiled)]
    traced = [event.switch for event in profiled if event.by == BY_TRACE]
    return JobHistory(
        generation=max(formed, default=0),
        incident=max((getattr(event, "incident", 0) for event in events), default=0),
        suspicions=tuple(
            (event.generation, event.valid_steps)
            for event in events
            if isinstance(event, journal.Suspected)
        ),
        health_events=tuple(
            event for event in events if isinstance(event, journal.HealthEventSeen)
        ),
        device_starts=_device_starts(events),
        past=_past(events),
        placements=_placements(events),
        at=max((event.at for event in events), default=0.0),
        checkpoint_every=next(
            (e.steps for e in reversed(events) if isinstance(e, journal.CheckpointInterval)), 0
        ),
        profile=Profile(switch=profiled[-1].switch, since=profiled[-1].since)
        if profiled
        else Profile(),
        traced=traced[-1] if traced else Switch(),
        faults=len({event.incident for event in events if isinstance(event, journal.FaultSeen)}),
        seconds=_seconds(events),
        interruption=interruption(events),
        serial=_SERIALS * len(events),
    )


def interval_of(spec: JobSpec, before: JobHistory) -> Interval:
    """Return the interval between two checkpoints, for a job with this history."""
    return Interval(
        spec.checkpoint_every,
        devices=spec.world_size,
        known=before.checkpoint_every,
        faults=before.faults,
        seconds=before.seconds,
    )


def _seconds(events: Iterable[journal.Event]) -> float:
    """Return the duration of all attempts together, in seconds."""
    began, last, seconds = 0.0, 0.0, 0.0
    for event in events:
        if isinstance(event, journal.JobStarted):
            seconds, began = seconds + last - began, event.at
        last = event.at
    return seconds + last - began


class TakeoverState(msgspec.Struct, frozen=True, kw_only=True):
    """The decisions and the open work of the coordinator that ended in this attempt.

    incident: the open one. restarts: restarts of all ranks so far. resumed: the step after which
    all ranks last started to train together.

    newest: the newest finished step that it knew. Without this step, the machine cannot see that a
    step followed a decision.

    awaiting: the decision that a user must still approve. held: faults that wait for this decision.
    to_reset: ranks whose device is reset before they start.

    unmet: health events that no rank has met. isolated: hosts. leaving: nodes that had to leave
    them and have not joined again.

    met: whether all ranks have trained together since the last restart. sessions_seen: whether
    they have ever done so in this attempt.
    moves: planned moves that are not over. late: incidents of moves whose deadline has passed.
    moved_away: agents (address, process) that a move has replaced.

    left_out: nodes outside the newest world. stopping: how and why the attempt was ending, if it
    was.
    """

    restarts: int
    incident: journal.Incident | None = None
    resumed: int = 0
    newest: int = 0
    met: bool = False
    sessions_seen: bool = False
    awaiting: tuple[Fault, Decision] | None = None
    held: tuple[Fault, ...] = ()
    to_reset: frozenset[int] = frozenset()
    unmet: tuple[journal.HealthEventSeen, ...] = ()
    isolated: tuple[str, ...] = ()
    leaving: frozenset[int] = frozenset()
    moves: tuple[journal.MoveRequested, ...] = ()
    late: frozenset[int] = frozenset()
    moved_away: frozenset[tuple[str, int]] = frozenset()
    left_out: tuple[int, ...] = ()
    stopping: journal.Stopping | None = None


def inheritance(events: Iterable[journal.Event], attempt: int) -> TakeoverState | None:
    """Return the state to take over in `attempt`; None: the attempt has not begun."""
    own = attempts.newest(events)
    if not own or not isinstance(own[0], journal.JobStarted) or own[0].attempt != attempt:
        return None
    formed = [event for event in own if isinstance(event, journal.Formed)]
    stopping = [event for event in own if isinstance(event, journal.Stopping)]
    unfinished = [i for i in journal.incidents(own) if not (i.closed or i.planned)]
    awaiting = _awaiting(own)
    return TakeoverState(
        restarts=max((e.restart for e in own if isinstance(e, journal.RanksStarted)), default=0),
        incident=unfinished[-1] if unfinished else None,
        resumed=_resumed(own),
        newest=_newest(own),
        met=_met(own),
        sessions_seen=any(journal.OF_SCRIPT not in event.sources for event in formed),
        awaiting=awaiting,
        held=held(own) if awaiting else (),
        to_reset=to_reset(own),
        unmet=unmet(own),
        isolated=tuple(event.host for event in own if isinstance(event, journal.Isolated)),
        leaving=leaving(own),
        moves=moves(own),
        late=late(own),
        moved_away=frozenset((e.address, e.pid) for e in own if isinstance(e, journal.Moved)),
        left_out=formed[-1].left_out if formed else (),
        stopping=stopping[-1] if stopping else None,
    )


def _resumed(own: Iterable[journal.Event]) -> int:
    """Return the step of the first generation since the last restart."""
    step, anew = 0, True
    for event in own:
        if isinstance(event, journal.Decided):
            anew = anew or event.strategy not in INNER
        elif isinstance(event, journal.Formed) and anew:
            step, anew = event.step, False
    return step


def _met(own: Iterable[journal.Event]) -> bool:
    """Return whether the ranks of a Session have formed a generation since the last restart."""
    met = False
    for event in own:
        match event:
            case journal.Decided(approval=False) | journal.Answered(granted=True):
                met = met and event.strategy in INNER
            case journal.Formed() if journal.OF_SCRIPT not in event.sources:
                met = True
    return met


def _newest(own: Iterable[journal.Event]) -> int:
    """Return the newest finished step in the events since training last continued."""
    step = 0
    for event in own:
        if isinstance(event, journal.FirstStep):
            step = event.step
        elif isinstance(event, journal.Decided):
            step = max(step, event.newest)
    return step


def _awaiting(own: Sequence[journal.Event]) -> tuple[Fault, Decision] | None:
    """Return the decision that waits for a user's approval, with its fault, or None."""
    asked, past = attempts.waits_for_approval(own), _past(own)
    if asked is None or not past:
        return None
    decision = Decision(
        strategy=asked.strategy,
        reason=asked.reason,
        isolate=asked.isolate,
        roll_back=asked.roll_back,
        approval=True,
        apart=asked.apart,
    )
    return past[-1].fault, decision


def _past(events: Iterable[journal.Event]) -> tuple[Past, ...]:
    """Return all decisions that count, each with its fault.

    The end of an attempt makes its decisions void, unless the next attempt follows immediately. An
    attempt that a user begins has its own budgets.
    """
    past: list[Past] = []
    for event in events:
        match event:
            case journal.Ended(outcome=outcome) if outcome != RESCHEDULED:
                past = []
            case journal.FaultSeen(explained=True):
                _explain(past, event)
            case journal.Decided(fault=fault):
                decided = Past(
                    fault=fault,
                    strategy=event.strategy,
                    newest=event.newest,
                    incident=event.incident,
                    resumed=event.resumed,
                    rolled_back=event.roll_back,
                    apart=event.apart,
                )
                past = [*besides(past, fault), decided]
    return tuple(past)


def _explain(past: list[Past], event: journal.FaultSeen) -> None:
    """Replace the fault of the newest decision that this event can explain."""
    for index in reversed(range(len(past))):
        of = past[index]
        if of.incident == event.incident and explains(event.fault, of.fault):
            past[index] = msgspec.structs.replace(of, fault=event.fault)
            return


def _placements(events: Iterable[journal.Event]) -> dict[int, frozenset[Placement]]:
    found: dict[int, set[Placement]] = {}
    attempt = 0
    for event in events:
        if isinstance(event, journal.JobStarted):
            attempt = event.attempt
        elif isinstance(event, journal.NodeJoined):
            found.setdefault(event.node, set()).add((attempt, event.address, event.pid))
    return {node: frozenset(agents) for node, agents in found.items()}


def _device_starts(events: Iterable[journal.Event]) -> dict[Place, float]:
    found: dict[Place, float] = {}
    hosts: dict[int, str] = {}
    per_node = 1
    for event in events:
        match event:
            case journal.JobStarted(processes_per_node=per_node):
                hosts = {}
            case journal.NodeJoined(node=node, host=host):
                hosts[node] = host
            case journal.RanksStarted(ranks=ranks):
                places = (divmod(rank, per_node) for rank in ranks)
                found |= {(hosts.get(node, ""), device): event.at for node, device in places}
    return found
