"""The coordinator's mind: events in, commands out. No I/O, no clock but the one passed in.

    GATHERING   agents and the ranks' store come up, ranks are started
    REGROUPING  ranks arrive (new ones at their Session, others after leaving a step)
    RESTORING   the generation is formed; ranks take their state from where the plan says
    TRAINING    ranks do steps; a fault sends the job back to REGROUPING
    RESTARTING  all ranks are being ended, to be started anew
    STOPPING    all ranks are being ended, for good
    DUMPING     their newest snapshot is being written: last words
    ENDED

It has twelve layers, a module each: who is there (`gathering`), forming generations (`forming`),
checkpoints (`storing`), the end (`ending`), nodes that come and go (`elastic`), what is done about
faults (`recovering`), ranks that make no progress (`stalling`), signs that are seen from outside
(`watching`), nodes that were checked (`admitting`), ranks that have become slow (`slowing`), which
times are written down (`switching`), and what else counts as a fault (here).

Untouched scripts never arrive: to the machine they stay in REGROUPING until they end.
"""

from __future__ import annotations

import msgspec

from rekindle.coordinator.machine.checkpoints import StoreNews
from rekindle.coordinator.machine.job_state import ENDING, Phase, Send, SetTimer
from rekindle.coordinator.machine.profiling_switch import Switching
from rekindle.coordinator.machine.ranks import Status, by_node
from rekindle.coordinator.machine.roster import Node
from rekindle.errors import ProtocolError
from rekindle.names import KILLED_S, SPARE
from rekindle.protocol import agent as p
from rekindle.recovery.faults.classification import fault_of_exit
from rekindle.recovery.faults.fault import Fault, Kind
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import LATE_S

_FAILED = {
    Kind.LINK: "a collective of rank {rank} failed: {error}",
    Kind.TRANSIENT: "rank {rank} met what the script says will pass: {error}",
    Kind.DEVICE_MEMORY: "the device memory of rank {rank} is damaged: {error}",
    Kind.DEVICE: "the device of rank {rank} could not be repaired: {error}",
}


