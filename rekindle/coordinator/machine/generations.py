"""The second layer of the coordinator's mind: forming generations."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable

import msgspec

from rekindle.coordinator.machine.fleet import Gathering
from rekindle.coordinator.machine.job_state import ENDING, CancelTimer, Phase, Send, SetTimer
from rekindle.coordinator.machine.ranks import Rank, Status
from rekindle.protocol import agent as p
from rekindle.recovery.faults.fault import Fault, Kind, root_cause
from rekindle.recovery.faults.invalid_states import is_clean
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.plan import Holding, Made, RankPlan, Source, make_plan


def _has_trained(arrived: p.Arrived) -> bool:
    return arrived.torn or bool(arrived.finished)


class Forming(Gathering):
    """From the arrival of the ranks to the first step of their generation, and to their leave."""

    def on_spawned(self, message: p.Spawned) -> None:
        """An agent has started ranks."""
        if self.phase is Phase.ENDED:
            return
        for live in message.ranks:
            rank = self.roster.ranks[live.rank]
            rank.pid, rank.stepped = live.pid, False
            if rank.status is Status.SPAWNING:
                rank.status = Status.STARTING
        started = tuple(live.rank for live in message.ranks)
        self._record(journal.RanksStarted(ranks=started, restart=self.restarts))
        if self.phase is Phase.GATHERING:
            self.phase = Phase.REGROUPING
        untouched = self.incidents.open and not self._sessions_seen
        # A short script may have ended on one node before it was started on the other.
        if untouched and self.roster.all_are(Status.STARTING, Status.EXITED):
            self._untouched_goes_on()

    def _untouched_goes_on(self) -> None:
        """Close the incident of a script without Session: all its ranks run again."""
        formed = journal.Formed(
            generation=self.generation + 1,
            world_size=self.roster.world_size,
            step=0,
            sources={"script": self.roster.world_size},
            newest=0,
            incident=self.incidents.open,
        )
        self._record(formed)
        self._record(journal.Restored(generation=formed.generation, incident=self.incidents.open))
        self._close_incident(generation=formed.generation, step=0)

    def on_arrived(self, message: p.Arrived) -> None:
        """A rank waits for a generation."""
        rank = self.roster.ranks[message.rank]
        self._hear(message)
        if rank.status in (Status.ENDING, Status.ABSENT, Status.EXITED):
            return
        if rank.status is Status.RESTORING and message.generation < self.generation:
            return  # said before this generation was formed
        self._session = self._sessions_seen = True
        rank.status, rank.arrived = Status.WAITING, message
        if rank.shard not in (None, message.shard):
            text = (
                f"rank {rank.rank} has shard {message.shard} of the training state, and had shard "
                f"{rank.shard} before: which one it has must follow from its rank alone"
            )
            self._on_fault(self._fault(Kind.LAUNCH, rank, text))
            return
        rank.shard = message.shard
        if message.shard is not None and self.spec.least_nodes < self.spec.nodes:
            text = (
                f"rank {rank.rank} has a shard of the training state, and a world of fewer nodes "
                f"would not have all shards: run it with --nnodes={self.spec.nodes}, not with "
                f"{self.spec.least_nodes}:{self.spec.nodes}"
            )
            self._on_fault(self._fault(Kind.LAUNCH, rank, text))
            return
        if message.finished is not None:
            rank.finished = message.finished
            self.newest = max(self.newest, message.finished)
        if not rank.inside:
            self._grow()
        self._try_form()

    def _hear(self, message: p.StepFailed | p.Arrived) -> None:
        """Note what a rank says to be wrong, whatever else becomes of it.

        What has been made since of a suspect state is no better: a world that trains on goes back.
        """
        clean, suspicions = message.clean, self._suspicions
        known = any(g >= message.generation and c <= (clean or 0) for g, c in suspicions)
        if clean is None or known or self.phase is Phase.ENDED:
            return
        generation = max(message.generation, self.generation)
        suspicions.append((generation, clean))
        told = {"generation": generation, "clean": clean, "rank": message.rank}
        self._record(journal.Suspected(**told))
        # A rank of the world that says so of its step is answered for that.
        answered = isinstance(message, p.StepFailed) and self.roster.ranks[message.rank].inside
        if self.phase in (Phase.TRAINING, Phase.RESTORING) and not answered:
            text = f"rank {message.rank} says that what was made after step {clean} may be wrong"
            self._on_fault(Fault(kind=Kind.LINK, message=text, finished=clean))

    def _grow(self) -> None:
        """Have the world held between two steps when a node waits to be taken in.

        Not before all have done a step since the last time, nor when the first are done.
        """
        if self.roster.outside and self.roster.arrived_outside:
            self._hold()

    def _hold(self) -> None:
        """Have the world stand between two steps, once in a generation, as soon as all train."""
        steady = self.phase is Phase.TRAINING and self.roster.all_stepped
        if self._held == self.generation or not steady:
            return
        if self.roster.all_are(Status.TRAINING):
            self._held = self.generation
            first = self.roster.world[0]
            hold = p.Hold(rank=first.rank, generation=self.generation)
            self._do(Send(self.roster.nodes[first.node].connection, hold))

    def on_held(self, message: p.Held) -> None:
        """The world stands between two steps: it ends, and the next one has the newcomers."""
        if message.generation != self.generation or self.phase is not Phase.TRAINING:
            return
        rank = self.roster.ranks[message.rank]
        rank.finished = max(rank.finished, message.finished)
        self._take_in()
        self._declare_over()

    def _take_in(self) -> None:
        for node in self.roster.arrived_outside:
            self.roster.take_in(node)
            self._newcomers.add(node)

    def _try_form(self) -> None:
        """Form the next generation, or let the ranks go, when every rank has arrived."""
        if self.phase in (Phase.RESTARTING, *ENDING) or not self.roster.all_are(Status.WAITING):
            return
        if self._awaiting is not None:
            return
        live = {self._live(rank) for rank in self.roster.world}
        if len(live) == 1 and None not in live and self._are_done():
            self._dismiss()
            return
        if self.phase is Phase.REGROUPING and self.roster.outside:
            self._take_in()  # all wait anyway
        if self.phase not in (Phase.REGROUPING, Phase.GATHERING) or self._is_held_up():
            return
        if self._disagree():
            return
        self._ask_for_store()
        if not self._store.is_up:
            return
        faults = self.incidents.unanswered
        if faults and all(fault.kind is Kind.LINK for fault in faults):
            # Every process is there, so nothing but links can be broken.
            self._put_newcomers_out()
            self._decide(root_cause(faults))
        if self.phase in (Phase.REGROUPING, Phase.GATHERING):
            self._form()

    def _are_done(self) -> bool:
        """Whether every rank has finished all the steps that it was asked for."""
        return all(rank.arrived is not None and rank.arrived.done for rank in self.roster.world)

    def _live(self, rank: Rank) -> Made | None:
        """The state that an arrived rank has, if it is one and clean."""
        arrived = rank.arrived
        if arrived is None or arrived.finished is None or arrived.torn:
            return None
        made = arrived.finished, arrived.made
        return made if is_clean(made, self._suspicions) else None

    def _disagree(self) -> bool:
        """Whether some ranks have a shard of the state, and others say that they have all of it."""
        whole = [rank for rank in self.roster.world if rank.shard is None]
        if not whole or len(whole) == len(self.roster.world):
            return False
        shard = next(rank for rank in self.roster.world if rank.shard is not None)
        text = (
            f"rank {whole[0].rank} says that all ranks have the same training state, and rank "
            f"{shard.rank} that it has shard {shard.shard} of it: give shard on all ranks, or on "
            "none"
        )
        self._on_fault(self._fault(Kind.LAUNCH, whole[0], text))
        return True

    def _dismiss(self) -> None:
        """All ranks have finished all steps; what follows is the script's own business."""
        finished = self.roster.world[0].finished
        if self.incidents.open:
            self._close_incident(generation=self.generation, step=finished)
        self._tell_nodes(p.Dismiss(finished=finished))
        for rank in self.roster.world:
            rank.status = Status.STARTING
        for node in self.roster.at_the_door:
            self._send_home(node, "training is over")
        self._session = self._formed = False
        self._newcomers = set()
        self.phase = Phase.REGROUPING
        self._do(CancelTimer("leave"))
        self._do(CancelTimer("join"))

    def _form(self) -> None:
        world = self.roster.world
        copies = self.roster.copies()
        held = [self._holding(rank, copies.get(rank.rank, ())) for rank in world]
        plan = make_plan(dict(enumerate(held)))
        trained = [rank for rank in world if rank.arrived and _has_trained(rank.arrived)]
        if trained and plan.ranks[0].source is Source.FRESH:
            # Their state is no longer as the script built it: only new processes have that.
            self._kill(trained, grace_s=0.0)
            return
        joining = [place for place, rank in enumerate(world) if rank.arrived and rank.arrived.joins]
        alone = [world[at] for at in joining if plan.ranks[at].source is not Source.PEER]
        if alone:
            self._kill(alone, grace_s=0.0)  # those whom they were to join have died since
            return
        self.incidents.answered()
        self._planned = plan
        self.generation += 1
        self._assembly.begin(self.generation)
        passed = max(rank.arrived.passed for rank in world if rank.arrived)
        places = {rank.rank: place for place, rank in enumerate(world)}
        peers = self._addresses()
        for node in self.roster.members:
            own = {rank.rank: places[rank.rank] for rank in self.roster.ranks_of(node.node)}
            plans = {rank: plan.ranks[place] for rank, place in own.items()}
            form = p.Form(
                generation=self.generation,
                world_size=len(world),
                store_host=self._store.host,
                store_port=self._store.port,
                step=plan.step,
                made=plan.made,
                suspicions=tuple(self._suspicions),
                shards=plan.shards,
                passed=passed,
                checkpoint_every=self._interval.steps,
                profile=self._profile,
                ranks=own,
                plan=plans,
                depots=self._depots(plans.values()),
                peers=peers,
            )
            self._do(Send(node.connection, form))
        # A step that only some ranks have finished is under way: doing it again loses none.
        self._reached = max(self._reached, min(rank.finished for rank in world))
        for rank in world:
            rank.status, rank.stepped, rank.finished = Status.RESTORING, False, plan.step
        self._record(
            journal.Formed(
                generation=self.generation,
                world_size=len(world),
                step=plan.step,
                made=plan.made,
                sources=dict(Counter(r.source.value for r in plan.ranks)),
                newest=self._reached,
                left_out=tuple(sorted(self.roster.outside)),
                incident=self.incidents.open,
            )
        )
        if not self.incidents.open:  # else it tells, until training goes on, what may be lost
            self.newest = plan.step
        if not self._formed:
            self._resumed = plan.step
        self.phase, self._formed = Phase.RESTORING, True
        self._do(CancelTimer("leave"))
        self._do(SetTimer("join", self.spec.policy.join_timeout_s))

    def _addresses(self) -> tuple[tuple[str, int], ...]:
        """Where the ranks of the world are reached by each other, if they have told."""
        ports = [rank.arrived.port if rank.arrived else 0 for rank in self.roster.world]
        if not all(ports):
            return ()
        hosts = (self.roster.nodes[rank.node].address for rank in self.roster.world)
        return tuple(zip(hosts, ports, strict=True))

    def _depots(self, plans: Iterable[RankPlan]) -> dict[int, p.Depot]:
        """Where the agents are that keep copies, or give them back, for these ranks."""
        numbers = {number for plan in plans for number in (plan.keeper, plan.node)} - {-1}
        nodes = [self.roster.nodes[number] for number in sorted(numbers)]
        return {node.node: p.Depot(host=node.address, port=node.depot) for node in nodes}

    def _holding(self, rank: Rank, copies: tuple[tuple[int, Made], ...]) -> Holding:
        node = self.roster.nodes[rank.node]
        refused = {(source, made) for where, source, made in self._refused if where == rank.node}

        def counts(source: Source, made: Made) -> bool:
            return (source, made) not in refused and is_clean(made, self._suspicions)

        snapshots = node.snapshots.get(rank.rank, ())
        return Holding(
            node=rank.node,
            shard=rank.shard or 0,
            live=self._live(rank),
            snapshots=tuple(made for made in snapshots if counts(Source.SNAPSHOT, made)),
            copies=tuple(copy for copy in copies if counts(Source.NEIGHBOUR, copy[1])),
            checkpoints=tuple(m for m in node.checkpoints if counts(Source.CHECKPOINT, m)),
        )

    def on_store_down(self, message: p.StoreDown) -> None:
        """The store is gone; it is missed when the next generation is formed."""
        if message.serial != self._store.serial:
            return
        if not self.spec.joins and self.phase in (Phase.TRAINING, Phase.RESTORING):
            # Their framework ends them because of it, sooner or later.
            text = f"the scheduler of {self.spec.framework.value} has ended"
            self._on_fault(Fault(kind=Kind.PROCESS, message=text, node=self._store.node))
            return
        self._store.drop()

    def on_state_ready(self, message: p.StateReady) -> None:
        """A rank has its state, or could not get it."""
        rank = self.roster.ranks[message.rank]
        if message.generation != self.generation or rank.status is not Status.RESTORING:
            return
        if message.error:
            assert self._planned is not None
            source = self._planned.ranks[self.roster.place_of(rank)].source
            made = self._planned.step, self._planned.made
            self._refused.add((rank.node, source, made))
            text = f"rank {rank.rank} could not take its state: {message.error}"
            fault = self._fault(Kind.RESTORE, rank, text)
            tried = f"{source.value} of step {made[0]} of generation {made[1]}"
            self._on_fault(msgspec.structs.replace(fault, signature=tried))
            return
        rank.status = Status.TRAINING
        for order in self._injections.due(rank):
            self._do(Send(self.roster.nodes[rank.node].connection, order))
        if self.roster.all_are(Status.TRAINING):
            self.phase = Phase.TRAINING
            self._do(CancelTimer("join"))
            self._record(journal.Restored(generation=self.generation, incident=self.incidents.open))
            self._start_outside(self.roster.at_the_door)

    def on_step_done(self, message: p.StepDone) -> None:
        """A rank has finished its first step of the generation."""
        rank = self.roster.ranks[message.rank]
        if message.generation != self.generation or not rank.inside:
            return
        rank.stepped, rank.finished = True, message.finished
        self.newest = max(self.newest, message.finished)
        if self.phase is Phase.TRAINING and self.roster.all_stepped:
            self._newcomers = set()
            self._close_incident(generation=self.generation, step=message.finished)
            self._grow()

    def _close_incident(self, *, generation: int, step: int) -> None:
        """Record that training goes on, and count the next fault as a new incident."""
        self._record(
            journal.FirstStep(generation=generation, step=step, incident=self.incidents.open)
        )
        self.incidents.close()
        self.newest, self._reached = step, 0
        self._refused = set()

    def _declare_over(self) -> None:
        """End the current generation: every rank in it is told to leave its collective."""
        if self.phase not in (Phase.TRAINING, Phase.RESTORING):
            return
        self.phase = Phase.REGROUPING
        finished = max(rank.finished for rank in self.roster.world)
        replaced = self.roster.any_is(Status.ABSENT)
        over = p.Over(generation=self.generation, finished=finished, replaced=replaced)
        self._tell_nodes(over)
        for rank in self.roster.those(Status.TRAINING, Status.RESTORING):
            rank.status = Status.LEAVING
        self._do(SetTimer("leave", self.spec.policy.leave_timeout_s))

    def _tell_nodes(self, message: p.Message) -> None:
        """Send one message to all agents of the world."""
        for node in self.roster.members:
            self._do(Send(node.connection, message))

    @abstractmethod
    def _put_newcomers_out(self) -> None: ...

    @abstractmethod
    def _is_held_up(self) -> bool:
        """Whether something else is to be done while all ranks wait, which goes on by itself."""

    @abstractmethod
    def _decide(self, fault: Fault) -> None: ...
