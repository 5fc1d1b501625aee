"""The snapshots that ranks keep, and the checkpoints that nodes write, also in shards."""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec

from rekindle.coordinator.machine.fleet import Fleet
from rekindle.coordinator.machine.job_state import ENDING, JobState, Phase, Send
from rekindle.coordinator.machine.roster import Node, Status
from rekindle.errors import ProtocolError
from rekindle.names import OFFERS
from rekindle.protocol import agent as p
from rekindle.protocol.agent import Commit, ShardReady, ShardWritten
from rekindle.recovery.faults.fault import Fault, FaultKind
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.interval import Chosen, Interval
from rekindle.states import StateId, is_clean

StoreNews = (
    p.CheckpointWritten
    | p.SnapshotRefused
    | p.ShardReady
    | p.ShardWritten
    | p.WriteLeftOut
    | p.Pruned
)


class Ready(msgspec.Struct, frozen=True):
    """A state whose shards can all be written. places: the node and the rank of each shard."""

    state: StateId
    places: dict[int, tuple[int, int]]

    def shards_by_node(self) -> dict[int, dict[int, int]]:
        """Return the shards of each node, each with the rank that has it."""
        found: dict[int, dict[int, int]] = {}
        for shard, (node, rank) in sorted(self.places.items()):
            found.setdefault(node, {})[shard] = rank
        return found


class SnapshotSet(msgspec.Struct, frozen=True, kw_only=True):
    """A state with snapshots of all shards on agents' nodes, and their places.

    places: node -> shard -> rank.
    """

    state: StateId
    shards: int
    places: dict[int, dict[int, int]]


class CheckpointBacklog:
    """At most one checkpoint that is ready to be written, and one that is being written."""

    def __init__(self) -> None:
        self._due: dict[StateId, dict[int, tuple[int, int]]] = {}  # some shards are not ready yet
        self._ready: Ready | None = None
        self._newest = StateId(-1, 0)
        self.under_way: StateId | None = None
        self._writers: set[int] = set()  # the nodes that write the one that is under way

    def begin(self) -> None:
        """Drop the due checkpoints of earlier generations, because a generation begins."""
        self._due, self._ready, self.under_way = {}, None, None
        self._newest = StateId(-1, 0)

    @property
    def is_empty(self) -> bool:
        """Return whether no checkpoint is ready or being written."""
        return self.under_way is None and self._ready is None

    def add(self, node: int, part: ShardReady) -> StateId | None:
        """Note that a node can write a shard. Return the checkpoint that is left out for it."""
        state = StateId(part.step, part.generation)
        if state <= self._newest:
            return None  # a newer checkpoint was ready before
        places = self._due.setdefault(state, {})
        places[part.shard] = node, part.rank
        if len(places) < part.shards:
            return None
        left_out = self._ready.state if self._ready else None
        self._newest, self._ready = state, Ready(state, places)
        self._due = {each: places for each, places in self._due.items() if each > state}
        return left_out

    def next(self) -> Ready | None:
        """Return the checkpoint to write now, or None if none is ready or one is being written."""
        if self.under_way is not None or self._ready is None:
            return None
        ready, self._ready = self._ready, None
        self.under_way = ready.state
        self._writers = {node for node, _ in ready.places.values()}
        return ready

    def lose(self, node: int) -> StateId | None:
        """Drop the checkpoint that is being written if this node writes a part. Return its state.

        The next call of `next` drops a checkpoint that is only ready.
        """
        if self.under_way is None or node not in self._writers:
            return None
        lost, self.under_way = self.under_way, None
        return lost

    def done(self, state: StateId) -> bool:
        """Note that a checkpoint is written or has failed. Return False if it is not under way."""
        if self.under_way != state:
            return False
        self.under_way = None
        return True


