"""The coordinator's machine: events in, commands out, and no deadlock whatever the order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from jobs.driver import Driver
from jobs.pretended import World

from rekindle.errors import ProtocolError
from rekindle.recovery import journal
from rekindle.recovery.fault import ErrorRecord, Exit, Kind
from rekindle.recovery.plan import Source
from rekindle.recovery.policy import Policy, Strategy
from rekindle.runtime import protocol as p
from rekindle.runtime.state import Phase, Status

SIGKILL = 9


def trained(finished: int = 1, **world: object) -> Driver:
    """A job whose ranks have all finished so many steps."""
    job = Driver(**world)  # type: ignore[arg-type]
    job.train(finished)
    assert job.phase is Phase.TRAINING
    return job


def sources(job: Driver) -> dict[int, Source]:
    """Where each rank takes its state from, by the last commands."""
    forms = job.told(p.Form)
    return {rank: plan.source for form in forms.values() for rank, plan in form.plan.items()}


def strategies(job: Driver) -> list[Strategy]:
    """What was decided so far."""
    return [decided.strategy for decided in job.recorded(journal.Decided)]


# ---- from the start to the first step


def test_ranks_are_started_when_all_nodes_are_there_and_the_store_is_up() -> None:
    """Agents are welcomed as they come; one hosts the store, and only then ranks are started."""
    job = Driver(nodes=2, processes=2)
    job.hello(1)
    assert job.told(p.Welcome) == {1: p.Welcome(node=1)}
    job.hello(0)
    assert list(job.told(p.HostStore)) == [0]
    assert not job.spawned_now()
    job.store_up(port=4711)
    assert job.spawned_now() == [0, 1, 2, 3]
    spawn = job.told(p.Spawn)[1]
    assert (spawn.ranks, spawn.store_port, spawn.restart) == ((2, 3), 4711, 0)
    assert "node" not in job.timers


def test_from_the_start_to_the_first_step() -> None:
    """All arrive: one generation is formed, fresh; all have their state and step: it trains."""
    job = Driver(nodes=2, processes=1)
    job.start()
    assert job.phase is Phase.REGROUPING
    job.arrive([0])
    assert not job.told(p.Form)
    job.arrive([1])
    assert set(sources(job).values()) == {Source.FRESH}
    assert {form.generation for form in job.told(p.Form).values()} == {1}
    job.ready([0])
    assert job.phase is Phase.RESTORING
    job.ready([1])
    assert job.phase is Phase.TRAINING
    job.step(1)
    first = job.last(journal.FirstStep)
    assert (first.generation, first.step, first.incident) == (1, 1, 0)
    assert not job.timers.keys() & {"leave", "join", "node"}


def test_generations_go_on_from_those_of_earlier_attempts() -> None:
    """A later attempt never forms a generation that an earlier one had."""
    job = Driver(attempt=2, generation=7)
    job.start()
    job.arrive(job.ranks)
    assert job.told(p.Form)[0].generation == 8


def test_ranks_that_arrive_before_the_store_is_up_wait_for_it() -> None:
    """A store that is gone when all have arrived is asked for, and then the generation forms."""
    job = Driver()
    job.start()
    job.say(0, p.StoreDown(serial=1))
    job.arrive(job.ranks)
    assert not job.told(p.Form)
    assert job.told(p.HostStore)[0].serial == 2
    job.store_up(port=4712)
    assert job.told(p.Form)[0].store_port == 4712


def test_a_node_that_is_late_is_asked_for_again() -> None:
    """An agent that has not come in time is wanted from the engine; those that came are not."""
    job = Driver(nodes=2)
    job.hello(1)
    job.fire("late")
    assert [wanted.node for wanted in job.recorded(journal.NodeWanted)] == [0]


# ---- one fault


def test_a_killed_rank_is_started_anew_and_the_others_keep_their_state() -> None:
    """SIGKILL of one rank: Over to all, Spawn of that rank alone, its state from a live peer."""
    job = trained(5, nodes=2, processes=2)
    job.exits(3, signal=SIGKILL, finished=5)
    assert job.told(p.Over) == {0: p.Over(generation=1), 1: p.Over(generation=1)}
    assert job.spawned_now() == [3]
    assert strategies(job) == [Strategy.RECOVER_IN_PLACE]
    job.spawned()
    job.arrive([0, 1, 2], finished=5)
    assert not job.told(p.Form)
    job.arrive([3])
    assert sources(job) == dict.fromkeys((0, 1, 2), Source.SELF) | {3: Source.PEER}
    assert {(f.generation, f.step) for f in job.told(p.Form).values()} == {(2, 5)}
    job.ready(job.ranks)
    job.step(6)
    first = job.last(journal.FirstStep)
    assert (first.generation, first.step, first.incident) == (2, 6, 1)
    assert job.last(journal.Formed).sources == {"self": 3, "peer": 1}


def test_a_rank_one_step_behind_takes_the_newest_state() -> None:
    """Ranks that did not finish the last step take it from one that did: no step is lost."""
    job = trained(5, processes=3)
    job.exits(0, signal=SIGKILL, finished=5)
    job.spawned()
    job.arrive([1], finished=6)
    job.arrive([2], finished=5)
    job.arrive([0])
    assert sources(job) == {0: Source.PEER, 1: Source.SELF, 2: Source.PEER}
    assert job.last(journal.Formed).step == 6


def test_a_torn_rank_takes_its_state_from_another() -> None:
    """A rank caught inside its update is no source, not even for itself."""
    job = trained(5, processes=3)
    job.exits(0, signal=SIGKILL, finished=5)
    job.spawned()
    job.arrive([0])
    job.arrive([1], finished=5, torn=True)
    job.arrive([2], finished=5)
    assert sources(job)[1] is Source.PEER


def test_a_collective_fails_before_the_exit_is_known() -> None:
    """The first sign is a peer's error: all leave at once, and the exit decides what is done."""
    job = trained(5, processes=3)
    job.fail_step(1)
    assert job.told(p.Over)
    assert not strategies(job)
    job.exits(0, signal=SIGKILL, finished=5)
    assert job.spawned_now() == [0]
    assert strategies(job) == [Strategy.RECOVER_IN_PLACE]
    [incident] = journal.incidents(job.history)
    assert incident.cause.kind is Kind.PROCESS
    assert "rank 0" in incident.reason


