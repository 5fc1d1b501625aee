"""Faults that end a generation: lost agents, ended ranks, failed steps, passed time limits."""

from __future__ import annotations

import msgspec

from rekindle.coordinator.machine.admission import Admission
from rekindle.coordinator.machine.checkpoints import Checkpoints
from rekindle.coordinator.machine.elasticity import Elasticity
from rekindle.coordinator.machine.endings import Endings
from rekindle.coordinator.machine.fleet import Fleet
from rekindle.coordinator.machine.generations import Generations
from rekindle.coordinator.machine.injections import Injections
from rekindle.coordinator.machine.job_state import ENDING, JobState, Phase, SetTimer, Timer
from rekindle.coordinator.machine.moves import Moves
from rekindle.coordinator.machine.recovery import Recovery
from rekindle.coordinator.machine.roster import Node, Rank, Status, group_by_node
from rekindle.coordinator.machine.stragglers import StragglerCheck
from rekindle.errors import ProtocolError
from rekindle.names import KILLED_S
from rekindle.protocol import agent as p
from rekindle.protocol.heartbeat_page import BUSY_S
from rekindle.recovery.faults.classification import fault_of_exit
from rekindle.recovery.faults.fault import Fault, FaultKind
from rekindle.recovery.journal import journal

_FAILED = {
    FaultKind.LINK: "a collective of rank {rank} failed: {error}",
    FaultKind.TRANSIENT: "rank {rank} had an error that the script declares as transient: {error}",
    FaultKind.DEVICE_MEMORY: "the device memory of rank {rank} is damaged: {error}",
    FaultKind.DEVICE: "rank {rank} could not repair its device: {error}",
}

# After `join_timeout_s`, the agents look at ranks that have not arrived. A rank is late if none of
# these ranks was active at several looks. A rank that computes or reads is not late for `BUSY_S`,
# and neither is one whose agent does not answer.
LOOK_S = 3.0  # for the answers to one look
IDLE_LOOKS = 3
ACTIVE_PAUSE_S = 30.0  # after a look that found an active rank; also for answers that are late
ACTIVE_LOOKS = round(BUSY_S / ACTIVE_PAUSE_S)


class JoinLooks(msgspec.Struct):
    """Looks at ranks after `join_timeout_s`. of: their processes, as (rank, pid).

    serial: of the look that is under way, or 0. found: whether this look found an active rank.
    seen: nodes that showed their ranks in this look. patient: whether it waits for late answers.
    idle, active, unseen: looks with each result so far. unseen: without an answer that shows ranks.
    """

    of: frozenset[tuple[int, int]] = frozenset()
    serial: int = 0
    found: bool = False
    seen: set[int] = set()
    patient: bool = False
    idle: int = 0
    active: int = 0
    unseen: int = 0

    def begin(self, serial: int) -> None:
        """Note the look that begins."""
        self.serial, self.found, self.seen, self.patient = serial, False, set(), False

    def is_complete(self, nodes: set[int]) -> bool:
        """Return whether the look has its result: these nodes have the ranks."""
        return not self.serial or self.found or nodes <= self.seen

    def take(self, nodes: set[int]) -> None:
        """Count the look that is under way."""
        if not self.is_complete(nodes):
            self.unseen += 1
        elif self.serial:
            self.active += self.found
            self.idle = 0 if self.found else self.idle + 1
        self.serial = 0

    @property
    def are_over(self) -> bool:
        """Return whether the ranks are late."""
        return self.idle == IDLE_LOOKS or self.active + self.unseen == ACTIVE_LOOKS

    @property
    def result(self) -> str:
        """Return what the looks found, after the sentence that a rank is late."""
        if self.idle == IDLE_LOOKS:
            return "and does nothing"
        if self.unseen:
            return f"and {self.unseen} looks got no answer about it"
        return "although it is active"


