"""The coordinator's machine turns events into commands: from the start to one fault."""

from __future__ import annotations

import pytest
from jobs.driver import Driver
from jobs.trained import SIGKILL, sources, strategies, trained

from rekindle.coordinator.machine.job_state import Phase
from rekindle.coordinator.machine.roster import Status
from rekindle.errors import ProtocolError
from rekindle.protocol import agent as p
from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.plan import StateSource
from rekindle.recovery.policy.policy import Policy, Strategy

# ---- from the start to the first step


def test_ranks_are_started_when_all_nodes_are_there_and_the_store_is_up() -> None:
    """Ranks start after all agents have joined and one of them hosts the store."""
    job = Driver(nodes=2, processes=2)
    job.hello(1)
    assert job.sent_by_node(p.Welcome) == {1: p.Welcome(node=1)}
    job.hello(0)
    assert list(job.sent_by_node(p.HostStore)) == [0]
    assert not job.spawned_now()
    job.store_up(port=4711)
    assert job.spawned_now() == [0, 1, 2, 3]
    spawn = job.sent_by_node(p.Spawn)[1]
    assert (spawn.ranks, spawn.store_port, spawn.restart) == ((2, 3), 4711, 0)
    assert "node" not in job.timers


def test_from_the_start_to_the_first_step() -> None:
    """When all ranks have arrived, one generation forms.

    When all have their state, training starts.
    """
    job = Driver(nodes=2, processes=1)
    job.start()
    assert job.phase is Phase.REGROUPING
    job.arrive([0])
    assert not job.sent_by_node(p.FormGeneration)
    job.arrive([1])
    assert set(sources(job).values()) == {StateSource.FRESH}
    assert {form.generation for form in job.sent_by_node(p.FormGeneration).values()} == {1}
    job.ready([0])
    assert job.phase is Phase.RESTORING
    job.ready([1])
    assert job.phase is Phase.TRAINING
    job.step(1)
    first = job.last(journal.FirstStep)
    assert (first.generation, first.step, first.incident) == (1, 1, 0)
    assert not job.timers.keys() & {"leave", "join", "node"}


def test_a_heartbeat_arrives_before_the_report_of_the_first_step() -> None:
    """The job keeps the finished steps of the heartbeat, and counts from there what a fault costs.

    A script with short steps finishes several of them before its agent forwards that report.
    """
    job = Driver(nodes=2, processes=1)
    job.start()
    job.form()
    for node in (0, 1):
        job.say(node, p.Heartbeat(finished={node: 3}))
    job.step(1)
    assert [rank.finished for rank in job.machine.job.roster.ranks] == [3, 3]
    assert job.last(journal.FirstStep).step == 1
    job.lose(1)
    assert job.last(journal.Decided).newest == 3
    [over] = job.sent_by_node(p.GenerationEnded).values()
    assert over.finished == 3


def test_ranks_load_an_older_state_than_planned() -> None:
    """The job counts from the state that the ranks have: MindIO's handlers may load an older one.

    A fault in that generation has these steps, and not those of the plan.
    """
    job = trained(10)
    job.fail_step(1, kind=FaultKind.TRANSIENT)
    job.arrive(job.ranks, finished=10)
    assert set(sources(job).values()) == {StateSource.SELF}
    for rank in job.ranks:
        job.say(0, p.StateReady(rank=rank, generation=2, finished=4))
    job.step(5)
    job.say(0, p.Heartbeat(finished={0: 6, 1: 6}))
    assert [rank.finished for rank in job.machine.job.roster.ranks] == [6, 6]
    job.fail_step(1, kind=FaultKind.TRANSIENT)
    assert job.last(journal.Decided).newest == 6
    assert job.sent_by_node(p.GenerationEnded)[0].finished == 6


def test_generations_go_on_from_those_of_earlier_attempts() -> None:
    """A later attempt never repeats a generation number of an earlier attempt."""
    job = Driver(attempt=2, generation=7)
    job.start()
    job.arrive(job.ranks)
    assert job.sent_by_node(p.FormGeneration)[0].generation == 8


def test_ranks_that_arrive_before_the_store_is_up_wait_for_it() -> None:
    """If the store is down when all ranks have arrived, the generation waits for a new store."""
    job = Driver()
    job.start()
    job.say(0, p.StoreDown(serial=1))
    job.arrive(job.ranks)
    assert not job.sent_by_node(p.FormGeneration)
    assert job.sent_by_node(p.HostStore)[0].serial == 2
    job.store_up(port=4712)
    assert job.sent_by_node(p.FormGeneration)[0].store_port == 4712


def test_a_node_that_is_late_is_asked_for_again() -> None:
    """The job requests only the agents that have not arrived in time."""
    job = Driver(nodes=2)
    job.hello(1)
    job.fire("late")
    assert [wanted.node for wanted in job.recorded(journal.NodeWanted)] == [0]


# ---- one fault