class Machine(Switching):
    """The state of one attempt of a job: `on_...` methods take events, `drain` gives commands."""

    def on_message(self, node: int, message: p.Message, now: float) -> None:
        """An agent that was taken in as `node` says something (also for its ranks)."""
        match message:
            case p.Exited() | p.StepFailed() | p.Stalled() | p.Looked() | p.Conditions():
                self._on_bad_news(node, message, now)
            case p.Arrived():
                self.on_arrived(message)
                self._miss_exited()
            case p.StateReady():
                self.on_state_ready(message)
            case p.Held():
                self.on_held(message)
            case p.StepDone():
                self.on_step_done(message)
            case p.Beat():
                self.on_beat(message, now)
            case p.CheckpointWritten() | p.PartDue() | p.PartWritten():
                self.on_store_news(node, message, now)
            case p.CheckpointLeftOut() | p.Pruned() | p.SnapshotRefused():
                self.on_store_news(node, message, now)
            case p.Timed():
                self.on_timed(message)
            case p.Traced():
                self.on_traced(message, now)
            case p.Snapshots() | p.Copies():
                self.on_snapshots(node, message)
            case _:
                self._on_start_news(node, message, now)

    def _on_bad_news(self, node: int, message: p.Message, now: float) -> None:
        match message:
            case p.Exited():
                self.on_exited(message, now)
            case p.StepFailed():
                self.on_step_failed(message, now)
            case p.Conditions():
                self.on_conditions(node, message, now)
            case p.Stalled():
                self.on_stalled(message, now)
            case p.Looked():
                self.on_looked(node, message, now)

    def _on_start_news(self, node: int, message: p.Message, now: float) -> None:
        match message:
            case p.Spawned():
                self.on_spawned(message)
                self._on_healed(message, now)
            case p.SpawnFailed():
                self.on_spawn_failed(node, message)
            case p.HealFailed():
                self.on_heal_failed(node, message)
            case p.StoreUp():
                self.on_store_up(node, message)
            case p.StoreDown():
                self.on_store_down(message)
            case p.Checked() | p.CheckReady():
                pass  # the check of the node ended without them
            case _:
                name = type(message).__name__
                raise ProtocolError(f"node {node} sends a {name}, which no agent sends here")

    def on_agent_lost(self, connection: int, now: float) -> None:
        """The line to an agent is gone, and with it (as far as we can know) its node."""
        self.sent_home.discard(connection)
        lost = self.roster.by_connection(connection)
        if lost is None:
            self._on_spare_lost(connection)
            return
        text = f"node {lost.node} ({lost.address}) was lost with its agent and all its ranks"
        self._on_node_lost(lost, text, now)

    def _on_unkillable(self, now: float) -> None:
        """Give up the nodes that have ranks which SIGKILL did not end: the kernel holds them."""
        ending = [rank for rank in self.roster.ranks if rank.status is Status.ENDING]
        for number, ranks in by_node(ending).items():
            lost = self.roster.nodes.get(number)
            if lost is None or ranks[0].status is not Status.ENDING:
                continue  # given up because of another one
            self._do(Send(lost.connection, p.Bye(status=1)))
            self.sent_home.add(lost.connection)
            text = f"rank {ranks[0].rank} has not ended within {KILLED_S:g} s of SIGKILL"
            self._on_node_lost(lost, f"{text}; node {number} ({lost.address}) is given up", now)

    def _on_node_lost(self, lost: Node, text: str, now: float) -> None:
        self._injections.lost(self.roster.ranks_of(lost.node))
        self._committing.discard(lost.node)
        finished = self.roster.lose(lost)
        self._store.node_lost(lost.node)
        if self._is_on_trial(lost.node):
            self._put_out(lost.node)
        if lost.node in self.roster.outside:
            self._on_outside_lost(lost)
            return
        self._dump_failed(lost.node, "the node is lost")
        if self.phase in ENDING:
            self._go_on_ending()
            return
        fault = Fault(
            kind=Kind.NODE_LOST,
            message=text,
            node=lost.node,
            finished=finished,
            at=now,
            host=lost.host,
        )
        if self._nothing_to_lose():
            self._record(journal.NodeLeft(node=lost.node, address=lost.address, pid=lost.pid))
        else:
            self._on_fault(fault)
        if self.phase not in ENDING:
            self._fill(lost.node)
            if self.roster.missing:
                self._do(SetTimer("node", self.spec.policy.node_timeout_s))

    def _nothing_to_lose(self) -> bool:
        """Whether a node may go as it came: no rank was started yet; a few times, at most."""
        begun = self.phase is not Phase.GATHERING or not self.roster.all_are(Status.ABSENT)
        if begun or self.restarts or self._left_early == self.spec.policy.max_in_row:
            return False
        self._left_early += 1
        return True

    def on_exited(self, message: p.Exited, now: float) -> None:
        """A rank's process ended."""
        rank = self.roster.ranks[message.rank]
        if message.pid != rank.pid:
            return  # an earlier process of this rank
        rank.finished = max(rank.finished, message.finished)
        self._injections.died(rank)
        was, rank.pid, rank.arrived = rank.status, 0, None
        self.newest = max(self.newest, message.finished)
        fault = fault_of_exit(
            self._tables(),
            message.exit,
            message.error,
            no_memory=message.no_memory,
            rank=rank.rank,
            node=rank.node,
            finished=rank.finished,
            at=message.at or now,
        )
        if not rank.inside and was is not Status.ENDING:
            rank.status = Status.ABSENT
            self._send_home(rank.node, fault.message)
        elif was is Status.ENDING:
            rank.status = Status.ABSENT
            if message.error and self.incidents.open:
                # It failed by itself before our signal came; it may even be the first that did.
                self._record(self.incidents.note(fault))
            self._go_on_ending()
            if not rank.inside and rank.node in self.roster.nodes:
                self._start_outside([rank.node])
        elif message.exit.code == 0:
            rank.status = Status.EXITED
            self._on_good_exit()
        else:
            rank.status = Status.ABSENT
            self._on_fault(fault)

    def _on_stored(self, node: int, message: StoreNews) -> None:
        """A checkpoint was committed, or will not be; the job's end may wait for that."""
        if isinstance(message, p.CheckpointWritten):
            self._committing.discard(node)
        if self.roster.all_are(Status.EXITED) and self.phase not in ENDING:
            self._on_good_exit()

    def _on_good_exit(self) -> None:
        stored = not self._committing and self._assembly.backlog.is_empty
        if self.roster.all_are(Status.EXITED) and not stored:
            return
        if self.roster.all_are(Status.EXITED):
            self._outcome = "succeeded"
            self._finish(f"all {self.roster.world_size} ranks ended with exit status 0")
        else:
            self._miss_exited()

    def _miss_exited(self) -> None:
        """A rank that ended well is missed when others regroup, or when all others wait for it."""
        ending = self.phase in (Phase.RESTARTING, *ENDING)
        if ending or not self.roster.any_is(Status.EXITED):
            return
        regrouping = self.phase is Phase.REGROUPING and self._formed
        if regrouping or self.roster.all_are(Status.EXITED, Status.WAITING):
            self._blame_exited()

    def _blame_exited(self) -> None:
        gone = self.roster.those(Status.EXITED)[0]
        gone.status = Status.ABSENT
        text = f"rank {gone.rank} ended with exit status 0 before the others had finished"
        self._on_fault(self._fault(Kind.USER_CODE, gone, text))

    def on_step_failed(self, message: p.StepFailed, now: float) -> None:
        """A rank could not do its step, and is no worse off than that, or says how much."""
        if message.kind not in _FAILED:
            kind = message.kind.value
            raise ProtocolError(f"rank {message.rank} says that its step failed by {kind}")
        rank = self.roster.ranks[message.rank]
        self._hear(message)
        if not rank.inside:
            return
        live = self.phase in (Phase.TRAINING, Phase.RESTORING)
        # That a collective fails once its generation is over is no news; what else broke, is.
        own = message.kind is not Kind.LINK and rank.status is Status.LEAVING
        if message.generation != self.generation or not (live or own):
            return
        rank.finished = max(rank.finished, message.finished)
        self.newest = max(self.newest, message.finished)
        text = _FAILED[message.kind].format(rank=rank.rank, error=message.error)
        if message.clean is not None:
            text = f"{text}; what was made after step {message.clean} may be wrong on all ranks"
        self._on_fault(self._fault(message.kind, rank, text, now))

    def _on_fault(self, fault: Fault) -> None:
        if self.phase in ENDING:
            self._go_on_ending()
            return
        if self._is_on_trial(fault.node):
            self._put_out(fault.node)
            self._send_home(fault.node, fault.message)
            self._go_on_regrouping()
            return
        agent = self.roster.nodes.get(fault.node)
        if agent is not None and not fault.host:
            fault = msgspec.structs.replace(fault, host=agent.host)
        fault = self._explained(fault)
        if not self.incidents.open:
            self._interval.fault()
        if fault not in self.incidents.faults or not fault.code:  # else a sign has told more of it
            self._record(self.incidents.note(fault))
        self._declare_over()
        # A failed link has a cause most of the time; what it is shows itself while ranks arrive.
        dead = fault.rank >= 0 and not self.roster.ranks[fault.rank].pid
        if dead or fault.kind is not Kind.LINK:
            self._decide(fault)
        if self.phase is Phase.RESTARTING:
            self._go_on_ending()
        self._miss_exited()
        self._try_form()

    def on_timer(self, name: str, now: float) -> None:
        """A time limit has passed."""
        if self.phase in ENDING:
            self._on_ending_timer(name)
        elif name == "approval":
            self._on_approval_late()
        elif name in ("signs", "doubt"):
            self._look_at_signs(name, now)
        elif name == "late":
            self._on_late()
        elif name in ("look", "again"):
            self._on_look_timer(name, now)
        elif name == "come":
            self._on_outside_late()
        elif name == "node":
            self._on_nodes_missed(now)
        else:
            self._on_ranks_late(name, now)

    def _on_ranks_late(self, name: str, now: float) -> None:
        policy = self.spec.policy
        if name == "end":
            self._on_unkillable(now)
        elif name == "leave":
            did = f"leave its step within {policy.leave_timeout_s:g} s"
            self._replace_late((Status.LEAVING,), did, now)
        elif name == "join" and self.phase is Phase.RESTORING:
            # None: a rank ended well instead, and is missed by its peers.
            for rank in self.roster.those(Status.RESTORING)[:1]:
                text = f"rank {rank.rank} did not take its state within {policy.join_timeout_s:g} s"
                self._on_fault(self._fault(Kind.LINK, rank, text, now))
        elif name == "join" and self._session:
            did = f"reach its Session within {policy.join_timeout_s:g} s"
            self._replace_late((Status.STARTING, Status.SPAWNING), did, now)

    def _on_nodes_missed(self, now: float) -> None:
        """Go on without the nodes that did not come, or end."""
        self._go_on_without_missing()
        if self.roster.missing:
            where = ", ".join(map(str, self.roster.missing))
            text = f"no node came as node {where}"
            if not self._isolation.is_in_vain:
                text += f" within {self.spec.policy.node_timeout_s:g} s"
            why = "; ".join(sorted(set(self.roster.obstacles.values())))
            text += f": {why}" if why else ""
            self._on_fault(Fault(kind=Kind.SCHEDULING, message=text, at=now))

    def _on_late(self) -> None:
        """Ask for all that did not come, and go on without them if that may be.

        After a coordinator's death they are asked for first, spares too, and waited for once more.
        """
        self._fill_all()
        if self._inherits and not self._asked:
            self._asked = True
            for _ in range(self.spec.spares - len(self.roster.spares)):
                self._record(journal.NodeWanted(node=SPARE))
            self._do(SetTimer("late", LATE_S))
            return
        self._late_passed = True
        self._go_on_without_missing()

    def _replace_late(self, late: tuple[Status, ...], what: str, now: float) -> None:
        for rank in self.roster.those(*late):
            if self.phase is not Phase.REGROUPING:
                return
            if not rank.inside or rank.status not in late:
                continue  # an earlier one took its node out of the world
            self._kill([rank], grace_s=0.0)
            self._on_fault(self._fault(Kind.STUCK, rank, f"rank {rank.rank} did not {what}", now))

    def inject(self, order: p.Inject) -> str:
        """Have a rank suffer a fault; return why not, if it cannot.

        One that is meant for a step waits until the rank trains, and is told to its next process
        as well if this one does not live to that step.
        """
        if not self.spec.allow_injection:
            return f"job {self.spec.job_id} does not allow it: start it with --allow-injection"
        if not 0 <= order.rank < self.spec.world_size:
            return f"there is no rank {order.rank} in a world of {self.spec.world_size}"
        rank = self.roster.ranks[order.rank]
        if not rank.inside:
            return f"rank {order.rank} takes no part in the world now"
        if order.step is not None and order.step < rank.finished:
            return f"step {order.step} is past: rank {order.rank} has finished {rank.finished}"
        if order.kind is p.InjectionKind.HANG_COLLECTIVE and self.roster.world_size == 1:
            return "a world of one rank has no collective to hang in"
        if self.phase in ENDING:
            return "the job is ending"
        if rank.status is Status.TRAINING:
            self._do(Send(self.roster.nodes[rank.node].connection, order))
        elif order.step is None:
            return f"rank {order.rank} is not in a step, but {rank.status.value}"
        if order.step is not None:
            self._injections.add(order, rank.pid if rank.status is Status.TRAINING else 0)
        return ""
