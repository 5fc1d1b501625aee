"""A new coordinator continues the work of one that ended, with the ranks that still live."""

from __future__ import annotations

from rekindle.coordinator.machine.checkpoints import Checkpoints
from rekindle.coordinator.machine.endings import Endings
from rekindle.coordinator.machine.fleet import Fleet
from rekindle.coordinator.machine.health_events import HealthEvents
from rekindle.coordinator.machine.inheritance import TakeoverState
from rekindle.coordinator.machine.job_state import JobState, Phase, Send, SetTimer, Timer
from rekindle.coordinator.machine.moves import Moves
from rekindle.coordinator.machine.recovery import Recovery
from rekindle.coordinator.machine.roster import Status
from rekindle.protocol import agent as p
from rekindle.recovery.faults.fault import Fault, FaultKind
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import LATE_S

# The value of `LATE_S` for a takeover: some agents may have ended with the earlier coordinator.
TAKEN_OVER_LATE_S = 5.0


class Takeover:
    """Begins an attempt, or continues the attempt of a coordinator that ended.

    inherits: whether an earlier coordinator of this attempt has ended.
    """

    def __init__(
        self,
        job: JobState,
        fleet: Fleet,
        checkpoints: Checkpoints,
        endings: Endings,
        moves: Moves,
        recovery: Recovery,
        health: HealthEvents,
    ) -> None:
        self._job = job
        self._fleet = fleet
        self._checkpoints = checkpoints
        self._endings = endings
        self._moves = moves
        self._recovery = recovery
        self._health = health
        self._roster = job.roster
        self._spec = job.spec
        self._incidents = job.incidents
        self.inherits = False
        self._taken_over = False  # whether ranks with a Session were taken over

    def start(self, inherited: TakeoverState | None = None) -> None:
        """Wait for the nodes: new ones, or the nodes of an earlier coordinator."""
        self._job.do(SetTimer(Timer.LATE, TAKEN_OVER_LATE_S if inherited else LATE_S))
        if inherited is not None:
            self.inherits = True
            self._job.restarts = inherited.restarts
            self._job.resumed, self._job.newest = inherited.resumed, inherited.newest
            self._job.met = inherited.met
            self._job.sessions_seen = inherited.sessions_seen
            if inherited.incident is not None:
                self._incidents.inherit(inherited.incident)
            self._fleet.to_reset = set(inherited.to_reset)
            self._job.isolation.add(inherited.isolated, inherited.leaving)
            self._incidents.awaiting, self._incidents.held = (
                inherited.awaiting,
                list(inherited.held),
            )
            if self._incidents.awaiting is not None:
                self._job.do(SetTimer(Timer.APPROVAL, self._spec.policy.approval_timeout_s))
            for node in inherited.left_out:
                self._roster.leave_out(node)
            self._moves.inherit(inherited.moves, inherited.late)
            self._job.moved_away = inherited.moved_away
            if inherited.stopping is not None:
                # Agents that come now are refused, and end their ranks. Late agents do this later.
                self._job.enter(Phase.STOPPING)
                self._endings.stop_reason = inherited.stopping.reason
                self._endings.outcome = inherited.stopping.outcome
        self._job.do(SetTimer(Timer.NODE, self._spec.policy.node_timeout_s))
        self._health.resume(inherited.unmet if inherited else ())

    def take_over(self, connection: int, hello: p.Hello, *, prepared: bool = False) -> None:
        """Take over the live ranks of an agent.

        prepared: a spare has started them for this coordinator. Otherwise they are from an earlier
        coordinator.
        """
        self._health.take_over(hello)
        self._take_over_ranks(connection, hello, prepared=prepared)
        self._health.check_again()

    def _take_over_ranks(self, connection: int, hello: p.Hello, *, prepared: bool) -> None:
        if self._job.phase is Phase.RESTARTING or hello.restart < self._job.restarts:
            return  # its ended ranks start again with all others
        for number in hello.ended:
            self._roster.ranks[number].status = Status.EXITED
        for live in hello.ranks:
            rank = self._roster.ranks[live.rank]
            rank.pid = live.pid
            rank.status = Status.LEAVING if live.training else Status.STARTING
        if not hello.ranks and not hello.ended:
            return
        self._job.interruption = None  # ranks have outlived the earlier coordinator
        if prepared:
            started = tuple(live.rank for live in hello.ranks)
            self._job.record(journal.RanksStarted(ranks=started, restart=hello.restart))
            self._health.note_starts(hello.host, hello.ranks)
        self._job.enter(Phase.REGROUPING)
        if hello.store is not None and not self._spec.can_join:
            # The framework ends the ranks when this store ends, so they keep this store.
            host = self._spec.master_addr or hello.address
            self._job.store.adopt(hello.node, host, hello.store)
        self._job.generation = max(self._job.generation, hello.generation)
        self._job.restarts = max(self._job.restarts, hello.restart)
        self._checkpoints.assembly.begin(self._job.generation)
        if any(live.training for live in hello.ranks):
            # The state of their generation is unknown, so all ranks leave it, and form a new one.
            self._job.session = self._job.sessions_seen = self._job.formed = True
            cause = None if prepared else p.Cause(kind=FaultKind.COORDINATOR.value)
            over = p.GenerationEnded(generation=hello.generation, cause=cause)
            self._job.do(Send(connection, over))
            self._job.do(SetTimer(Timer.LEAVE, self._spec.policy.leave_timeout_s))
            if self.inherits and not self._taken_over and not prepared:
                self._taken_over = True
                text = "the coordinator ended unexpectedly, and a new coordinator replaced it"
                self._recovery.report(Fault(kind=FaultKind.COORDINATOR, message=text))
        if self._job.session and self._roster.any_is(Status.STARTING):
            self._job.do(SetTimer(Timer.JOIN, self._spec.policy.join_timeout_s))
        if self._roster.all_are(Status.EXITED):
            self._endings.on_good_exit()  # the earlier coordinator did not receive the last end