def test_a_killed_rank_is_started_anew_and_the_others_keep_their_state() -> None:
    """After SIGKILL of one rank, only that rank restarts and gets its state from a live peer."""
    job = trained(5, nodes=2, processes=2)
    job.exits(3, signal=SIGKILL, finished=5)
    cause = p.Cause(kind="process", ranks=(3,))
    over = p.GenerationEnded(generation=1, finished=5, process_lost=True, cause=cause)
    assert job.sent_by_node(p.GenerationEnded) == {0: over, 1: over}
    assert job.spawned_now() == [3]
    assert job.sent_by_node(p.Spawn)[1].joins_running_ranks
    assert strategies(job) == [Strategy.RECOVER_IN_PLACE]
    job.spawned()
    job.arrive([0, 1, 2], finished=5)
    assert not job.sent_by_node(p.FormGeneration)
    job.arrive([3])
    assert sources(job) == dict.fromkeys((0, 1, 2), StateSource.SELF) | {3: StateSource.PEER}
    assert {(f.generation, f.step) for f in job.sent_by_node(p.FormGeneration).values()} == {(2, 5)}
    job.ready(job.ranks)
    job.step(6)
    first = job.last(journal.FirstStep)
    assert (first.generation, first.step, first.incident) == (2, 6, 1)
    assert job.last(journal.Formed).sources == {"self": 3, "peer": 1}


def test_a_rank_one_step_behind_takes_the_newest_state() -> None:
    """Ranks without the last step take it from a rank that finished it, so no step is lost."""
    job = trained(5, processes=3)
    job.exits(0, signal=SIGKILL, finished=5)
    job.spawned()
    job.arrive([1], finished=6)
    job.arrive([2], finished=5)
    job.arrive([0])
    assert sources(job) == {0: StateSource.PEER, 1: StateSource.SELF, 2: StateSource.PEER}
    assert job.last(journal.Formed).step == 6


def test_a_torn_rank_takes_its_state_from_another() -> None:
    """A rank that stopped inside its update takes its state from a peer."""
    job = trained(5, processes=3)
    job.exits(0, signal=SIGKILL, finished=5)
    job.spawned()
    job.arrive([0])
    job.arrive([1], finished=5, torn=True)
    job.arrive([2], finished=5)
    assert sources(job)[1] is StateSource.PEER


def test_a_collective_fails_before_the_exit_is_known() -> None:
    """A peer's error ends the generation. The exit that follows decides the strategy."""
    job = trained(5, processes=3)
    job.fail_step(1)
    assert job.sent_by_node(p.GenerationEnded)
    assert not strategies(job)
    job.exits(0, signal=SIGKILL, finished=5)
    assert job.spawned_now() == [0]
    assert strategies(job) == [Strategy.RECOVER_IN_PLACE]
    [incident] = journal.incidents(job.history)
    assert incident.cause.kind is FaultKind.PROCESS
    assert "rank 0" in incident.reason


def test_a_broken_link_alone_regroups_all_without_a_new_process() -> None:
    """If all processes are present, only links can be broken, and the ranks repeat the step."""
    job = trained(5, processes=3)
    job.fail_step(1)
    job.arrive(job.ranks, finished=5)
    assert strategies(job) == [Strategy.RETRY]
    assert set(sources(job).values()) == {StateSource.SELF}
    assert not job.spawned_now()


def test_damaged_memory_keeps_every_process() -> None:
    """A rank with damaged memory takes a peer's state, and every process continues."""
    job = trained(5, processes=3)
    job.fail_step(1, kind=FaultKind.DEVICE_MEMORY)
    job.arrive([0, 2], finished=5)
    job.arrive([1], finished=5, torn=True)
    assert strategies(job) == [Strategy.RETRY]
    assert sources(job) == {0: StateSource.SELF, 1: StateSource.PEER, 2: StateSource.SELF}
    assert not job.spawned_now()


def test_damage_that_shows_itself_when_the_generation_is_over() -> None:
    """Damage that a rank reports after the end of the generation joins the open incident."""
    job = trained(5, processes=3)
    job.exits(0, signal=SIGKILL, finished=5)
    job.fail_step(1, kind=FaultKind.DEVICE_MEMORY)
    job.fail_step(2)
    [incident] = journal.incidents(job.history)
    assert [fault.kind for fault in incident.faults] == [FaultKind.PROCESS, FaultKind.DEVICE_MEMORY]


def test_a_device_that_cannot_be_repaired_costs_the_process() -> None:
    """A rank that cannot repair its device is killed and restarted."""
    job = trained(5, processes=3)
    job.fail_step(1, kind=FaultKind.DEVICE_MEMORY)
    job.arrive([0, 2], finished=5)
    job.fail_step(1, kind=FaultKind.DEVICE)
    assert job.status(1) is Status.ENDING
    job.exits(1, signal=SIGKILL, finished=5)
    assert job.spawned_now() == [1]
    assert strategies(job) == [Strategy.RETRY, Strategy.RECOVER_IN_PLACE]


