"""The coordinator's state machine: events in, commands out.

The machine does not do I/O, and its callers pass the time. It has parts. Each part gets the parts
before it, so later parts call earlier ones. Two calls lead upward: `report` (a fault) and `proceed`
(all ranks may wait).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rekindle.coordinator.machine.admission import Admission
from rekindle.coordinator.machine.checkpoints import Checkpoints, StoreNews
from rekindle.coordinator.machine.elasticity import Elasticity
from rekindle.coordinator.machine.endings import Endings
from rekindle.coordinator.machine.fleet import Fleet
from rekindle.coordinator.machine.generations import Generations
from rekindle.coordinator.machine.hangs import Hangs
from rekindle.coordinator.machine.health_events import HealthEvents
from rekindle.coordinator.machine.inheritance import JobHistory, interval_of
from rekindle.coordinator.machine.injections import Injections
from rekindle.coordinator.machine.job_state import ENDING, JobState, Phase, SetTimer, Timer
from rekindle.coordinator.machine.losses import Losses
from rekindle.coordinator.machine.moves import Moves
from rekindle.coordinator.machine.pauses import Pauses
from rekindle.coordinator.machine.recovery import Recovery
from rekindle.coordinator.machine.replicas import ReplicaComparison
from rekindle.coordinator.machine.roster import Status
from rekindle.coordinator.machine.stragglers import ProfilingSwitch, StragglerCheck
from rekindle.coordinator.machine.takeover import Takeover
from rekindle.errors import ProtocolError
from rekindle.job.spec import JobSpec
from rekindle.protocol import agent as p
from rekindle.recovery.faults.fault import Fault, FaultKind, root_cause
from rekindle.recovery.journal import journal

if TYPE_CHECKING:
    from rekindle.recovery.faults.tables.tables import Tables

CHECKED_AFTER_S = 1.0
OF_ANY_AGENT = (p.Hello, p.CheckpointInvalid, p.ProfilingSwitchRead)  # also of agents without ranks
_WAITS = (Timer.LATE, Timer.NODE, Timer.WANTED)  # limits for agents to join
_NOTHING = JobHistory()

# One signature, so that the tables below name methods: the node, the message, and the time.
MessageHandler = Callable[[int, Any, float], None]
TimerHandler = Callable[[float], None]  # the time


class Machine:
    """The state of one attempt of a job. `job.drain()` returns the commands.

    tables: loads the tables of faults. earlier: the state that earlier attempts have left.
    """

    def __init__(
        self,
        spec: JobSpec,
        tables: Callable[[], Tables],
        *,
        attempt: int = 0,
        earlier: JobHistory = _NOTHING,
    ) -> None:
        self.job = job = JobState(spec, tables, attempt, earlier)
        self.injections = Injections(job)
        interval = interval_of(spec, earlier)
        settings = p.Settings(checkpoint_every=interval.steps, profile=earlier.profile)
        self.fleet = Fleet(job, self.injections, earlier.placements, settings)
        self.switch = ProfilingSwitch(job, self.fleet, earlier.traced)
        self.checkpoints = Checkpoints(job, self.fleet, interval)
        self.generations = Generations(
            job, self.fleet, self.injections, self.checkpoints, self._report, self._proceed
        )
        self.replicas = ReplicaComparison(job, self.fleet, self.generations, self._report)
        self.endings = Endings(job, self.fleet, self.checkpoints, self._report)
        self.elasticity = Elasticity(job, self.fleet, self.generations, self.endings, self._proceed)
        self.moves = Moves(job, self.fleet, self.checkpoints, self.generations)
        self.recovery = Recovery(
            job,
            self.fleet,
            self.checkpoints,
            self.generations,
            self.endings,
            self.elasticity,
            self._proceed,
        )
        self.hangs = Hangs(job, self.fleet, self.endings, self.recovery)
        self.health = HealthEvents(job, self.fleet, self.moves, self.recovery)
        self.stragglers = StragglerCheck(job, self.generations, self.recovery, self._proceed)
        self.takeover = Takeover(
            job, self.fleet, self.checkpoints, self.endings, self.moves, self.recovery, self.health
        )
        self.admission = Admission(
            job, self.fleet, self.moves, self.recovery, self.takeover, self._proceed
        )
        self.losses = Losses(
            job,
            self.injections,
            self.fleet,
            self.checkpoints,
            self.generations,
            self.endings,
            self.elasticity,
            self.moves,
            self.recovery,
            self.stragglers,
            self.admission,
        )
        users = (self.elasticity, self.stragglers, self.moves)
        self.pauses = Pauses(job, self.generations, users)
        self._handlers = self._message_handlers()
        self._timers = self._timer_handlers()
        self._ending_timers = self._ending_timer_handlers()

    def _report(self, fault: Fault) -> None:
        self.recovery.report(fault)

    def _proceed(self) -> None:
        """If every rank of the world waits, form the next generation or dismiss the ranks.

        The method does nothing while a user must approve a decision, while a part works in the
        pause, or before the ranks' store listens.
        """
        job, generations = self.job, self.generations
        if job.phase in (Phase.RESTARTING, *ENDING) or not job.roster.all_are(Status.WAITING):
            return
        if job.incidents.awaiting is not None:
            return
        if self.replicas.differ():
            return
        live = {generations.live(rank) for rank in job.roster.world}
        if len(live) == 1 and None not in live and generations.are_done():
            generations.dismiss()
            return
        if job.phase not in (Phase.REGROUPING, Phase.GATHERING) or self.pauses.work():
            return
        if generations.disagree() or generations.differ():
            return
        self.fleet.ask_for_store()
        if not job.store.is_up:
            return
        faults = job.incidents.unanswered
        if faults and all(fault.kind is FaultKind.LINK for fault in faults):
            # Every process is alive, so only links can have failed.
            self.elasticity.put_newcomers_out()
            self.recovery.decide(root_cause(faults))
        if job.phase in (Phase.REGROUPING, Phase.GATHERING):
            if generations.form():
                self.replicas.formed()

    def on_message(self, connection: int, message: p.Message, now: float) -> None:
        """Handle a message that an agent sends about itself or its ranks.

        Raises ProtocolError: the agent must not send this message.
        """
        if connection in self.job.sent_home:
            return  # the agent has not read yet that it must end
        sender = self.job.roster.by_connection(connection)
        if sender is None or isinstance(message, OF_ANY_AGENT):
            self._on_message_of_agent(connection, message, now)
        else:
            self._on_message_of_node(sender.node, message, now)

    def _on_message_of_agent(self, connection: int, message: p.Message, now: float) -> None:
        """Handle a message that any agent may send, or a message of an agent that is not a node."""
        checked = self.admission.check.knows(connection)
        known = checked or self.job.roster.knows(connection)
        if isinstance(message, p.ProfilingSwitchRead) and known:
            self.switch.on_switch_read(message, now)  # valid for the complete job
        elif checked:
            self.admission.on_check_news(connection, message, now)
        elif isinstance(message, p.Hello):
            self.admission.on_hello(connection, message)
        elif isinstance(message, p.CheckpointInvalid) and known:
            self.job.record(journal.CheckpointSkipped(path=message.path, reason=message.reason))
        elif (node := self.job.roster.prepares(connection)) is not None:
            self.moves.on_message(connection, node, message)
            self.pauses.request()
        elif connection in self.job.roster.clearing:
            self.moves.on_message_of_released(connection, message)
        else:
            raise ProtocolError("the agent is not a node of the job, so it may only send Hello")

    def _on_message_of_node(self, node: int, message: p.Message, now: float) -> None:
        if not self.job.roster.owns(node, message.ranks_named):
            raise ProtocolError(f"node {node} sent a message for ranks of other nodes")
        handler = self._handlers.get(type(message))
        if handler is None:
            name = type(message).__name__
            raise ProtocolError(
                f"node {node} sent a {name}, which an agent must not send to a coordinator"
            )
        handler(node, message, now)

    def on_timer(self, timer: Timer, now: float) -> None:
        """Handle a time limit. While the job ends, most of them have no effect."""
        if timer in _WAITS and self.admission.check.is_busy:
            # The awaited nodes may be among the nodes that are being checked.
            self.job.do(SetTimer(timer, CHECKED_AFTER_S))
            return
        table = self._ending_timers if self.job.phase in ENDING else self._timers
        if timer in table:
            table[timer](now)

    def _message_handlers(self) -> dict[type[p.Message], MessageHandler]:
        generations, losses, stored = self.generations, self.losses, self._on_store_news
        return {
            p.Arrived: self._on_arrived,
            p.Heartbeat: self._on_beat,
            p.Checked: self.stragglers.on_check_news,
            p.CheckReady: self.stragglers.on_check_news,
            p.WriteLeftOut: stored,
            p.CheckpointWritten: stored,
            p.Conditions: self.health.on_conditions,
            p.Exited: self._on_exited,
            p.DeviceResetFailed: self.recovery.on_reset_failed,
            p.Paused: self.pauses.on_paused,
            p.RanksInspected: self._on_inspected,
            p.ShardReady: stored,
            p.ShardWritten: stored,
            p.Pruned: stored,
            p.SnapshotRefused: stored,
            p.Snapshots: self.checkpoints.on_snapshots,
            p.SpawnFailed: losses.on_spawn_failed,
            p.Spawned: self._on_spawned,
            p.RankStalled: self.hangs.on_stalled,
            p.StateReady: generations.on_state_ready,
            p.StepDone: self._on_step_done,
            p.StepFailed: losses.on_step_failed,
            p.StepLeftOut: losses.on_step_skipped,
            p.StoreDown: generations.on_store_down,
            p.StoreUp: self.admission.on_store_up,
            p.StepTimings: self._on_step_timings,
        }

    def _timer_handlers(self) -> dict[Timer, TimerHandler]:
        return self._check_timer_handlers() | {
            Timer.AGAIN: self.hangs.inspect,
            Timer.APPROVAL: self.recovery.on_approval_late,
            Timer.COME: self.elasticity.on_outside_late,
            Timer.DOUBT: self.recovery.on_explanation_late,
            Timer.END: self.losses.on_unkillable,
            Timer.JOIN: self.losses.on_join_late,
            Timer.LATE: self.admission.on_late,
            Timer.LEAVE: self.losses.on_leave_late,
            Timer.LOOK: self.hangs.judge,
            Timer.MOVE: self.moves.on_deadline,
            Timer.NODE: self.admission.on_nodes_missed,
            Timer.PREPARE: self.moves.on_preparation_late,
            Timer.WANTED: self.fleet.ask_again,
            Timer.HEALTH_EVENTS: self.health.check_events,
        }

    def _ending_timer_handlers(self) -> dict[Timer, TimerHandler]:
        return self._check_timer_handlers() | {
            Timer.FINAL_CHECKPOINT: self.endings.on_final_checkpoint_late,
            Timer.END: self.endings.on_unkillable,
            Timer.LATE: self.endings.on_late,
        }

    def _check_timer_handlers(self) -> dict[Timer, TimerHandler]:
        return {
            Timer.CHECK: self.admission.on_answers_late,
            Timer.CHECK_BEGINS: self.admission.on_gathering_over,
            Timer.EXAMINATION: self.stragglers.on_answers_late,
            Timer.EXAMINATION_BEGINS: self.stragglers.on_gathering_over,
        }

    def _on_beat(self, node: int, message: p.Heartbeat, now: float) -> None:
        self.checkpoints.on_beat(node, message, now)
        self.replicas.on_beat(message, now)

    def _on_exited(self, node: int, message: p.Exited, now: float) -> None:
        self.replicas.on_exited(message)
        self.losses.on_exited(node, message, now)

    def _on_arrived(self, node: int, message: p.Arrived, now: float) -> None:
        self.replicas.on_arrived(message)
        self.generations.on_arrived(message)
        if self.job.roster.any_is(Status.EXITED):
            self.endings.miss_exited()
        self.pauses.request()

    def _on_step_done(self, node: int, message: p.StepDone, now: float) -> None:
        self.generations.on_step_done(message)
        if self.job.phase is Phase.TRAINING and self.job.roster.all_stepped:
            self.moves.on_stepped()
        self.pauses.request()

    def _on_store_news(self, node: int, message: StoreNews, now: float) -> None:
        self.endings.on_store_news(node, message, now)
        self.pauses.request()  # a planned move may have waited for the checkpoint

    def _on_step_timings(self, node: int, message: p.StepTimings, now: float) -> None:
        self.stragglers.on_step_timings(message)
        self.pauses.request()

    def _on_inspected(self, node: int, message: p.RanksInspected, now: float) -> None:
        self.hangs.on_inspected(node, message, now)
        self.losses.on_inspected(node, message)

    def _on_spawned(self, node: int, message: p.Spawned, now: float) -> None:
        self.generations.on_spawned(message)
        self.health.on_spawned(node, message, now)