def test_a_broken_link_alone_regroups_all_without_a_new_process() -> None:
    """When every process is there, only links can be broken: the step is done again."""
    job = trained(5, processes=3)
    job.fail_step(1)
    job.arrive(job.ranks, finished=5)
    assert strategies(job) == [Strategy.RETRY]
    assert set(sources(job).values()) == {Source.SELF}
    assert not job.spawned_now()


def test_damaged_memory_keeps_every_process() -> None:
    """The damaged rank takes over what a peer has; nobody is started or killed."""
    job = trained(5, processes=3)
    job.fail_step(1, kind=Kind.DEVICE_MEMORY)
    job.arrive([0, 2], finished=5)
    job.arrive([1], finished=5, torn=True)
    assert strategies(job) == [Strategy.RETRY]
    assert sources(job) == {0: Source.SELF, 1: Source.PEER, 2: Source.SELF}
    assert not job.spawned_now()


def test_damage_that_shows_itself_when_the_generation_is_over() -> None:
    """It is told as a part of the incident, though another fault began that."""
    job = trained(5, processes=3)
    job.exits(0, signal=SIGKILL, finished=5)
    job.fail_step(1, kind=Kind.DEVICE_MEMORY)
    job.fail_step(2)
    [incident] = journal.incidents(job.history)
    assert [fault.kind for fault in incident.faults] == [Kind.PROCESS, Kind.DEVICE_MEMORY]


def test_a_device_that_cannot_be_repaired_costs_the_process() -> None:
    """The rank that says so waits to be killed, and is started anew."""
    job = trained(5, processes=3)
    job.fail_step(1, kind=Kind.DEVICE_MEMORY)
    job.arrive([0, 2], finished=5)
    job.fail_step(1, kind=Kind.DEVICE)
    assert job.status(1) is Status.ENDING
    job.exits(1, signal=SIGKILL, finished=5)
    assert job.spawned_now() == [1]
    assert strategies(job) == [Strategy.RETRY, Strategy.RECOVER_IN_PLACE]


def test_links_that_never_hold_after_another_fault_end_the_job() -> None:
    """The limit holds as well where the incident began with something else."""
    job = trained(5)
    job.fail_step(1, kind=Kind.TRANSIENT)
    for _ in range(6):
        job.arrive([r for r in job.ranks if job.status(r) is Status.LEAVING], finished=5)
        if job.phase is Phase.RESTORING:
            job.ready(job.ranks)
            job.fail_step(1)
    assert job.phase is Phase.STOPPING


def test_a_step_cannot_fail_by_just_anything() -> None:
    """A kind that no rank can know of breaks the protocol."""
    with pytest.raises(ProtocolError, match="node-lost"):
        trained(5).fail_step(1, kind=Kind.NODE_LOST)


def test_links_that_fail_again_and_again_end_the_job() -> None:
    """Regrouping without a finished step between has a limit."""
    job = trained(5)
    for _ in range(4):
        job.fail_step(1)
        job.arrive([r for r in job.ranks if job.status(r) is Status.LEAVING], finished=5)
        if job.phase is Phase.RESTORING:
            job.ready(job.ranks)
    assert job.phase is Phase.STOPPING
    job.killed()
    assert job.outcome is False


def test_several_ranks_die_at_once() -> None:
    """Each dead rank is started once; one incident holds them all."""
    job = trained(5, nodes=2, processes=2)
    job.exits(0, signal=SIGKILL, finished=5)
    job.exits(1, signal=SIGKILL, finished=5)
    job.exits(2, signal=SIGKILL, finished=5)
    job.spawned()
    job.arrive([0, 1, 2])
    job.arrive([3], finished=5)
    assert sources(job) == dict.fromkeys((0, 1, 2), Source.PEER) | {3: Source.SELF}
    [incident] = journal.incidents(job.history)
    assert len(incident.faults) == 3


def test_the_death_of_all_ranks_leaves_the_snapshots() -> None:
    """Nobody lives: the newest snapshot in an agent's memory is what all go on from."""
    job = trained(12, nodes=2, processes=1)
    job.say(0, p.Snapshots(steps={0: 10}))
    for rank in job.ranks:
        job.exits(rank, signal=SIGKILL, finished=12)
    job.spawned()
    job.arrive(job.ranks)
    assert sources(job) == {0: Source.SNAPSHOT, 1: Source.PEER}
    formed = job.last(journal.Formed)
    assert (formed.step, formed.newest) == (10, 12)
    [incident] = journal.incidents(job.history)
    assert incident.steps_lost == 2


# ---- a second fault while the first is dealt with


def test_a_second_rank_dies_while_regrouping() -> None:
    """It joins the incident, is started as well, and one generation is formed."""
    job = trained(5, processes=3)
    job.exits(0, signal=SIGKILL, finished=5)
    job.spawned()
    job.arrive([1], finished=5)
    job.exits(1, signal=SIGKILL, finished=5)
    assert job.spawned_now() == [1]
    job.spawned()
    job.arrive([0, 1])
    job.arrive([2], finished=5)
    assert sources(job) == {0: Source.PEER, 1: Source.PEER, 2: Source.SELF}
    assert job.last(journal.Formed).generation == 2
    assert len(journal.incidents(job.history)) == 1


