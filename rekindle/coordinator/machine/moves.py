"""Planned moves: a prepared spare replaces a node that still works.

The spare starts the ranks of the node while the world trains. When they wait at their Session, the
world pauses between two steps. The spare becomes the node, and its ranks take their state from
other ranks. What a rank shares with no other comes from the earlier agent, which ends when all
ranks have finished a step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from rekindle.coordinator.machine.checkpoints import Checkpoints
from rekindle.coordinator.machine.fleet import Fleet
from rekindle.coordinator.machine.generations import Generations
from rekindle.coordinator.machine.job_state import ENDING, JobState, Phase, Send, SetTimer, Timer
from rekindle.coordinator.machine.roster import Node
from rekindle.errors import ProtocolError
from rekindle.job.spec import KeepsOff
from rekindle.names import SPARE
from rekindle.protocol import agent as p
from rekindle.protocol.http_views import Drain, MoveView
from rekindle.recovery.faults.fault import Fault, FaultKind
from rekindle.recovery.journal import journal

_ENDED = (p.Exited, p.SpawnFailed)  # a rank of a prepared spare does not live


class Move:
    """One move. wanted: its request. spare: the connection of the spare that prepares it, or -1.

    restart: the restart whose ranks the spare has started. arrived: those that wait at their
    Session. failures: spares that could not prepare it. asked: there was no spare, so the engine
    was asked for one. awaits: its spare was lost or taken, and the engine brings another one.

    left: the agent has left the place. began: when training paused for that; 0: for another reason.
    late: the deadline has passed.
    """

    def __init__(self, wanted: journal.MoveRequested) -> None:
        self.wanted = wanted
        self.node = wanted.fault.node
        self.spare = -1
        self.restart = 0
        self.arrived: set[int] = set()
        self.failures = 0
        self.began = 0.0
        self.asked = self.awaits = self.left = self.late = False


class Moves:
    """Moves nodes to prepared spares. A move uses up no budget of failures."""

    def __init__(
        self, job: JobState, fleet: Fleet, checkpoints: Checkpoints, generations: Generations
    ) -> None:
        self._job = job
        self._fleet = fleet
        self._checkpoints = checkpoints
        self._generations = generations
        self._roster = job.roster
        self._spec = job.spec
        self._moves: dict[int, Move] = {}
        self._paused_at = 0.0
        self._taken = 0  # spares that have become nodes, and that the engine has not replaced

    # ---- requests

    def drain(self, order: Drain, now: float) -> str:
        """Move a node for a person. Return why this is impossible, or an empty text."""
        if not 0.0 <= order.deadline_s < float("inf"):
            return f"a deadline of {order.deadline_s:g} s is invalid; give 0 or more seconds"
        deadline = now + order.deadline_s if order.deadline_s else 0.0
        return self.request(order.node, "the node is drained", by=order.by, at=(now, deadline))

    def request(self, node: int, reason: str, *, by: str, at: tuple[float, float]) -> str:
        """Plan to move a node. Return why this is impossible, or an empty text.

        at: the time now, and the deadline; 0: none.
        """
        if obstacle := self.obstacle(node):
            return obstacle
        now, deadline = at
        agent = self._roster.nodes[node]
        fault = Fault(
            kind=FaultKind.PLANNED,
            message=f"planned move of node {node}: {reason}",
            node=node,
            host=agent.host,
            finished=self._roster.ranks_of(node)[0].finished,
            at=now,
        )
        wanted = journal.MoveRequested(
            incident=self._job.incidents.aside(),
            fault=fault,
            by=by,
            address=agent.address,
            pid=agent.pid,
            deadline=deadline,
        )
        self._job.record(wanted)
        self._moves[node] = Move(wanted)
        self._set_timer(now)
        self.advance()
        return ""

    def obstacle(self, node: int) -> str:
        """Return why a node cannot move, or an empty text."""
        job, roster = self._job, self._roster
        if job.phase in ENDING:
            return "the job is ending"
        if not 0 <= node < self._spec.nodes:
            return f"the job has no node {node}; its nodes are 0 to {self._spec.nodes - 1}"
        if node in self._moves:
            return f"node {node} is to move already"
        if node not in roster.nodes:
            return f"node {node} has no agent now"
        if node in roster.outside:
            return f"node {node} is not in the world, so it has nothing to move"
        if not self._spec.can_join:
            framework = self._spec.framework.value
            return f"a new process cannot join live ranks of {framework}, so no node can move"
        if not job.sessions_seen:
            return "no rank has reached a Session yet, and only ranks with a Session can move"
        if not self._others_have_state(node):
            return f"only node {node} holds the training state of its ranks, so it cannot move"
        return ""

    def _others_have_state(self, *nodes: int) -> bool:
        """Return whether each shard of these nodes is also on another node of the world."""
        world = self._roster.world
        elsewhere = {rank.shard for rank in world if rank.node not in nodes}
        return all(rank.shard in elsewhere for rank in world if rank.node in nodes)

    def inherit(self, wanted: Iterable[journal.MoveRequested], late: Collection[int]) -> None:
        """Continue the moves of an earlier coordinator. late: incidents with a passed deadline."""
        self._moves = {each.fault.node: Move(each) for each in wanted}
        for move in self._moves.values():
            move.late = move.wanted.incident in late
        if self._moves:
            self._job.do(SetTimer(Timer.MOVE, 0.0))

    # ---- preparation

    def advance(self) -> None:
        """Prepare spares for the moves, while the world trains."""
        if self._job.phase is Phase.TRAINING:
            for move in [each for each in self._moves.values() if not each.left]:
                self._prepare(move)

    def _prepare(self, move: Move) -> None:
        roster = self._roster
        if self._holds(move) and move.restart != self._job.restarts:
            self._fleet.release(move.node)
        if move.spare >= 0 and not self._holds(move):  # all ranks restarted, or a node was lost
            self._forget_spare(move, awaits=move.spare not in roster.free_spares)
        if move.spare >= 0:
            return
        spare = self._free_spare(move)
        if spare is None:
            if not (move.asked or move.awaits):
                move.asked = True
                self._job.record(journal.NodeWanted(node=SPARE))
        else:
            self._hold(move, spare.connection)
            order = self._fleet.spawn_order(move.node, roster.ranks_of(move.node))
            self._job.do(Send(spare.connection, p.Prepare(node=move.node, spawn=order)))

    def _holds(self, move: Move) -> bool:
        """Return whether the spare of a move still prepares it."""
        return self._roster.prepared.get(move.node, -1) == move.spare >= 0

    def _hold(self, move: Move, spare: int) -> None:
        move.spare, move.restart, move.arrived = spare, self._job.restarts, set()
        move.awaits = False
        self._roster.prepared[move.node] = spare
        self._job.do(SetTimer(Timer.PREPARE, self._spec.policy.join_timeout_s))

    def _forget_spare(self, move: Move, *, awaits: bool = False) -> None:
        move.spare, move.arrived, move.asked, move.awaits = -1, set(), False, awaits

    def _free_spare(self, move: Move) -> Node | None:
        """Return a free spare, if possible on another host. The old host may be about to end."""
        host = move.wanted.fault.host
        roster = self._roster
        free = [roster.spares[each] for each in roster.free_spares if each not in roster.clearing]
        here = [spare for spare in free if spare.host == host]
        others = [spare for spare in free if spare not in here]
        usable = others or (here if self._spec.keeps_off is KeepsOff.NEVER else [])
        return usable[0] if usable else None

    def readmit(self, connection: int, hello: p.Hello) -> bool:
        """Take a spare back that has prepared a move for an earlier coordinator, or connects again.

        Return whether it still may do the move.
        """
        move = self._moves.get(hello.node)
        taken = hello.node in self._roster.prepared
        if move is None or taken or hello.restart != self._job.restarts:
            return False
        move.asked = False
        self._hold(move, connection)
        return True

    def on_message(self, connection: int, node: int, message: p.Message) -> None:
        """Handle a message of a spare that prepares the move of this node.

        Raises ProtocolError: the message is about ranks of other nodes.
        """
        if not self._roster.owns(node, message.ranks_named):
            raise ProtocolError(f"a spare for node {node} sent a message for ranks of other nodes")
        if self._job.phase in ENDING:
            return
        move = self._moves[node]
        if isinstance(message, p.Arrived):
            self._on_arrived(move, message)
        elif isinstance(message, p.RankStalled) and message.stopped:
            self._dismiss(move, f"rank {message.rank} is stopped by a signal there")
        elif isinstance(message, _ENDED):
            how = message.exit if isinstance(message, p.Exited) else message.error
            self._dismiss(move, f"rank {message.rank} could not start there: {how}")

    def _on_arrived(self, move: Move, message: p.Arrived) -> None:
        """Note a rank that waits at its Session, if it can join the others."""
        shard = self._roster.ranks[message.rank].shard
        if message.shard != shard:
            why = f"rank {message.rank} has shard {message.shard} there, and {shard} here"
            self._dismiss(move, why)
        elif why := self._other_text(message):
            # Each further spare has the same text. This one can still replace a lost node.
            self._fleet.release(move.node)
            self._give_up(move, why)
        else:
            move.arrived.add(message.rank)

    def _other_text(self, message: p.Arrived) -> str:
        """Return that a rank runs another text of a file than the world, or an empty text."""
        for rank in self._roster.world:
            known = rank.arrived.sources if rank.arrived else {}
            for file, digest in message.sources.items():
                if known.get(file, digest) != digest:
                    return (
                        f"rank {message.rank} would run another text of {file} there than rank "
                        f"{rank.rank}; the file has changed, or differs between nodes"
                    )
        return ""

    def on_message_of_released(self, connection: int, message: p.Message) -> None:
        """Handle a message of a spare that ends the ranks that it has prepared.

        A rank that ends with status 0 before that counts as one of the node, so the agent is
        useless.
        """
        if self._job.phase in ENDING or not isinstance(message, _ENDED):
            return
        if isinstance(message, p.Exited) and message.exit.code == 0:
            self._lose_released(connection)
            return
        left = self._roster.clearing[connection]
        left.discard(message.rank)
        if not left:
            self._fleet.on_cleared(connection)
            self.advance()

    def _lose_released(self, connection: int) -> None:
        self._job.send_home(connection, p.EndAgent(status=1))
        self._fleet.on_spare_lost(connection)

    def on_preparation_late(self, now: float) -> None:
        """Dismiss the spares whose ranks did not reach their Session or did not end in time."""
        limit_s = self._spec.policy.join_timeout_s
        awaited = [move for move in self._moves.values() if self._holds(move)]
        for move in awaited:
            if len(move.arrived) < self._spec.processes_per_node:
                self._dismiss(move, f"its ranks did not reach their Session within {limit_s:g} s")
        for connection in list(self._roster.clearing):
            self._lose_released(connection)

    def _dismiss(self, move: Move, why: str) -> None:
        """End the spare of a move, because its ranks cannot join the world."""
        spare = self._roster.spares[move.spare]
        left = journal.NodeLeft(node=SPARE, address=spare.address, pid=spare.pid, reason=why)
        self._job.record(left)
        self._job.send_home(move.spare, p.EndAgent(status=1))
        lost = self._roster.lose_spare(move.spare)
        promised = lost[1] if lost else []
        for node in promised:
            self._fleet.fill(node)
        if promised:  # another agent becomes the node, and that ends the move
            self._forget_spare(move)
        else:
            self._spare_failed(move, why)
        self.advance()

    def _spare_failed(self, move: Move, why: str, *, awaits: bool = False) -> None:
        self._forget_spare(move, awaits=awaits)
        move.failures += 1
        if move.failures > self._spec.policy.max_in_row:
            self._give_up(move, f"{move.failures} spares could not take its place; the last: {why}")

    def _give_up(self, move: Move, reason: str) -> None:
        del self._moves[move.node]
        self._job.record(
            journal.MoveEnded(incident=move.wanted.incident, node=move.node, reason=reason)
        )

    # ---- the move

    def _ready(self) -> list[Move]:
        """Return the moves whose new ranks all wait, and that leave every state in the world."""
        found: list[Move] = []
        for move in self._moves.values():
            nodes = [each.node for each in (*found, move)]
            agent = self._roster.nodes.get(move.node)
            can_leave = agent is not None and agent.committing < 0
            if can_leave and self._waits(move) and self._others_have_state(*nodes):
                found.append(move)
        return found

    def _waits(self, move: Move) -> bool:
        """Return whether all new ranks of a move wait for a pause."""
        valid = self._holds(move) and move.restart == self._job.restarts
        return valid and len(move.arrived) == self._spec.processes_per_node and not move.left

    @property
    def pause_cause(self) -> p.Cause | None:
        """Return why the world pauses: nodes can move now."""
        nodes = [move.node for move in self._ready()] if self._moves else []
        ranks = self._roster.numbers_of(nodes)
        return p.Cause(kind=FaultKind.PLANNED.value, ranks=ranks) if nodes else None

    def on_paused(self, now: float) -> None:
        """Note the time at which training stops."""
        self._paused_at = now

    def work_in_pause(self) -> bool:
        """Give the places of nodes to their prepared spares, if no state is lost by that."""
        began, self._paused_at = self._paused_at, 0.0
        if not self._moves or self._job.phase is not Phase.REGROUPING:
            return False
        state, leave = self._generations.state_without(()), list[int]()
        for move in self._ready():
            if self._generations.state_without((*leave, move.node)) == state:
                leave.append(move.node)
        for node in leave:
            self._leave(self._moves[node], began)
        if leave:
            self._fleet.ask_for_store()  # an agent that left may have had it
        return bool(leave)

    def _leave(self, move: Move, began: float) -> None:
        reason = f"it moves to another agent ({move.wanted.fault.message})"
        arrived = [rank.arrived for rank in self._roster.ranks_of(move.node)]
        agent = self._fleet.hand_over(move.node, reason)
        agent.own = {each.rank: each.own for each in arrived if each is not None and each.own}
        self._job.sent_home.add(agent.connection)  # its later messages have no effect
        self._roster.leaving[agent.connection] = agent
        move.left, move.began = True, began
        self._roster.vacant.add(move.node)
        self._fleet.promote()
        self._job.do(SetTimer(Timer.NODE, self._spec.policy.node_timeout_s))

    def on_joined(self, agent: Node) -> None:
        """Handle an agent that has become a node. A move is over if it is another agent."""
        move = self._moves.get(agent.node)
        if move is None:
            return
        wanted = move.wanted
        if (agent.address, agent.pid) == (wanted.address, wanted.pid):
            move.left = False  # the agent has connected again
            return
        del self._moves[agent.node]
        self._taken += move.left and not move.asked
        self._job.record(
            journal.Moved(
                incident=wanted.incident,
                node=agent.node,
                host=agent.host,
                began=move.began,
                address=wanted.address,
                pid=wanted.pid,
            )
        )
        if self._holds(move):  # another agent was faster
            self._job.send_home(move.spare, p.EndAgent(status=1))
            self._fleet.on_spare_lost(move.spare)

    def on_stepped(self) -> None:
        """End the agents that have left their places, because all ranks have finished a step.

        The engine brings other spares. Earlier, the start of their processes could delay the ranks.
        """
        for connection in self._roster.leaving:
            self._job.do(Send(connection, p.EndAgent(status=1)))
        self._roster.leaving.clear()
        for _ in range(self._taken):
            self._job.record(journal.NodeWanted(node=SPARE))
        self._taken = 0
        self.advance()

    def on_lost(self, connection: int, *, asked: bool) -> None:
        """Handle the loss of an agent: a spare may have prepared a move, or an agent has left.

        asked: the coordinator has requested another spare.
        """
        self._roster.leaving.pop(connection, None)
        for move in list(self._moves.values()):
            if move.spare == connection and not move.left:
                self._spare_failed(move, "its spare was lost", awaits=asked)
        self.advance()

    def views(self) -> list[MoveView]:
        """Describe the moves that are not over."""
        return [
            MoveView(
                node=move.node,
                reason=move.wanted.fault.message,
                spare=move.spare >= 0,
                ready=self._waits(move),
            )
            for move in self._moves.values()
        ]

    # ---- deadlines

    def on_deadline(self, now: float) -> None:
        """Write a checkpoint, because the deadline of a move has passed."""
        passed = [
            move
            for move in self._moves.values()
            if 0 < move.wanted.deadline <= now and not (move.late or move.left)
        ]
        for move in passed:
            move.late = True
            self._job.record(journal.MoveLate(incident=move.wanted.incident, node=move.node))
        if passed:
            self._checkpoints.write_soon()
        self._set_timer(now)

    def _set_timer(self, now: float) -> None:
        """Set the timer to the next deadline."""
        due = [m.wanted.deadline for m in self._moves.values() if m.wanted.deadline and not m.late]
        if due:
            self._job.do(SetTimer(Timer.MOVE, max(0.0, min(due) - now)))