class Losses:
    """Reports lost agents and failed ranks as faults."""

    def __init__(
        self,
        job: JobState,
        injections: Injections,
        fleet: Fleet,
        checkpoints: Checkpoints,
        generations: Generations,
        endings: Endings,
        elasticity: Elasticity,
        moves: Moves,
        recovery: Recovery,
        stragglers: StragglerCheck,
        admission: Admission,
    ) -> None:
        self._job = job
        self._injections = injections
        self._fleet = fleet
        self._checkpoints = checkpoints
        self._generations = generations
        self._endings = endings
        self._elasticity = elasticity
        self._moves = moves
        self._recovery = recovery
        self._stragglers = stragglers
        self._admission = admission
        self._roster = job.roster
        self._spec = job.spec
        self._left_early = 0  # nodes that were lost before any rank was started
        self._looks = JoinLooks()

    def on_agent_lost(self, connection: int, now: float) -> None:
        """Handle the loss of an agent's connection, which counts as the loss of its node."""
        self._stragglers.check.on_lost(connection)
        if not self._admission.on_lost(connection, now):
            self._on_admitted_lost(connection, now)
        self._stragglers.end_check(now)

    def _on_admitted_lost(self, connection: int, now: float) -> None:
        self._job.sent_home.discard(connection)
        lost = self._roster.by_connection(connection)
        if lost is None:
            asked = self._fleet.on_spare_lost(connection)
            self._moves.on_lost(connection, asked=asked)
            return
        text = f"the job lost node {lost.node} ({lost.address}) with its agent and all its ranks"
        self._on_node_lost(lost, text, now)

    def on_unkillable(self, now: float) -> None:
        """Give up the nodes with ranks that SIGKILL did not end, because the kernel blocks them."""
        ending = [rank for rank in self._roster.ranks if rank.status is Status.ENDING]
        for number, ranks in group_by_node(ending).items():
            lost = self._roster.nodes.get(number)
            if lost is None or ranks[0].status is not Status.ENDING:
                continue  # given up because of another rank
            self._job.send_home(lost.connection, p.EndAgent(status=1))
            text = f"rank {ranks[0].rank} did not end within {KILLED_S:g} s of SIGKILL"
            self._on_node_lost(
                lost, f"{text}; the job abandons node {number} ({lost.address})", now
            )

    def _on_node_lost(self, lost: Node, text: str, now: float) -> None:
        self._injections.lost(self._roster.ranks_of(lost.node))
        if self._is_finished(lost.node):
            self._on_finished_lost(lost, now)
            return
        finished = self._roster.lose(lost)
        self._job.store.node_lost(lost.node)
        if self._job.is_on_trial(lost.node):
            self._elasticity.put_out(lost.node)
        if lost.node in self._roster.outside:
            self._elasticity.on_outside_lost(lost)
            return
        self._endings.final_checkpoint_failed(lost.node, "the node is lost")
        if self._job.phase in ENDING:
            self._endings.go_on_ending()
            return
        fault = Fault(
            kind=FaultKind.NODE_LOST,
            message=text,
            node=lost.node,
            finished=finished,
            at=now,
            host=lost.host,
        )
        if self._nothing_to_lose():
            self._job.record(journal.NodeLeft(node=lost.node, address=lost.address, pid=lost.pid))
        else:
            self._recovery.report(fault)
        if self._job.phase not in ENDING:
            self._fleet.fill(lost.node)
            if self._roster.missing:
                self._job.do(SetTimer(Timer.NODE, self._spec.policy.node_timeout_s))

    def _is_finished(self, node: int) -> bool:
        """Return whether all ranks of a node have ended well, and no other rank needs them."""
        running = self._job.phase is Phase.REGROUPING and not self._job.session
        inside = node not in self._roster.outside
        return running and inside and self._roster.node_is(node, Status.EXITED)

    def _on_finished_lost(self, lost: Node, now: float) -> None:
        """Handle the loss of a node whose ranks have ended well: their work is done."""
        self._roster.lose(lost)
        for rank in self._roster.ranks_of(lost.node):
            rank.status = Status.EXITED
        self._job.store.node_lost(lost.node)
        why = "its agent ended after all ranks of the node had ended with exit status 0"
        self._job.record(
            journal.NodeLeft(node=lost.node, address=lost.address, pid=lost.pid, reason=why)
        )
        self._checkpoints.lose(lost, now)
        self._endings.on_good_exit()

    def _nothing_to_lose(self) -> bool:
        """Return whether the loss of a node is not a fault, because no rank has started yet.

        The method returns True max_in_row times at most.
        """
        if self._job.has_begun or self._left_early == self._spec.policy.max_in_row:
            return False
        self._left_early += 1
        return True

    def on_exited(self, node: int, message: p.Exited, now: float) -> None:
        """Handle the end of a rank's process."""
        rank = self._roster.ranks[message.rank]
        if message.pid != rank.pid:
            return  # an earlier process of this rank
        rank.finished = max(rank.finished, message.finished)
        if rank.rank in self._injections.orders:
            self._injections.died(rank)
        was, rank.pid, rank.arrived = rank.status, 0, None
        self._job.newest = max(self._job.newest, message.finished)
        fault = fault_of_exit(
            self._job.tables(),
            message.exit,
            message.error,
            no_memory=message.no_memory,
            rank=rank.rank,
            node=rank.node,
            finished=rank.finished,
            at=message.at or now,
            said=message.said,
        )
        if not rank.inside and was is not Status.ENDING:
            rank.status = Status.ABSENT
            self._elasticity.send_home(rank.node, fault.message)
        elif was is Status.ENDING:
            rank.status = Status.ABSENT
            if message.error and self._job.incidents.open:
                # The rank failed before the coordinator's signal arrived. It may be the first that
                # failed.
                self._job.record(self._job.incidents.note(fault))
            self._endings.go_on_ending()
            if not rank.inside and rank.node in self._roster.nodes:
                self._fleet.start_outside([rank.node])
        elif message.exit.code == 0:
            rank.status = Status.EXITED
            self._endings.on_good_exit()
        else:
            rank.status = Status.ABSENT
            self._recovery.report(fault)

    def on_spawn_failed(self, node: int, message: p.SpawnFailed, now: float) -> None:
        """Handle a rank that could not be started."""
        text = f"the agent could not start rank {message.rank}: {message.error}"
        rank = self._roster.ranks[message.rank]
        rank.status = Status.ABSENT
        if not rank.inside:
            self._elasticity.send_home(node, text)
            return
        # Before the first generation, ranks cannot run here at all. Later, the machine lacks
        # resources.
        kind = FaultKind.PROCESS if self._job.formed else FaultKind.LAUNCH
        self._recovery.report(Fault(kind=kind, message=text, rank=message.rank, node=node))

    def on_step_failed(self, node: int, message: p.StepFailed, now: float) -> None:
        """Handle a rank whose step failed. Its message shows which states may be wrong.

        Raises ProtocolError: a step cannot fail with the message's kind of fault.
        """
        if message.kind not in _FAILED:
            kind = message.kind.value
            raise ProtocolError(f"rank {message.rank} reported a failed step with the kind {kind}")
        rank = self._roster.ranks[message.rank]
        self._generations.note_suspicion(message)
        if not rank.inside:
            return
        live = self._job.phase in (Phase.TRAINING, Phase.RESTORING)
        # After the end of a generation, only failed collectives are expected. Other failures are
        # news.
        own = message.kind is not FaultKind.LINK and rank.status is Status.LEAVING
        if message.generation != self._job.generation or not (live or own):
            return
        rank.finished = max(rank.finished, message.finished)
        self._job.newest = max(self._job.newest, message.finished)
        text = _FAILED[message.kind].format(rank=rank.rank, error=message.error)
        if message.valid_steps is not None:
            text = f"{text}; the state after step {message.valid_steps} may be wrong on all ranks"
        self._recovery.report(self._job.fault(message.kind, rank, text, now))

    def on_step_skipped(self, node: int, message: p.StepLeftOut, now: float) -> None:
        """Record a step that all ranks skip. It is an incident that disturbs nothing."""
        text = f"all ranks skip step {message.step}: {message.reason}"
        kind = FaultKind.SKIPPED_STEP
        fault = Fault(kind=kind, message=text, finished=message.step, at=now)
        number = self._job.incidents.aside()
        self._job.record(journal.StepSkipped(incident=number, fault=fault))

    def on_leave_late(self, now: float) -> None:
        """Replace the ranks that did not leave their step in time."""
        did = f"leave its step within {self._spec.policy.leave_timeout_s:g} s"
        self._replace_late((Status.LEAVING,), did, now)

    def on_join_late(self, now: float) -> None:
        """Look at the ranks that have not arrived, or that do not have their state.

        Replace them, or report one without its state, if they do nothing or take far too long.
        """
        late = self._unarrived()
        of, nodes = frozenset((rank.rank, rank.pid) for rank in late), {rank.node for rank in late}
        if not of <= self._looks.of:
            self._looks = JoinLooks(of)  # a process has started since the last look
        waits = bool(of) and self._job.session
        if waits and not self._looks.patient and not self._looks.is_complete(nodes):
            self._looks.patient = True
            self._job.do(SetTimer(Timer.JOIN, ACTIVE_PAUSE_S))
            return
        self._looks.take(nodes)
        if not waits:
            return
        if self._looks.are_over:
            found, self._looks = self._looks.result, JoinLooks()
            self._give_up_unarrived(now, found)
        elif self._looks.found:
            self._looks.found = False
            self._job.do(SetTimer(Timer.JOIN, ACTIVE_PAUSE_S))
        else:
            self._looks.begin(self._job.next_serial())
            self._fleet.tell_nodes(p.InspectRanks(serial=self._looks.serial))
            self._job.do(SetTimer(Timer.JOIN, LOOK_S))

    def on_inspected(self, node: int, message: p.RanksInspected) -> None:
        """Handle a node's answer to a look at ranks that have not arrived."""
        if message.serial == self._looks.serial:
            if not message.error:
                self._looks.seen.add(node)
            late = {rank.rank for rank in self._unarrived()}
            active = any(
                look.busy and not look.stopped for look in message.looks if look.rank in late
            )
            self._looks.found = self._looks.found or active

    def _unarrived(self) -> list[Rank]:
        """Return the ranks that the others wait for, without ranks that have ended well."""
        if self._job.phase is Phase.RESTORING:
            return self._roster.those(Status.RESTORING)
        return self._roster.those(Status.STARTING, Status.SPAWNING)

    def _give_up_unarrived(self, now: float, how: str) -> None:
        limit_s = self._spec.policy.join_timeout_s
        if self._job.phase is Phase.RESTORING:
            rank = self._unarrived()[0]
            text = f"rank {rank.rank} did not load its state within {limit_s:g} s, {how}"
            self._recovery.report(self._job.fault(FaultKind.LINK, rank, text, now))
        else:
            did = f"reach its Session within {limit_s:g} s, {how}"
            self._replace_late((Status.STARTING, Status.SPAWNING), did, now)

    def _replace_late(self, late: tuple[Status, ...], what: str, now: float) -> None:
        for rank in self._roster.those(*late):
            if self._job.phase is not Phase.REGROUPING:
                return
            if not rank.inside or rank.status not in late:
                continue  # an earlier rank's fault removed its node
            self._fleet.kill([rank], grace_s=0.0)
            self._recovery.report(
                self._job.fault(FaultKind.STUCK, rank, f"rank {rank.rank} did not {what}", now)
            )