def test_the_new_rank_dies_before_it_arrives() -> None:
    """The process that replaces a dead one may die as well: another is started."""
    job = trained(5)
    job.exits(0, signal=SIGKILL, finished=5)
    job.spawned()
    job.exits(0, signal=SIGKILL, finished=5)
    assert job.spawned_now() == [0]


def test_a_second_rank_dies_while_restoring() -> None:
    """The formed generation is over, and the next plan does not count on the dead one."""
    job = trained(5, processes=3)
    job.exits(0, signal=SIGKILL, finished=5)
    job.spawned()
    job.arrive([0])
    job.arrive([1, 2], finished=5)
    job.ready([2])
    job.exits(1, signal=SIGKILL, finished=5)
    assert job.told(p.Over)[0].generation == 2
    assert job.spawned_now() == [1]
    job.spawned()
    job.arrive([0, 1])
    job.arrive([2], finished=5)
    assert sources(job) == {0: Source.PEER, 1: Source.PEER, 2: Source.SELF}
    assert job.told(p.Form)[0].generation == 3


def test_a_recovery_that_never_gets_to_a_step_ends_the_job() -> None:
    """A rank that dies each time before its step is not started for ever."""
    job = trained(5)
    for _ in range(4):
        job.exits(0, signal=SIGKILL, finished=5)
        job.spawned()
    assert strategies(job)[-1] is Strategy.FAIL
    assert job.phase is Phase.STOPPING


# ---- nodes


def test_a_lost_node_is_replaced_and_the_healthy_ranks_wait() -> None:
    """NodeWanted, Over to the others; the new agent's ranks are started and take live state."""
    job = trained(5, nodes=2, processes=2)
    job.lose(1)
    assert job.told(p.Over) == {0: p.Over(generation=1)}
    assert [wanted.node for wanted in job.recorded(journal.NodeWanted)] == [1]
    assert strategies(job) == [Strategy.RECOVER]
    assert "node" in job.timers
    assert not job.spawned_now()
    job.arrive([0, 1], finished=5)
    job.hello(1)
    assert job.spawned_now() == [2, 3]
    assert "node" not in job.timers
    job.spawned()
    job.arrive([2, 3])
    assert sources(job) == dict.fromkeys((0, 1), Source.SELF) | dict.fromkeys((2, 3), Source.PEER)


def test_the_node_of_the_store_is_lost() -> None:
    """Another node is asked for a new store, and the generation meets there."""
    job = trained(5, nodes=2, processes=1)
    job.lose(0)
    assert list(job.told(p.HostStore)) == [1]
    job.store_up(port=4713)
    job.hello(0)
    job.spawned()
    job.arrive([0])
    job.arrive([1], finished=5)
    form = job.told(p.Form)[1]
    assert (form.store_host, form.store_port) == ("10.0.0.1", 4713)


def test_a_dead_store_is_replaced_when_the_next_generation_needs_it() -> None:
    """While ranks train nobody misses the store; the next fault asks for another."""
    job = trained(5)
    job.say(0, p.StoreDown(serial=1))
    assert not job.commands
    job.exits(0, signal=SIGKILL, finished=5)
    assert job.told(p.HostStore)[0].serial == 2
    assert not job.spawned_now()
    job.store_up(port=4714)
    assert job.spawned_now() == [0]


def test_a_store_that_cannot_listen_fails_the_job() -> None:
    """A taken master port is told in the reason; nothing is started."""
    job = Driver()
    job.hello(0)
    job.store_up(port=0, error="port 29500: Address already in use")
    assert job.outcome is False
    assert "Address already in use" in job.last(journal.Ended).reason


def test_all_nodes_are_lost_and_come_back() -> None:
    """Nothing lives: all is started anew where it was, from the newest checkpoint."""
    job = trained(5, nodes=2, processes=1)
    job.say(0, p.CheckpointWritten(step=4, path="there"))
    job.lose(0)
    job.lose(1)
    job.hello(1, checkpoint=4)
    job.hello(0, checkpoint=4)
    job.store_up()
    assert job.spawned_now() == [0, 1]
    job.spawned()
    job.arrive(job.ranks)
    assert set(sources(job).values()) == {Source.CHECKPOINT}
    assert job.last(journal.Formed).step == 4


def test_no_node_comes_in_time() -> None:
    """A node that nobody brings ends the job with a reason that names it."""
    job = trained(5, nodes=2, processes=1)
    job.lose(1)
    job.fire("node")
    assert job.phase is Phase.STOPPING
    job.killed()
    assert job.outcome is False
    assert "node 1" in job.last(journal.Ended).reason


def test_no_node_comes_at_the_start() -> None:
    """A job whose nodes never come ends, and the reason says so."""
    job = Driver(nodes=2)
    job.hello(0)
    job.fire("node")
    assert job.outcome is False
    assert "no node came as node 1" in job.last(journal.Ended).reason


# ---- another coordinator


def take_over(job: Driver, *, dead: tuple[int, ...] = (), ended: tuple[int, ...] = ()) -> None:
    """The coordinator dies; all agents come to the next one, without these ranks."""
    generation = job.machine.generation
    job.lose_coordinator()
    for node in range(job.machine.spec.nodes):
        ranks = [r for r in job.ranks if job.node_of(r) == node and r not in (*dead, *ended)]
        live = tuple(p.LiveRank(rank=r, pid=job.pids[r], training=True) for r in ranks)
        mine = tuple(r for r in ended if job.node_of(r) == node)
        job.hello(node, generation=generation, ranks=live, ended=mine)