class ShardedCheckpoints:
    """Collects the agents' reports about shards that they have written.

    It drops reports when the next generation is formed, and when a newer checkpoint is complete.
    backlog: the checkpoints that are due or being written.
    """

    def __init__(self) -> None:
        self._generation = 0
        self.backlog = CheckpointBacklog()
        # By step, generation, and whether it is the final checkpoint.
        self._parts: dict[tuple[int, int, bool], dict[int, ShardWritten]] = {}
        self._failed = (0, 0)

    def begin(self, generation: int) -> None:
        """Drop the unfinished checkpoints of earlier generations."""
        self._generation, self._parts = generation, {}
        self.backlog.begin()

    def add(self, part: ShardWritten, owners: Callable[[], dict[int, list[int]]]) -> Commit | None:
        """Note a written shard. Return the order to commit if it was the last one.

        owners: returns the ranks that have each shard.
        """
        if part.generation < self._generation and not part.final:
            return None  # a final checkpoint has the generation that did its step
        parts = self._parts.setdefault((part.step, part.generation, part.final), {})
        parts[part.shard] = part
        if len(parts) < part.shards:
            return None
        self._parts = {
            (step, state, final): each
            for (step, state, final), each in self._parts.items()
            if step > part.step or (final and not part.final)
        }
        ranks = owners()
        in_order = [parts[shard] for shard in sorted(parts)]
        return Commit(
            step=part.step,
            generation=part.generation,
            files=tuple(
                msgspec.structs.replace(each.file, ranks=tuple(ranks.get(each.shard, ())))
                for each in in_order
                if each.file is not None
            ),
            position=in_order[0].position,
            origin=in_order[0].origin,
            metrics=in_order[0].metrics,
            seconds=max(each.seconds for each in in_order),
            stall_s=max(each.stall_s for each in in_order),
            final=part.final,
        )

    def fail(self, part: ShardWritten) -> bool:
        """Note that a shard could not be written. Return False if the failure is known."""
        failed = part.generation, part.step
        known, self._failed = self._failed == failed, failed
        return not known