def test_links_that_never_hold_after_another_fault_end_the_job() -> None:
    """The limit for broken links also applies if the incident started with another fault."""
    job = trained(5)
    job.fail_step(1, kind=FaultKind.TRANSIENT)
    for _ in range(6):
        job.arrive([r for r in job.ranks if job.status(r) is Status.LEAVING], finished=5)
        if job.phase is Phase.RESTORING:
            job.ready(job.ranks)
            job.fail_step(1)
    assert job.phase is Phase.STOPPING


def test_a_step_cannot_fail_by_just_anything() -> None:
    """A rank that reports a kind of fault that it cannot detect breaks the protocol."""
    with pytest.raises(ProtocolError, match="node-lost"):
        trained(5).fail_step(1, kind=FaultKind.NODE_LOST)


def test_links_that_fail_again_and_again_end_the_job() -> None:
    """Regroups without a finished step in between have a limit, after which the job fails."""
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
    """Each dead rank starts once, and one incident contains all faults."""
    job = trained(5, nodes=2, processes=2)
    job.exits(0, signal=SIGKILL, finished=5)
    job.exits(1, signal=SIGKILL, finished=5)
    job.exits(2, signal=SIGKILL, finished=5)
    job.spawned()
    job.arrive([0, 1, 2])
    job.arrive([3], finished=5)
    assert sources(job) == dict.fromkeys((0, 1, 2), StateSource.PEER) | {3: StateSource.SELF}
    [incident] = journal.incidents(job.history)
    assert len(incident.faults) == 3


def test_the_death_of_all_ranks_leaves_the_snapshots() -> None:
    """If all ranks die, they resume from the newest snapshot in an agent's memory."""
    job = trained(12, nodes=2, processes=1)
    job.say(0, p.Snapshots(kept={0: ((10, 1),)}))
    for rank in job.ranks:
        job.exits(rank, signal=SIGKILL, finished=12)
    job.spawned()
    job.arrive(job.ranks)
    assert sources(job) == {0: StateSource.SNAPSHOT, 1: StateSource.PEER}
    formed = job.last(journal.Formed)
    assert (formed.step, formed.newest) == (10, 12)
    [incident] = journal.incidents(job.history)
    assert incident.steps_lost == 2


def test_a_rank_whose_code_stands_at_another_step_gets_a_new_process() -> None:
    """The plan has the newest state, and the new process needs no decision, so no budget."""
    job = trained(5, nodes=3, processes=1)
    job.exits(0, signal=SIGKILL, finished=5)
    job.spawned()
    job.arrive([0])
    job.arrive([1], finished=5, stands=5)
    job.arrive([2], finished=6, stands=6)
    assert not job.sent_by_node(p.FormGeneration)
    assert job.sent_by_node(p.Kill)[1].ranks == (1,)
    decided = len(strategies(job))
    job.killed()
    job.spawned()
    job.arrive([1])
    assert sources(job) == {0: StateSource.PEER, 1: StateSource.PEER, 2: StateSource.SELF}
    assert job.last(journal.Formed).step == 6
    assert len(strategies(job)) == decided


def test_whoever_was_to_join_ranks_that_died_begins_by_itself() -> None:
    """A process that started without its own state is replaced if no live rank can give it one."""
    job = trained(5, nodes=2, processes=1)
    job.exits(0, signal=SIGKILL, finished=5)
    assert job.sent_by_node(p.Spawn)[0].joins_running_ranks
    job.spawned()
    job.exits(1, signal=SIGKILL, finished=5)
    assert not job.sent_by_node(p.Spawn)[1].joins_running_ranks  # the other rank has just started
    job.spawned()
    job.arrive([0], needs_peer=True)
    job.arrive([1])
    assert not job.sent_by_node(p.FormGeneration)
    assert job.sent_by_node(p.Kill)[0].ranks == (0,)
    job.killed()
    assert not job.sent_by_node(p.Spawn)[0].joins_running_ranks  # rank 1 waits and is also new
    job.spawned()
    job.arrive([0])
    assert sources(job) == dict.fromkeys((0, 1), StateSource.FRESH)


def test_nobody_joins_anybody_when_all_are_started_anew() -> None:
    """No rank expects the state of a live rank at the first start or after a restart of the job."""
    inner = (Strategy.RECOVER_IN_PLACE, Strategy.RECOVER)
    policy = Policy(
        strategies=tuple(each for each in Policy().strategies if each not in inner), max_restarts=1
    )
    job = Driver(nodes=1, processes=2, policy=policy)
    job.hello()
    job.store_up()
    assert not job.sent_by_node(p.Spawn)[0].joins_running_ranks
    job.spawned()
    job.arrive(job.ranks)
    job.ready(job.ranks)
    job.step(1)
    job.exits(0, signal=SIGKILL, finished=1)
    assert strategies(job) == [Strategy.RESTART]
    job.killed()
    job.store_up()
    assert not job.sent_by_node(p.Spawn)[0].joins_running_ranks