def test_another_coordinator_has_all_ranks_meet_again_with_what_they_have() -> None:
    """Nothing is started anew and no step is lost; generations and incidents go on rising."""
    job = trained(5, nodes=2, processes=2)
    take_over(job)
    assert job.phase is Phase.REGROUPING
    assert not job.unstarted
    assert "leave" in job.timers
    job.arrive([0, 1], finished=7)
    job.arrive([2, 3], finished=8)
    job.store_up()
    assert set(sources(job).values()) == {Source.SELF, Source.PEER}
    form = job.told(p.Form)[0]
    assert (form.generation, form.step) == (2, 8)
    job.ready(job.ranks)
    job.step(9)
    [incident] = journal.incidents(job.history)
    assert (incident.cause.kind, incident.strategy) == (Kind.COORDINATOR, Strategy.RETRY)
    assert (incident.closed, incident.steps_lost) == (True, 0)


def test_another_coordinator_starts_what_has_died_meanwhile() -> None:
    """A rank that no agent tells of is dead: it is started, with the state of a live one."""
    job = trained(5, processes=3)
    take_over(job, dead=(1,))
    job.store_up()
    assert job.spawned_now() == [1]
    job.spawned()
    job.arrive([1])
    job.arrive([0, 2], finished=5)
    assert sources(job) == {0: Source.SELF, 1: Source.PEER, 2: Source.SELF}


def test_another_coordinator_goes_on_with_the_incident_that_was_open() -> None:
    """The first fault and its decision are in the journal; the same incident is closed."""
    job = trained(5)
    job.exits(0, signal=SIGKILL, finished=5)
    take_over(job, dead=(0,))
    job.store_up()
    job.spawned()
    job.arrive([0])
    job.arrive([1], finished=5)
    job.ready(job.ranks)
    job.step(6)
    [incident] = journal.incidents(job.history)
    assert incident.closed
    assert incident.cause.kind is Kind.PROCESS


def test_another_coordinator_knows_the_restarts_that_are_used() -> None:
    """A budget is not renewed by the death of who keeps it."""
    job = trained(5, policy=Policy(max_restarts=1))
    job.raises(0)
    job.killed()
    job.store_up()
    job.spawned()
    job.form()
    job.step(6)
    take_over(job)
    assert job.machine.restarts == 1
    job.raises(1, "KeyError: 'another'")
    assert job.phase is Phase.STOPPING
    assert "1 of 1 restarts are used" in job.last(journal.Decided).reason


def test_another_coordinator_of_an_untouched_script_waits_for_its_end() -> None:
    """Ranks without a Session go on, those that ended well included: no incident, no start."""
    job = Driver(processes=3)
    job.start()
    job.exits(2, code=0)
    job.lose_coordinator()
    live = tuple(p.LiveRank(rank=rank, pid=job.pids[rank]) for rank in (0, 1))
    job.hello(0, ranks=live, ended=(2,))
    assert not job.unstarted
    job.exits(0, code=0)
    job.exits(1, code=0)
    assert job.outcome is True
    assert not journal.incidents(job.history)


def test_an_agent_that_does_not_come_to_another_coordinator_is_replaced() -> None:
    """It may have died at the same time: after a moment its node is wanted."""
    job = trained(5, nodes=2, processes=1)
    job.lose_coordinator()
    job.hello(0, generation=1, ranks=(p.LiveRank(rank=0, pid=job.pids[0], training=True),))
    job.fire("late")
    assert [wanted.node for wanted in job.recorded(journal.NodeWanted)] == [1]


@pytest.mark.parametrize("why", ["failed", "stopped"])
def test_another_coordinator_does_not_revive_a_job_that_was_ending(why: str) -> None:
    """The dead one had begun to end the job: the next one ends it, and starts nothing."""
    job = trained(5, processes=3)
    if why == "failed":
        job.raises(0)
    else:
        job.stop()
    take_over(job, dead=(0,))
    assert job.phase in (Phase.STOPPING, Phase.ENDED)
    assert not job.stores
    assert job.told(p.Refused)[-1].reason == "the job is ending"
    job.fire("late")
    assert job.phase is Phase.ENDED
    assert job.last(journal.Ended).outcome == why


# ---- the script's own errors


def test_an_exception_of_the_script_fails_the_job() -> None:
    """Without a restart budget the error of the script ends all ranks and is the reason."""
    job = trained(5, processes=3)
    job.raises(1, "ZeroDivisionError: division by zero")
    assert job.phase is Phase.STOPPING
    assert sorted(job.told(p.Kill)[0].ranks) == [0, 2]
    job.killed()
    assert job.outcome is False
    assert "ZeroDivisionError" in job.last(journal.Ended).reason
    assert job.told(p.Bye) == {0: p.Bye(status=1)}


def test_the_first_failing_rank_by_time_is_the_reason() -> None:
    """Ranks raise nearly at once, and the news comes in another order: the earliest counts."""
    job = trained(5, processes=3)
    job.raises(2, "ConnectionError: peer", at=1001.5)
    job.raises(0, "KeyError: 'first'", at=1000.5)
    job.raises(1, "ConnectionError: peer", at=1001.0)
    assert job.outcome is False
    assert "rank 0 raised KeyError: 'first'" in job.last(journal.Ended).reason
    [incident] = journal.incidents(job.history)
    assert incident.cause.rank == 0
    assert incident.cause.traceback


def test_the_error_of_one_rank_outweighs_the_broken_links_of_the_others() -> None:
    """Peers see the failure first as a broken link; the script's error is still the cause."""
    job = trained(5, processes=3)
    job.fail_step(0)
    job.fail_step(2)
    job.raises(1, "ValueError: bad batch")
    job.killed()
    assert "ValueError: bad batch" in job.last(journal.Ended).reason


