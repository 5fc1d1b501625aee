"""Run simulated processes to the end of the job, without further faults."""

from __future__ import annotations

from jobs.processes import Doing
from jobs.simulated import World
from rekindle.coordinator.machine.job_state import Phase


def settle(world: World) -> None:
    """Run until no move is possible; then let time limits expire, the shortest first.

    Raises AssertionError: the job has not ended after 20,000 moves.
    """
    for _ in range(20_000):
        if world.outcome is not None:
            return
        if _move(world):
            continue
        if world.timers:
            world.fire(world.next_timer())
        elif not _end_the_stuck(world):
            return
    raise AssertionError("the job neither ends nor rests")


def _move(world: World) -> bool:
    """Make one possible move; return False if there is none."""
    if world.cut_spares:
        world.spare_comes()
        return True
    if moves := world.check_moves():
        moves[0]()
        return True
    if world.promotions:
        world.take_place()
        return True
    for node in world.absent_nodes():
        if world.phase not in (Phase.STOPPING, Phase.ENDED):
            world.join(node)
            return True
    for node, agent in list(world.agents.items()):
        if agent.cut:
            world.find_coordinator(node)
            return True
        if agent.orders:
            world.handle(node)
            return True
        if agent.news:
            world.hear(node)
            return True
    for rank in world.processes:
        if world.can_go_on(rank):
            world.go_on(rank)
            return True
    return _break_the_blocked(world)


def _break_the_blocked(world: World) -> bool:
    """Fail a collective whose peer has ended or left, as the network eventually does."""
    for rank, process in world.processes.items():
        in_group = process.doing in (Doing.STEPPING, Doing.RESTORING)
        if in_group and world.lacks_somebody(process):
            world.break_collective(rank)
            return True
    return False


def _end_the_stuck(world: World) -> bool:
    """Kill ranks that hang, if the state machine has no time limit for them."""
    stuck = [rank for rank, q in world.processes.items() if q.doing is Doing.STUCK]
    for rank in stuck:
        world.die(rank, signal=9)
    return bool(stuck)
