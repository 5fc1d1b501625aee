"""Formation of generations: from the arrival of ranks to their leave."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable

import msgspec

from rekindle.coordinator.machine.checkpoints import Checkpoints
from rekindle.coordinator.machine.fleet import Fleet
from rekindle.coordinator.machine.injections import Injections
from rekindle.coordinator.machine.job_state import (
    CancelTimer,
    JobState,
    Phase,
    Proceed,
    Report,
    Send,
    SetTimer,
    Timer,
)
from rekindle.coordinator.machine.roster import Node, Rank, Status
from rekindle.protocol import agent as p
from rekindle.recovery.faults.fault import Fault, FaultKind
from rekindle.recovery.journal import journal
from rekindle.recovery.policy import plan as plans_of
from rekindle.recovery.policy.plan import AvailableState, Plan, RankPlan, StateSource
from rekindle.states import StateId, is_clean


class Generations:
    """Handles the ranks from their arrival to the first step of a generation, and their leave.

    planned: the plan of the newest generation.
    """

    def __init__(
        self,
        job: JobState,
        fleet: Fleet,
        injections: Injections,
        checkpoints: Checkpoints,
        report: Report,
        proceed: Proceed,
    ) -> None:
        self._job = job
        self._fleet = fleet
        self._injections = injections
        self._checkpoints = checkpoints
        self._report = report
        self._proceed = proceed
        self._roster = job.roster
        self._spec = job.spec
        self._incidents = job.incidents
        self.planned: Plan | None = None
        self._common_steps = 0  # steps that every rank had finished when the open incident began
        self._refused: set[tuple[int, StateSource, StateId]] = (
            set()
        )  # (node, source, state) that failed

    def on_spawned(self, message: p.Spawned) -> None:
        """Handle ranks that an agent has started."""
        if self._job.phase is Phase.ENDED:
            return
        for live in message.ranks:
            rank = self._roster.ranks[live.rank]
            rank.pid, rank.stepped = live.pid, False
            if rank.status is Status.SPAWNING:
                rank.status = Status.STARTING
        started = tuple(live.rank for live in message.ranks)
        self._job.record(journal.RanksStarted(ranks=started, restart=self._job.restarts))
        if self._job.phase is Phase.GATHERING:
            self._job.enter(Phase.REGROUPING)
        lost = self._job.interruption
        if lost is not None and not lost.exact:
            self._note_interruption(f"{lost.what}, after step {lost.step} or later", lost.since)
        untouched = self._incidents.open and not self._job.sessions_seen
        # A short script may have ended on one node before it started on another.
        if untouched and self._roster.all_are(Status.STARTING, Status.EXITED):
            self._untouched_goes_on()

    def _untouched_goes_on(self) -> None:
        """Close the incident: all ranks run again, and none has reached a Session in this attempt.

        Only a script with a Session shows later when its ranks train.
        """
        formed = journal.Formed(
            generation=self._job.generation + 1,
            world_size=self._roster.world_size,
            step=0,
            sources={journal.OF_SCRIPT: self._roster.world_size},
            newest=0,
            incident=self._incidents.open,
        )
        self._job.record(formed)
        self._job.record(
            journal.Restored(generation=formed.generation, incident=self._incidents.open)
        )
        self._job.newest = 0
        self._close_incident(generation=formed.generation, step=0)

    def on_arrived(self, message: p.Arrived) -> None:
        """Handle a rank that waits for a generation."""
        rank = self._roster.ranks[message.rank]
        self.note_suspicion(message)
        if rank.status in (Status.ENDING, Status.ABSENT, Status.EXITED):
            return
        if rank.status is Status.RESTORING and message.generation < self._job.generation:
            return  # sent before this generation was formed
        if not self._job.session:  # the first one; the others have their time from now on
            self._job.do(SetTimer(Timer.JOIN, self._spec.policy.join_timeout_s))
        self._job.session = self._job.sessions_seen = True
        rank.status, rank.arrived = Status.WAITING, message
        worlds = self._spec.least_nodes, self._spec.nodes
        if error := plans_of.shard_error(rank.rank, rank.shard, message.shard, worlds):
            self._report(self._job.fault(FaultKind.LAUNCH, rank, error))
            return
        rank.shard = message.shard
        if message.finished is not None:
            rank.finished = message.finished
            self._job.newest = max(self._job.newest, message.finished)
        self._proceed()

    def note_suspicion(self, message: p.StepFailed | p.Arrived) -> None:
        """Note the states that a rank suspects, also if its message is ignored otherwise.

        All later states derive from a suspect state, so a world that trains rolls back.
        """
        valid_steps, suspicions = message.valid_steps, self._job.suspicions
        known = any(g >= message.generation and c <= (valid_steps or 0) for g, c in suspicions)
        if valid_steps is None or known or self._job.phase is Phase.ENDED:
            return
        self._job.suspect_states(valid_steps, rank=message.rank, generation=message.generation)
        # If a rank of the world suspects a state in StepFailed, that fault leads to the rollback.
        answered = isinstance(message, p.StepFailed) and self._roster.ranks[message.rank].inside
        if self._job.phase in (Phase.TRAINING, Phase.RESTORING) and not answered:
            text = (
                f"rank {message.rank} reports that the state after step {valid_steps} may be wrong"
            )
            self._report(Fault(kind=FaultKind.LINK, message=text, finished=valid_steps))

    def are_done(self) -> bool:
        """Return whether every rank has finished all steps of the script."""
        return all(rank.arrived is not None and rank.arrived.done for rank in self._roster.world)

    def live(self, rank: Rank) -> StateId | None:
        """Return the state in the memory of an arrived rank, or None if it is torn or suspect."""
        arrived = rank.arrived
        if arrived is None or arrived.finished is None or arrived.torn:
            return None
        state = StateId(arrived.finished, arrived.state_generation)
        return state if is_clean(state, self._job.suspicions) else None

    def disagree(self) -> bool:
        """Report a fault if some ranks have a shard, and others the complete state.

        Return whether there is such a fault.
        """
        whole = [rank for rank in self._roster.world if rank.shard is None]
        if not whole or len(whole) == len(self._roster.world):
            return False
        shard = next(rank for rank in self._roster.world if rank.shard is not None)
        text = (
            f"rank {whole[0].rank} has the complete training state, but rank {shard.rank} has "
            f"shard {shard.shard} of it; give shard on all ranks, or on none"
        )
        self._report(self._job.fault(FaultKind.LAUNCH, whole[0], text))
        return True

    def differ(self) -> bool:
        """Report a fault if ranks run different texts of a file. Return whether there is one."""
        found = self._roster.different_source(self._job.newcomers)
        if found is None:
            return False
        rank, other, file = found
        text = (
            f"rank {rank.rank} and rank {other.rank} run different texts of {file}, which has "
            "changed, or differs between nodes"
        )
        fault = self._job.fault(FaultKind.SOURCE, rank, text)
        self._report(msgspec.structs.replace(fault, user_caused=True))
        return True

    def dismiss(self) -> None:
        """End the Sessions of the ranks, because all have finished all steps."""
        finished = self._roster.world[0].finished
        self._job.newest = finished
        if self._incidents.open:
            self._close_incident(generation=self._job.generation, step=finished)
        self._fleet.tell_nodes(p.EndSession(finished=finished))
        for rank in self._roster.world:
            rank.status = Status.STARTING
        for node in self._roster.waiting_nodes:
            self._fleet.dismiss_agent(node, "training is over")
        self._job.session = self._job.formed = False
        self._job.newcomers = set()
        self._job.paused_for = None
        self._job.enter(Phase.REGROUPING)
        self._job.do(CancelTimer(Timer.LEAVE))
        self._job.do(CancelTimer(Timer.JOIN))

    def form(self) -> bool:
        """Form the next generation, or kill the ranks that cannot join it.

        Return whether it is formed.
        """
        plan = self._plan()
        unfit = self._unfit(plan)
        if unfit:
            self._fleet.kill(unfit, grace_s=0.0)
            return False
        self._incidents.answered()
        self.planned = plan
        self._job.generation += 1
        self._checkpoints.assembly.begin(self._job.generation)
        self._send_plan(plan)
        # If only some ranks have finished a step, it is under way, so its repetition is not a loss.
        self._common_steps = max(
            self._common_steps, min(rank.finished for rank in self._roster.world)
        )
        for rank in self._roster.world:
            rank.status, rank.stepped, rank.finished = Status.RESTORING, False, plan.step
        self._record_formed(plan)
        if not self._incidents.open:  # in an incident, newest shows the steps that may be lost
            self._job.newest = plan.step
        if not self._job.formed:
            self._job.resumed = plan.step
        self._job.enter(Phase.RESTORING)
        self._job.formed = self._job.met = True
        self._job.do(CancelTimer(Timer.LEAVE))
        self._job.do(SetTimer(Timer.JOIN, self._spec.policy.join_timeout_s))
        return True

    def _plan(self) -> Plan:
        return plans_of.make_plan(self._holdings())

    def state_without(self, nodes: Collection[int]) -> StateId:
        """Return the state from which the arrived ranks would continue without these nodes."""
        plan = plans_of.make_plan(self._holdings(nodes))
        return StateId(plan.step, plan.state_generation)

    def _holdings(self, without: Collection[int] = ()) -> dict[int, AvailableState]:
        """Return the states of each rank of the world, by place. without: nodes without states."""
        copies = self._roster.copies()
        held = [
            AvailableState(node=rank.node, shard=rank.shard or 0)
            if rank.node in without
            else self._holding(rank, copies.get(rank.rank, ()))
            for rank in self._roster.world
        ]
        return dict(enumerate(held))

    def _unfit(self, plan: Plan) -> list[Rank]:
        """Return the ranks that only a new process can bring into this plan."""
        world = self._roster.world
        if plan.ranks[0].source is StateSource.FRESH:
            # The plan requires the state that the script built, and a rank that has trained has
            # changed it.
            trained = [r for r in world if r.arrived and (r.arrived.torn or r.arrived.finished)]
            if trained:
                return trained
        # The code of a rank may stand in a step that others have finished.
        if stands := [r for r in world if r.arrived and r.arrived.stands not in (None, plan.step)]:
            return stands
        # A rank that joins needs a peer, and the peers may have ended since it arrived.
        joining = [
            place for place, rank in enumerate(world) if rank.arrived and rank.arrived.needs_peer
        ]
        return [world[at] for at in joining if plan.ranks[at].source is not StateSource.PEER]

    def _send_plan(self, plan: Plan) -> None:
        world = self._roster.world
        arrived = [rank.arrived for rank in world if rank.arrived]
        ended_step = max(each.ended_step for each in arrived)
        compared = max(each.compared for each in arrived)
        places = {rank.rank: place for place, rank in enumerate(world)}
        peers, cause = self._roster.rank_addresses(), self._job.cause
        for node in self._roster.members:
            own = {rank.rank: places[rank.rank] for rank in self._roster.ranks_of(node.node)}
            plans = {rank: plan.ranks[place] for rank, place in own.items()}
            former = self._roster.former(node.node)
            form = p.FormGeneration(
                generation=self._job.generation,
                world_size=len(world),
                store_host=self._job.store.host,
                store_port=self._job.store.port,
                step=plan.step,
                state_generation=plan.state_generation,
                suspicions=tuple(self._job.suspicions),
                shards=plan.shards,
                ended_step=ended_step,
                compared=compared,
                cause=cause,
                settings=self._fleet.settings,
                ranks=own,
                plan=plans,
                replica_addresses=self._replica_addresses(plans.values()),
                former=_replica_address(former) if former is not None else None,
                peers=peers,
            )
            self._job.do(Send(node.connection, form))

    def _note_interruption(self, text: str, since: float = 0.0) -> None:
        """Record an incident without a decision: new ranks have started already."""
        if not self._incidents.open:
            fault = Fault(kind=FaultKind.COORDINATOR, message=text)
            self._job.record(msgspec.structs.replace(self._incidents.note(fault), since=since))

    def _record_formed(self, plan: Plan) -> None:
        newest, lost = self._common_steps, self._job.interruption
        self._job.interruption = None
        if lost is not None:
            newest = max(newest, lost.step) if lost.exact else journal.UNKNOWN
            if lost.exact and plan.step < lost.step:
                self._note_interruption(f"{lost.what} after step {lost.step}")
        self._job.record(
            journal.Formed(
                generation=self._job.generation,
                world_size=len(self._roster.world),
                step=plan.step,
                state_generation=plan.state_generation,
                sources=dict(Counter(r.source.value for r in plan.ranks)),
                newest=newest,
                left_out=tuple(sorted(self._roster.outside)),
                incident=self._incidents.open,
            )
        )

    def _replica_addresses(self, plans: Iterable[RankPlan]) -> dict[int, p.ReplicaAddress]:
        """Return the addresses of the agents that keep or return replicas for these ranks."""
        numbers = {number for plan in plans for number in (plan.replica_node, plan.node)} - {-1}
        nodes = [self._roster.nodes[number] for number in sorted(numbers)]
        return {node.node: _replica_address(node) for node in nodes}

    def _holding(self, rank: Rank, copies: tuple[tuple[int, StateId], ...]) -> AvailableState:
        node = self._roster.nodes[rank.node]
        refused = {(source, state) for where, source, state in self._refused if where == rank.node}

        def counts(source: StateSource, state: StateId) -> bool:
            return (source, state) not in refused and is_clean(state, self._job.suspicions)

        snapshots = node.snapshots.get(rank.rank, ())
        return AvailableState(
            node=rank.node,
            shard=rank.shard or 0,
            live=self.live(rank),
            snapshots=tuple(state for state in snapshots if counts(StateSource.SNAPSHOT, state)),
            copies=tuple(copy for copy in copies if counts(StateSource.REPLICA, copy[1])),
            checkpoints=tuple(m for m in node.checkpoints if counts(StateSource.CHECKPOINT, m)),
            own=self._own(rank, lambda state: counts(StateSource.PEER, state)),
        )

    def _own(self, rank: Rank, counts: Callable[[StateId], bool]) -> tuple[StateId, ...] | None:
        """Return the states whose part of this rank alone its node has, or can fetch."""
        if rank.arrived is None or rank.arrived.own is None:
            return None
        former = self._roster.former(rank.node)
        there = former.own.get(rank.rank, ()) if former is not None else ()
        return (*rank.arrived.own, *filter(counts, there))

    def on_store_down(self, node: int, message: p.StoreDown, now: float) -> None:
        """Handle the end of the ranks' store. The next generation gets a new store."""
        if (node, message.serial) != (self._job.store.node, self._job.store.serial):
            return
        if not self._spec.can_join and self._job.phase in (Phase.TRAINING, Phase.RESTORING):
            # The framework later ends the ranks because of it.
            text = f"the scheduler of {self._spec.framework.value} has ended"
            self._report(Fault(kind=FaultKind.PROCESS, message=text, node=self._job.store.node))
            return
        self._job.store.drop()

    def on_state_ready(self, node: int, message: p.StateReady, now: float) -> None:
        """Handle a rank that has its state, or failed to get it."""
        rank = self._roster.ranks[message.rank]
        if message.generation != self._job.generation or rank.status is not Status.RESTORING:
            return
        if message.error:
            assert self.planned is not None
            source = self.planned.ranks[self._roster.place_of(rank)].source
            state = StateId(self.planned.step, self.planned.state_generation)
            self._refused.add((rank.node, source, state))
            text = f"rank {rank.rank} could not load its state: {message.error}"
            fault = self._job.fault(FaultKind.RESTORE, rank, text)
            tried = f"{source.value} of step {state.step} of generation {state.generation}"
            self._report(msgspec.structs.replace(fault, signature=tried))
            return
        rank.status, rank.finished = Status.TRAINING, message.finished
        if rank.rank in self._injections.orders:
            for order in self._injections.due(rank):
                self._job.do(Send(self._roster.nodes[rank.node].connection, order))
        if self._roster.all_are(Status.TRAINING):
            self._job.enter(Phase.TRAINING)
            self._job.do(CancelTimer(Timer.JOIN))
            self._job.record(
                journal.Restored(generation=self._job.generation, incident=self._incidents.open)
            )
            self._fleet.start_outside(self._roster.waiting_nodes)

    def on_step_done(self, message: p.StepDone) -> None:
        """Handle a rank that has finished its first step of the generation."""
        rank = self._roster.ranks[message.rank]
        if message.generation != self._job.generation or not rank.inside:
            return
        rank.stepped = True
        # A heartbeat that arrived earlier may show more finished steps.
        rank.finished = max(rank.finished, message.finished)
        self._job.newest = max(self._job.newest, message.finished)
        if self._job.phase is Phase.TRAINING and self._roster.all_stepped:
            self._job.newcomers = set()
            self._job.newest = max(rank.finished for rank in self._roster.world)
            self._close_incident(generation=self._job.generation, step=message.finished)

    def _close_incident(self, *, generation: int, step: int) -> None:
        """Record that training continues. The next fault opens a new incident."""
        self._job.record(
            journal.FirstStep(generation=generation, step=step, incident=self._incidents.open)
        )
        self._incidents.close()
        self._common_steps = 0
        self._refused = set()

    def declare_over(self, pause: p.Cause | None = None, compare: StateId | None = None) -> None:
        """End the current generation. Every rank in it gets the order to leave its collective.

        pause: why it ends without a fault. compare: the ranks send the digests of this state.
        """
        self._job.stop_inspection()
        if self._job.phase not in (Phase.TRAINING, Phase.RESTORING):
            return
        self._job.enter(Phase.REGROUPING)
        finished = max(rank.finished for rank in self._roster.world)
        process_lost = self._roster.any_is(Status.ABSENT)
        self._job.paused_for = pause
        over = p.GenerationEnded(
            generation=self._job.generation,
            finished=finished,
            process_lost=process_lost,
            cause=self._job.cause,
            compare=compare,
        )
        self._fleet.tell_nodes(over)
        for rank in self._roster.those(Status.TRAINING, Status.RESTORING):
            rank.status = Status.LEAVING
        self._job.do(SetTimer(Timer.LEAVE, self._spec.policy.leave_timeout_s))


def _replica_address(agent: Node) -> p.ReplicaAddress:
    return p.ReplicaAddress(host=agent.address, port=agent.replica_port)