def test_restarts_are_counted() -> None:
    """Each error of the script takes one restart; when none is left the job fails."""
    job = trained(5, policy=Policy(max_restarts=2))
    for number in (1, 2):
        job.raises(0, f"ValueError: try {number}")
        assert job.phase is Phase.RESTARTING
        job.killed()
        assert job.told(p.HostStore)[0].serial == number + 1
        job.store_up()
        assert {spawn.restart for spawn in job.told(p.Spawn).values()} == {number}
        assert job.spawned_now() == [0, 1]
        job.spawned()
        job.form()
        job.step(6 + number)
    job.raises(0, "ValueError: try 3")
    assert job.phase is Phase.STOPPING
    assert strategies(job) == [Strategy.RESTART, Strategy.RESTART, Strategy.FAIL]
    assert "2 of 2 restarts are used" in job.last(journal.Decided).reason


def test_the_same_error_after_a_restart_fails_the_job() -> None:
    """Same rank, same step, same error: another restart cannot help, whatever the budget."""
    job = trained(5, policy=Policy(max_restarts=5))
    for _ in range(2):
        job.raises(0, "ValueError: always")
        job.killed()
        if job.phase is Phase.GATHERING:
            job.store_up()
            job.spawned()
    assert strategies(job) == [Strategy.RESTART, Strategy.FAIL]
    assert job.outcome is False
    assert "the script is the likely cause" in job.last(journal.Decided).reason


def test_a_fault_during_a_restart_does_not_take_another() -> None:
    """Whoever dies while all are being ended has ended: the restart goes on."""
    job = trained(5, processes=3, policy=Policy(max_restarts=1))
    job.raises(0)
    job.exits(1, signal=SIGKILL)
    job.exits(2, signal=SIGKILL)
    assert job.phase is Phase.GATHERING
    assert strategies(job) == [Strategy.RESTART]


def test_a_node_is_lost_during_a_restart() -> None:
    """The restart waits for the node to be replaced, then starts all ranks."""
    job = trained(5, nodes=2, processes=1, policy=Policy(max_restarts=1))
    job.raises(0)
    job.lose(1)
    assert job.phase is Phase.GATHERING
    job.store_up()
    assert not job.spawned_now()
    job.hello(1)
    assert job.spawned_now() == [0, 1]


def test_the_time_limit_for_a_node_passes_during_a_restart() -> None:
    """A node that never comes ends the job also when its limit passes while ranks are ended."""
    job = trained(5, nodes=3, processes=1, policy=Policy(max_restarts=1))
    job.raises(0)
    job.lose(1)
    job.fire("node")
    job.killed()
    if job.phase is not Phase.ENDED:
        assert "node" in job.timers, "nobody waits for the node any more"
        job.fire("node")
    job.killed()
    assert job.outcome is False


def test_a_rank_that_cannot_be_started_fails_the_job() -> None:
    """What keeps a process from being started would keep it again: no restart is tried."""
    job = Driver(processes=2, policy=Policy(max_restarts=3))
    job.hello(0)
    job.store_up()
    job.fail_to_start([0])
    job.killed()
    assert job.outcome is False
    assert "cannot fork" in job.last(journal.Ended).reason


def test_ranks_that_cannot_be_started_do_not_keep_a_job_from_stopping() -> None:
    """A rank whose start fails while the job stops has ended."""
    job = Driver(processes=2)
    job.hello(0)
    job.store_up()
    job.stop()
    job.fail_to_start([0, 1])
    assert job.outcome is False
    assert job.last(journal.Ended).outcome == "stopped"


# ---- time limits


def test_a_rank_that_does_not_leave_its_step_is_replaced() -> None:
    """A healthy rank stuck in its collective is killed and started anew."""
    job = trained(5, processes=3)
    job.exits(0, signal=SIGKILL, finished=5)
    job.spawned()
    job.arrive([2], finished=5)
    job.fire("leave")
    assert job.told(p.Kill) == {0: p.Kill(ranks=(1,), grace_s=0.0)}
    job.killed()
    assert job.spawned_now() == [1]
    job.spawned()
    job.arrive([0, 1])
    assert sources(job) == {0: Source.PEER, 1: Source.PEER, 2: Source.SELF}
    assert job.last(journal.FaultSeen).fault.kind is Kind.STUCK


def test_a_started_rank_that_does_not_reach_its_session_is_replaced() -> None:
    """One rank of a Session job hangs before its Session: it is killed and started anew."""
    job = Driver(processes=2)
    job.train(5)
    job.exits(0, signal=SIGKILL, finished=5)
    job.spawned()
    job.arrive([1], finished=5)
    job.fire("join")
    assert job.told(p.Kill)[0].ranks == (0,)
    job.killed()
    assert job.spawned_now() == [0]
    assert "join" in job.timers


def test_a_rank_that_does_not_get_its_state_in_time() -> None:
    """A transfer that hangs ends the generation; all meet again, and the next one may succeed."""
    job = trained(5, processes=3)
    job.exits(0, signal=SIGKILL, finished=5)
    job.spawned()
    job.arrive([0])
    job.arrive([1, 2], finished=5)
    job.ready([1, 2])
    job.fire("join")
    assert job.told(p.Over)[0].generation == 2
    job.arrive([0])
    job.arrive([1, 2], finished=5)
    assert job.told(p.Form)[0].generation == 3
    job.ready(job.ranks)
    assert job.phase is Phase.TRAINING