class Checkpoints:
    """Follows the checkpoints of all nodes, and orders new ones.

    interval: steps between two checkpoints. total: the number of steps of the script; 0: unknown.
    metrics: the newest metrics of a rank.
    """

    def __init__(self, job: JobState, fleet: Fleet, interval: Interval) -> None:
        self._job = job
        self._fleet = fleet
        self.interval = interval
        self._roster = job.roster
        self._soon: int | None = None  # the ranks write a checkpoint of a step after this one
        self.assembly = ShardedCheckpoints()
        self.total = 0
        self.metrics: dict[str, float] = {}

    def on_news(self, node: int, message: StoreNews, now: float) -> None:
        """Handle a node's message about checkpoints."""
        match message:
            case p.CheckpointWritten():
                self._on_checkpoint(node, message, now)
            case p.SnapshotRefused():
                self._on_snapshot_refused(node, message, now)
            case p.ShardReady():
                self._on_part_due(node, message)
            case p.ShardWritten():
                self._on_part(node, message, now)
            case p.WriteLeftOut():
                self._on_left_out(message)
            case p.Pruned():
                self._on_pruned(message)
            case _:
                raise AssertionError(f"{type(message).__name__} is no message about checkpoints")

    def _on_checkpoint(self, node: int, message: p.CheckpointWritten, now: float) -> None:
        """Handle a checkpoint that was committed or failed. Training continues in both cases."""
        state = StateId(message.step, message.generation)
        self.assembly.backlog.done(state)
        if self._job.phase is Phase.ENDED:
            return
        self._written(message.step)
        if message.error:
            self._note_failure(node, message.step, message.error, now)
            return
        everybody = message.shards > 1
        for known in self._roster.nodes.values() if everybody else (self._roster.nodes[node],):
            known.checkpoints = (state, *known.checkpoints)[:OFFERS]
        self._job.record(
            journal.Checkpointed(
                step=message.step,
                path=message.path,
                bytes=message.bytes,
                seconds=message.seconds,
            )
        )
        self._tell_interval(self.interval.written(stall_s=message.stall_s, write_s=message.seconds))

    @property
    def are_written(self) -> bool:
        """Return whether no checkpoint is ready, being written, or being committed."""
        commits = any(node.committing >= 0 for node in self._roster.nodes.values())
        return not commits and self.assembly.backlog.is_empty

    def lose(self, agent: Node, now: float) -> None:
        """Record the checkpoint that is lost with an agent, although its ranks ended well."""
        lost = self.assembly.backlog.lose(agent.node)
        step = agent.committing if lost is None else lost.step
        if step >= 0:
            self._note_failure(agent.node, step, "its node is lost", now)
        self.write_next()

    def write_soon(self) -> None:
        """Let the ranks write a checkpoint after their next step."""
        self._soon = self._job.newest
        self._fleet.change_settings(checkpoint_every=1)

    def _written(self, step: int) -> None:
        """Return to the usual interval if the extra checkpoint was written or failed.

        A checkpoint that was under way already when it was ordered does not count.
        """
        if self._soon is not None and step > self._soon:
            self._soon = None
            self._fleet.change_settings(checkpoint_every=self.interval.steps)

    def _note_failure(self, node: int, step: int, error: str, now: float) -> None:
        """Record that a checkpoint could not be written."""
        text = f"writing the checkpoint of step {step} failed: {error}"
        fault = Fault(kind=FaultKind.STORAGE, message=text, node=node, finished=step, at=now)
        self._job.record(self._job.incidents.note_storage(fault))

    def _on_snapshot_refused(self, node: int, message: p.SnapshotRefused, now: float) -> None:
        """Handle a rank that does not have memory for its snapshots. Training continues."""
        if self._job.phase is Phase.ENDED:
            return
        rank = self._roster.ranks[message.rank]
        text = f"rank {rank.rank} does not keep snapshots: {message.error}"
        fault = Fault(
            kind=FaultKind.STORAGE, message=text, node=node, finished=rank.finished, at=now
        )
        self._job.record(self._job.incidents.note_storage(fault))

    def _on_part_due(self, node: int, message: p.ShardReady) -> None:
        """Handle a node that is ready to write a shard of a due checkpoint."""
        if message.generation != self._job.generation or self._job.phase in ENDING:
            return
        left_out = self.assembly.backlog.add(node, message)
        if left_out is not None:
            of = self.assembly.backlog.under_way
            busy = (
                f"the store was busy with the checkpoint of step {of[0]}"
                if of
                else "a newer checkpoint was due"
            )
            self._leave_out(left_out[0], busy)

    def write_next(self) -> None:
        """Order the newest ready checkpoint, if no other one is being written."""
        ready = self.assembly.backlog.next()
        if ready is None:
            return
        step, generation = ready.state
        shards = ready.shards_by_node()
        if not shards.keys() <= self._roster.nodes.keys():
            self.assembly.backlog.done(ready.state)  # the shard was lost with its node
            return
        for node, own in shards.items():
            order = p.WriteShards(
                step=step, generation=generation, shards=own, of=len(ready.places)
            )
            self._job.do(Send(self._roster.nodes[node].connection, order))

    def _on_part(self, node: int, message: p.ShardWritten, now: float) -> None:
        """Handle a shard that was written or failed."""
        if self._job.phase is Phase.ENDED:
            return
        if message.error:
            self.assembly.backlog.done(StateId(message.step, message.generation))
            if self.assembly.fail(message):
                self._note_failure(node, message.step, message.error, now)
        elif order := self.assembly.add(message, self._roster.owners):
            self._roster.nodes[node].committing = message.step
            self._job.do(Send(self._roster.nodes[node].connection, order))

    def _on_left_out(self, message: p.WriteLeftOut) -> None:
        """Handle a checkpoint that a node could not write. Only the first message counts."""
        state = StateId(message.step, message.generation)
        if message.shards == 1 or self.assembly.backlog.done(state):
            self._leave_out(message.step, message.reason)

    def _leave_out(self, step: int, reason: str) -> None:
        if self._job.phase is Phase.ENDED:
            return
        self._job.record(journal.CheckpointLeftOut(step=step, reason=reason))
        self._tell_interval(self.interval.left_out())

    def _tell_interval(self, chosen: Chosen | None) -> None:
        """Change the interval of checkpoints on all ranks."""
        if chosen is None:
            return
        self._job.record(
            journal.CheckpointInterval(
                steps=chosen.steps, seconds=chosen.seconds, reason=chosen.reason
            )
        )
        self._fleet.change_settings(checkpoint_every=chosen.steps)

    def _on_pruned(self, message: p.Pruned) -> None:
        """Remove pruned checkpoints from all nodes, so that no rank restores from them."""
        for node in self._roster.nodes.values():
            node.checkpoints = tuple(m for m in node.checkpoints if m not in message.removed)
        if self._job.phase is not Phase.ENDED:
            self._job.record(
                journal.CheckpointsPruned(removed=message.removed, error=message.error)
            )

    def on_beat(self, node: int, beat: p.Heartbeat, now: float) -> None:
        """Handle the heartbeat of a node: the finished steps of its ranks."""
        reached: list[int] = []
        for number, finished in beat.finished.items():
            rank = self._roster.ranks[number]
            # Until a rank has its state, its page shows the steps of its ended predecessor.
            if rank.status is Status.TRAINING:
                rank.finished = max(rank.finished, finished)
                self._job.newest = max(self._job.newest, finished)
                reached.append(rank.finished)
        # The first step of a generation is slower than others.
        if reached and self._roster.all_stepped:
            self.interval.at(now, max(reached))
        self.total = max(self.total, beat.total)
        self.metrics = beat.metrics or self.metrics

    def on_snapshots(self, node: int, message: p.Snapshots, now: float) -> None:
        """Note a node's newest snapshots, or its replicas of other nodes' snapshots.

        Raises ProtocolError: a replica belongs to a rank that the job does not have.
        """
        if not message.copies:
            self._roster.nodes[node].snapshots.update(message.kept)
            return
        if not all(0 <= rank < self._job.spec.world_size for rank in message.kept):
            raise ProtocolError(f"node {node} has replicas of ranks that the job does not have")
        self._roster.nodes[node].copies.update(message.kept)

    # ---- the final checkpoint

    def step_of_final_checkpoint(self) -> int | None:
        """Return the step of the newest snapshot, if it is newer than every clean checkpoint."""
        newest = self.worth_writing(())
        return newest.state.step if newest else None

    def worth_writing(self, without: Collection[int]) -> SnapshotSet | None:
        """Return other nodes' newest snapshot, if every clean checkpoint is older.

        without: nodes whose snapshots do not count.
        """
        suspicions = self._job.suspicions
        newest = self._newest_snapshot(without)
        written = {state for node in self._roster.nodes.values() for state in node.checkpoints}
        steps = (state.step for state in written if is_clean(state, suspicions))
        return newest if newest and newest.state.step > max(steps, default=0) else None

    def _newest_snapshot(self, without: Collection[int]) -> SnapshotSet | None:
        """Return the newest clean snapshot of all shards on other nodes than these, or None."""
        nodes, ranks = self._roster.nodes, self._roster.ranks
        if len({rank.shard is None for rank in ranks}) > 1:
            return None  # after a takeover, some ranks' shards are unknown
        held: dict[int, dict[StateId, tuple[int, int]]] = {rank.shard or 0: {} for rank in ranks}
        able = [nodes[number] for number in sorted(nodes.keys() - without)]
        own = [(node.node, node.snapshots) for node in able]
        for number, snapshots in (*own, *((node.node, node.copies) for node in able)):
            for rank, kept in snapshots.items():
                for state in kept:
                    held[ranks[rank].shard or 0].setdefault(state, (number, rank))
        whole = set.intersection(*(set(each) for each in held.values()))
        newest = max(
            (state for state in whole if is_clean(state, self._job.suspicions)), default=None
        )
        if newest is None:
            return None
        places: dict[int, dict[int, int]] = {}
        for shard, holders in held.items():
            node, rank = holders[newest]
            places.setdefault(node, {})[shard] = rank
        return SnapshotSet(state=newest, shards=len(held), places=places)
