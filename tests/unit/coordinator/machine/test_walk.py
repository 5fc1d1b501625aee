"""The machine under events in any order: no deadlock, and no open incident."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from jobs.settling import settle
from jobs.simulated import World
from jobs.trained import SIGKILL

from rekindle.protocol import agent as p
from rekindle.recovery.faults.fault import ErrorRecord
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import Policy, Strategy

# ---- events in any order

picks = st.integers(0, 10_000)


class Walk(RuleBasedStateMachine):
    """Faults of all kinds at any time, and late messages and orders.

    When no more faults occur, the job always ends: it succeeds, or it fails within its budgets.
    (`Checks` of the driver verifies that no command breaks an invariant.)
    """

    world: World
    left = False  # a rank exited with status 0 before the end of the script

    @initialize(
        nodes=st.integers(1, 3),
        least=st.integers(0, 3),
        processes=st.integers(1, 3),
        max_restarts=st.integers(0, 2),
        max_recoveries=st.integers(0, 6),
        max_in_row=st.integers(1, 3),
        asked=st.sets(st.sampled_from([Strategy.RECOVER_IN_PLACE, Strategy.RESTART]), max_size=1),
        known=st.booleans(),
    )
    def begin(
        self,
        nodes: int,
        least: int,
        processes: int,
        asked: set[Strategy],
        known: bool,
        **limits: int,
    ) -> None:
        """Create a world of any size, which may shrink or not, with some budgets."""
        policy = Policy(approve=tuple(asked), **limits)
        least = min(least, nodes)
        self.world = World(nodes=nodes, least=least, processes=processes, policy=policy)
        self.world.names_session = known

    def alive(self) -> bool:
        return self.world.outcome is None

    @rule(choices=st.lists(picks, min_size=1, max_size=30))
    def go_on(self, choices: list[int]) -> None:
        """Advance the world by some steps in any order."""
        for pick in choices:
            moves = self.world.moves()
            if self.world.outcome is not None or not moves:
                return
            moves[pick % len(moves)]()

    @precondition(alive)
    @rule(pick=picks, way=st.sampled_from(["kill", "raise", "leave", "hang", "break", "restore"]))
    def break_a_rank(self, pick: int, way: str) -> None:
        """Let a rank die, raise, exit early, hang, or fail in a collective or a restore."""
        world = self.world
        ranks = sorted(world.processes)
        if not ranks:
            return
        rank = ranks[pick % len(ranks)]
        match way:
            case "kill":
                world.die(rank, signal=SIGKILL)
            case "raise":
                error = ErrorRecord(message=f"Error {pick % 3}", at=world.now)
                world.die(rank, code=1, error=error)
            case "leave":
                self.left = True
                world.die(rank, code=0)
            case "hang":
                world.hang(rank)
            case "break":
                world.break_collective(rank)
            case "restore":
                world.fail_restore(rank)

    @precondition(alive)
    @rule(pick=picks)
    def lose_a_node(self, pick: int) -> None:
        """Lose an agent with its ranks."""
        nodes = sorted(self.world.agents)
        if nodes:
            self.world.lose(nodes[pick % len(nodes)])

    @precondition(alive)
    @rule(pick=picks, comes=st.booleans())
    def change_the_spares(self, pick: int, comes: bool) -> None:
        """Add a spare, or lose one."""
        world = self.world
        if comes and len(world.spares) < 2:
            world.spare_comes()
        elif world.spares:
            world.spare_dies(sorted(world.spares)[pick % len(world.spares)])

    @precondition(alive)
    @rule(pick=picks)
    def let_a_limit_pass(self, pick: int) -> None:
        """Let a time limit pass."""
        names = sorted(self.world.timers)
        if names:
            self.world.fire(names[pick % len(names)])

    @precondition(alive)
    @rule(granted=st.integers(0, 9))
    def answer(self, granted: int) -> None:
        """Let a person answer the request that waits, seldom with a refusal."""
        machine = self.world.machine
        approval = p.Approval(incident=machine.job.incidents.open, granted=granted > 0, by="ann")
        machine.recovery.approve(approval)
        self.world.collect()

    @precondition(alive)
    @rule()
    def lose_the_store(self) -> None:
        """Let the ranks' store end on its node."""
        store = self.world.machine.job.store
        if store.is_up and store.node in self.world.agents:
            self.world.agents[store.node].news.append(p.StoreDown(serial=store.serial))

    @precondition(alive)
    @rule()
    def lose_the_coordinator(self) -> None:
        """Replace the coordinator."""
        self.world.lose_coordinator()

    @precondition(alive)
    @rule(at_once=st.booleans(), sure=st.integers(0, 9))
    def stop(self, at_once: bool, sure: int) -> None:
        """Stop the job, but seldom, because a stop ends the walk."""
        if sure == 0:
            self.world.stop(at_once=at_once)

    def teardown(self) -> None:
        """Without further faults, the job ends, and the journal is consistent."""
        if not hasattr(self, "world"):
            return
        settle(self.world)
        assert self.world.outcome is not None, f"stays {self.world.phase.value} for ever"
        ended = self.world.last(journal.Ended)
        assert len(self.world.recorded(journal.Ended)) == 1
        assert self.world.outcome == (ended.outcome == "succeeded")
        if self.world.outcome and not self.left:
            assert ended.finished == self.world.total
            found = journal.incidents(self.world.history)
            assert all(incident.closed for incident in found)


TestWalk = Walk.TestCase
TestWalk.settings = settings(max_examples=150, stateful_step_count=30)