def test_a_rank_that_ends_well_while_it_should_take_its_state() -> None:
    """Its time limit finds nobody to blame; the broken collective of the others does."""
    job = trained(5, processes=3)
    job.exits(0, signal=SIGKILL, finished=5)
    job.spawned()
    job.arrive([0])
    job.arrive([1, 2], finished=5)
    job.ready([1, 2])
    job.exits(0, code=0)
    job.fire("join")
    job.fail_step(1)
    job.killed()
    assert job.outcome is False
    assert "rank 0 ended with exit status 0 before" in job.last(journal.Ended).reason


def test_time_limits_are_off_while_ranks_train() -> None:
    """No limit of a regroup outlives it."""
    job = trained(5)
    job.exits(0, signal=SIGKILL, finished=5)
    job.spawned()
    assert {"leave", "join"} <= job.timers.keys()
    job.arrive([0])
    job.arrive([1], finished=5)
    job.ready(job.ranks)
    assert not {"leave", "join"} & job.timers.keys()


# ---- sources that fail


def test_a_snapshot_that_cannot_be_used_is_passed_over_for_the_checkpoint() -> None:
    """The rank says that its snapshot is broken: the next plan takes the checkpoint."""
    job = trained(12)
    job.say(0, p.Snapshots(steps={0: 10}))
    job.say(0, p.CheckpointWritten(step=8, path="there"))
    for rank in job.ranks:
        job.exits(rank, signal=SIGKILL, finished=12)
    job.spawned()
    job.arrive(job.ranks)
    assert sources(job)[0] is Source.SNAPSHOT
    job.ready([0], error="snapshot of step 10: checksum is wrong")
    assert job.told(p.Over)
    assert strategies(job)[-1] is Strategy.RECOVER_IN_PLACE  # the retry is the lighter one
    job.arrive(job.ranks)
    assert sources(job) == {0: Source.CHECKPOINT, 1: Source.CHECKPOINT}
    assert job.last(journal.Formed).step == 8
    job.ready(job.ranks)
    job.step(9)
    assert journal.incidents(job.history)[-1].steps_lost == 4


def test_a_source_that_failed_may_be_used_in_the_next_incident() -> None:
    """What was passed over is tried again once training went on: a newer one lies there."""
    job = trained(12, processes=1)
    job.say(0, p.Snapshots(steps={0: 10}))
    job.exits(0, signal=SIGKILL, finished=12)
    job.spawned()
    job.arrive([0])
    job.ready([0], error="broken")
    job.form()
    assert job.last(journal.Formed).sources == {"fresh": 1}
    job.step(1)
    job.say(0, p.Snapshots(steps={0: 20}))
    job.exits(0, signal=SIGKILL, finished=21)
    job.spawned()
    job.arrive([0])
    assert sources(job) == {0: Source.SNAPSHOT}


def test_a_checkpoint_that_cannot_be_written_does_not_disturb_training() -> None:
    """A full disk is an incident of its own, closed at once."""
    job = trained(5)
    job.say(0, p.CheckpointWritten(step=5, error="no space left on device"))
    assert job.phase is Phase.TRAINING
    [incident] = journal.incidents(job.history)
    assert incident.closed
    assert "no space left" in incident.reason


# ---- scripts without a Session


def test_an_untouched_script_runs_to_its_end() -> None:
    """Ranks that never arrive simply run; all ended well: the job has succeeded."""
    job = Driver(nodes=2, processes=1)
    job.start()
    job.exits(0, code=0)
    assert job.outcome is None
    job.exits(1, code=0)
    assert job.outcome is True
    assert job.told(p.Bye) == {0: p.Bye(status=0), 1: p.Bye(status=0)}
    assert not journal.incidents(job.history)


def test_an_untouched_script_is_restarted_as_a_whole() -> None:
    """One rank killed: all are ended and started anew, also one that had ended well."""
    job = Driver(processes=3, policy=Policy(max_restarts=1))
    job.start()
    job.exits(2, code=0)
    job.exits(0, signal=SIGKILL)
    assert sorted(job.told(p.Kill)[0].ranks) == [1]
    job.killed()
    job.store_up()
    assert job.spawned_now() == [0, 1, 2]
    job.spawned()
    [incident] = journal.incidents(job.history)
    assert incident.closed
    assert incident.strategy is Strategy.RESTART
    for rank in job.ranks:
        job.exits(rank, code=0)
    assert job.outcome is True


def test_an_untouched_script_is_never_late() -> None:
    """The limit to reach a Session does not hold for scripts that have none."""
    job = Driver()
    job.start()
    job.fire("join")
    assert not job.commands
    assert job.phase is Phase.REGROUPING


def test_a_lost_node_of_an_untouched_script_without_restarts_ends_the_job() -> None:
    """Nothing but a restart could help, and none is allowed."""
    job = Driver(nodes=2, processes=1)
    job.start()
    job.lose(1)
    assert job.phase is Phase.STOPPING
    assert not job.recorded(journal.NodeWanted), "an agent is asked for that nobody needs"
    job.killed()
    assert job.outcome is False
    assert "node 1" in job.last(journal.Ended).reason


# ---- the end


def test_ranks_are_dismissed_when_all_are_done() -> None:
    """All have finished all steps: Dismiss, and their exits make the job a success."""
    job = trained(9)
    job.arrive([0], finished=10, done=True)
    assert not job.told(p.Dismiss)
    job.arrive([1], finished=10, done=True)
    assert job.told(p.Dismiss) == {0: p.Dismiss(finished=10)}
    for rank in job.ranks:
        job.exits(rank, code=0, finished=10)
    assert job.outcome is True
    assert job.last(journal.Ended).finished == 10


def test_a_rank_dies_when_others_are_done_already() -> None:
    """Those who wait at the end give the dead one's successor its state; then all are let go."""
    job = trained(9, processes=3)
    job.arrive([0, 1], finished=10, done=True)
    job.exits(2, signal=SIGKILL, finished=9)
    assert job.spawned_now() == [2]
    job.spawned()
    job.arrive([2])
    assert sources(job) == {0: Source.SELF, 1: Source.SELF, 2: Source.PEER}
    assert job.last(journal.Formed).step == 10
    job.ready(job.ranks)
    job.arrive(job.ranks, finished=10, done=True)
    assert job.told(p.Dismiss)
    assert all(incident.closed for incident in journal.incidents(job.history))


def test_a_second_loop_of_steps_forms_again_after_the_dismissal() -> None:
    """A script may open another Session: the ranks arrive again and train on."""
    job = trained(9)
    job.arrive(job.ranks, finished=10, done=True)
    job.arrive(job.ranks)
    assert job.told(p.Form)[0].generation == 2


def test_a_rank_that_ends_well_too_early_is_the_scripts_error() -> None:
    """Exit 0 of one rank while others train: their broken collective is traced back to it."""
    job = trained(5, processes=3)
    job.exits(0, code=0, finished=5)
    assert job.phase is Phase.TRAINING
    job.fail_step(1)
    assert job.phase is Phase.STOPPING
    job.killed()
    assert job.outcome is False
    assert "rank 0 ended with exit status 0 before" in job.last(journal.Ended).reason


def test_a_rank_that_ends_well_while_others_wait_at_the_end() -> None:
    """Exit 0 of one rank and no collective left that could fail: the job still ends."""
    job = trained(9, processes=3)
    job.exits(0, code=0, finished=10)
    job.arrive([1, 2], finished=10, done=True)
    job.killed()
    assert job.outcome is False
    assert "rank 0 ended with exit status 0 before" in job.last(journal.Ended).reason


def test_a_rank_that_ends_well_after_the_others_wait_at_the_end() -> None:
    """The same in the other order."""
    job = trained(9, processes=3)
    job.arrive([1, 2], finished=10, done=True)
    job.exits(0, code=0, finished=10)
    job.killed()
    assert job.outcome is False


def test_a_rank_without_a_session_ends_while_its_peers_wait_at_theirs() -> None:
    """A script that opens its Session on some ranks only cannot train; the job says so."""
    job = Driver(processes=2)
    job.start()
    job.arrive([0])
    job.exits(1, code=0)
    job.killed()
    assert job.outcome is False
    assert "rank 1 ended with exit status 0 before" in job.last(journal.Ended).reason


def test_a_rank_that_ends_well_while_its_peers_regroup() -> None:
    """A rank that leaves the script instead of arriving is the script's error, too."""
    job = trained(5, processes=3)
    job.exits(2, signal=SIGKILL, finished=5)
    job.exits(0, code=0, finished=5)
    assert job.phase is Phase.STOPPING
    job.killed()
    assert job.outcome is False


# ---- stop


def test_stop_lets_the_ranks_end_in_peace() -> None:
    """SIGTERM with grace to all; the job ends, stopped, when the last has ended."""
    job = trained(5, nodes=2, processes=1)
    job.stop()
    assert {kill.grace_s > 0 for kill in job.told(p.Kill).values()} == {True}
    job.exits(0, code=0)
    assert job.outcome is None
    job.exits(1, signal=15)
    assert job.outcome is False
    assert job.last(journal.Ended).outcome == "stopped"
    assert not journal.incidents(job.history)


def test_stop_twice_kills_at_once() -> None:
    """The second stop does not wait for the grace of the first."""
    job = trained(5)
    job.stop()
    job.stop()
    assert not job.commands
    job.stop(at_once=True)
    assert job.told(p.Kill)[0].grace_s == 0
    job.killed()
    assert job.last(journal.Ended).outcome == "stopped"


@pytest.mark.parametrize("reached", ["nothing", "nodes", "store", "spawning", "regrouping"])
def test_stop_at_any_moment_of_the_start(reached: str) -> None:
    """Whatever has been started so far ends, and the job with it."""
    job = Driver()
    if reached != "nothing":
        job.hello(0)
    if reached in ("store", "spawning", "regrouping"):
        job.store_up()
    if reached == "regrouping":
        job.spawned()
    job.stop()
    job.killed()
    assert job.outcome is False
    assert job.last(journal.Ended).outcome == "stopped"


def test_stop_during_a_restart() -> None:
    """No rank is started any more."""
    job = trained(5, policy=Policy(max_restarts=1))
    job.raises(0)
    job.stop()
    job.killed()
    assert job.last(journal.Ended).outcome == "stopped"
    assert not job.unstarted


def test_a_node_lost_while_stopping_has_ended() -> None:
    """Nobody waits for ranks whose agent is gone."""
    job = trained(5, nodes=2, processes=1)
    job.stop()
    job.lose(1)
    job.exits(0, signal=15)
    assert job.outcome is False
    assert not job.recorded(journal.NodeWanted)


# ---- fences


def test_the_exit_of_an_earlier_process_changes_nothing() -> None:
    """An Exited with another pid than the rank's is not its exit."""
    job = trained(5)
    job.say(0, p.Exited(rank=0, pid=99, exit=Exit(signal=SIGKILL), finished=5))
    assert not job.commands
    assert job.phase is Phase.TRAINING


@pytest.mark.parametrize(
    "message",
    [
        p.StepFailed(rank=0, generation=1, kind=Kind.LINK, error="reset by peer", finished=99),
        p.StateReady(rank=0, generation=1),
        p.StateReady(rank=0, generation=1, error="nothing there"),
        p.StepDone(rank=0, generation=1, finished=99),
        p.StoreUp(serial=0, port=1),
        p.StoreDown(serial=0),
    ],
    ids=lambda message: type(message).__name__,
)
def test_news_of_an_earlier_generation_changes_nothing(message: p.Message) -> None:
    """What ranks said about a generation that is over does not touch the next."""
    job = trained(5)
    job.fail_step(0)
    job.arrive(job.ranks, finished=5)
    assert job.machine.generation == 2
    before = job.phase, job.machine.newest, [job.status(rank) for rank in job.ranks]
    job.say(0, message)
    assert not job.commands
    assert before == (job.phase, job.machine.newest, [job.status(rank) for rank in job.ranks])


def test_the_end_of_an_earlier_store_changes_nothing() -> None:
    """The store that was replaced is gone, as it should be; the new one still counts."""
    job = trained(5)
    job.say(0, p.StoreDown(serial=1))
    job.exits(0, signal=SIGKILL, finished=5)
    job.store_up()
    job.say(0, p.StoreDown(serial=1))
    job.exits(1, signal=SIGKILL, finished=5)
    assert not job.told(p.HostStore)
    assert job.spawned_now() == [1]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"attempt": 3}, "attempt"),
        ({"job_id": "another"}, "job"),
        ({"version": 0}, "wire version"),
        ({"processes": 7}, "processes per node"),
        ({"node": 5}, "does not exist"),
        ({"node": 0}, "taken"),
    ],
)
def test_an_agent_that_does_not_fit_is_refused(changes: dict[str, object], word: str) -> None:
    """The refusal says what does not fit; the job does not notice."""
    job = Driver(nodes=2)
    job.hello(0)
    node = changes.pop("node", 1)
    job.hello(node, **changes)  # type: ignore[arg-type]
    assert word in job.told(p.Refused)[-1].reason
    assert list(job.machine.roster.nodes) == [0]


def test_an_agent_too_many_is_refused() -> None:
    """Agents without a wish get the free seats, and none when all are taken."""
    job = Driver(nodes=2)
    job.hello()
    job.hello()
    assert sorted(job.machine.roster.nodes) == [0, 1]
    job.hello()
    assert "all 2 nodes are there" in job.told(p.Refused)[-1].reason


def test_no_agent_is_taken_in_by_a_job_that_ends() -> None:
    """An agent that comes too late is sent away, so that it ends."""
    job = trained(5)
    job.stop()
    job.hello(0)
    assert job.told(p.Refused)[-1].reason == "the job is ending"


# ---- any order of events

picks = st.integers(0, 10_000)


class Walk(RuleBasedStateMachine):
    """Faults of all kinds at any moment, and news and orders that are late.

    When no more faults come, the job always ends: it succeeds, or it fails within its budgets.
    (`Checks` of the driver holds the commands against what must never happen.)
    """

    world: World
    left = False  # a rank ended well where the script should have gone on

    @initialize(
        nodes=st.integers(1, 3),
        processes=st.integers(1, 3),
        max_restarts=st.integers(0, 2),
        max_recoveries=st.integers(0, 6),
        max_in_row=st.integers(1, 3),
    )
    def begin(self, nodes: int, processes: int, **limits: int) -> None:
        """A world of some size, with some budgets."""
        self.world = World(nodes=nodes, processes=processes, policy=Policy(**limits))

    def alive(self) -> bool:
        return self.world.outcome is None

    def moves(self) -> list[Callable[[], None]]:
        """What can go on by itself now."""
        world = self.world
        found: list[Callable[[], None]] = []
        for node, agent in world.agents.items():
            found += [lambda n=node: world.obey(n)] if agent.orders else []
            found += [lambda n=node: world.hear(n)] if agent.news and not agent.cut else []
            found += [lambda n=node: world.find_coordinator(n)] if agent.cut else []
        live = [rank for rank in world.processes if world.can_go_on(rank)]
        found += [lambda r=rank: world.go_on(r) for rank in live]
        absent = [] if world.phase is Phase.STOPPING else world.absent_nodes()
        return found + [lambda n=node: world.join(n) for node in absent]

    @rule(choices=st.lists(picks, min_size=1, max_size=30))
    def go_on(self, choices: list[int]) -> None:
        """Something goes on, in any order."""
        for pick in choices:
            moves = self.moves()
            if self.world.outcome is not None or not moves:
                return
            moves[pick % len(moves)]()

    @precondition(alive)
    @rule(pick=picks, way=st.sampled_from(["kill", "raise", "leave", "hang", "break", "restore"]))
    def break_a_rank(self, pick: int, way: str) -> None:
        """A rank dies, raises, ends too early, hangs, or fails in a collective or a restore."""
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
        """An agent is gone with its ranks."""
        nodes = sorted(self.world.agents)
        if nodes:
            self.world.lose(nodes[pick % len(nodes)])

    @precondition(alive)
    @rule(pick=picks)
    def let_a_limit_pass(self, pick: int) -> None:
        """A time limit passes."""
        names = sorted(self.world.timers)
        if names:
            self.world.fire(names[pick % len(names)])

    @precondition(alive)
    @rule()
    def lose_the_store(self) -> None:
        """The ranks' store dies, where it runs."""
        store = self.world.machine._store
        if store.is_up and store.node in self.world.agents:
            self.world.agents[store.node].news.append(p.StoreDown(serial=store.serial))

    @precondition(alive)
    @rule()
    def lose_the_coordinator(self) -> None:
        """The coordinator dies, and another one takes its place."""
        self.world.lose_coordinator()

    @precondition(alive)
    @rule(at_once=st.booleans(), sure=st.integers(0, 9))
    def stop(self, at_once: bool, sure: int) -> None:
        """Somebody stops the job; seldom, or no walk would get far."""
        if sure == 0:
            self.world.stop(at_once=at_once)

    def teardown(self) -> None:
        """Without further faults the job comes to its end, and tells a consistent story."""
        if not hasattr(self, "world"):
            return
        self.world.settle()
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
