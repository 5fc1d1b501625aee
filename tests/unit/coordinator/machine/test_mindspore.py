"""MindSpore ranks: they are repaired in their processes, or all ranks restart."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import msgspec
import pytest
from jobs.driver import Driver, spec_of
from jobs.trained import SIGKILL, sources, strategies, trained

from rekindle.coordinator.machine.job_state import Phase
from rekindle.errors import UsageError
from rekindle.job.spec import EntryKind, Framework, check, check_elsewhere
from rekindle.protocol import agent as p
from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.plan import StateSource
from rekindle.recovery.policy.policy import Policy, Strategy

POLICY = Policy(max_restarts=2)


def trains(**world: object) -> Driver:
    """Return a job of MindSpore that trains."""
    return trained(framework=Framework.MINDSPORE, policy=POLICY, **world)


def fails(job: Driver, rank: int, kind: FaultKind) -> None:
    """Let a rank report that its step failed."""
    message = p.StepFailed(
        rank=rank, generation=job.machine.job.generation, kind=kind, error="broken", finished=1
    )
    job.say(job.node_of(rank), message)


def test_ranks_are_told_where_all_others_are_reached() -> None:
    """Each rank gets the addresses of all ranks in world order, unless a rank reports no port."""
    job = Driver(nodes=2, processes=2, framework=Framework.MINDSPORE)
    job.start()
    for rank in job.ranks:
        job.arrive([rank], port=7000 + rank)
    forms = job.sent_by_node(p.FormGeneration)
    hosts = [job.machine.job.roster.nodes[node].address for node in (0, 0, 1, 1)]
    assert forms[0].peers == forms[1].peers == tuple(zip(hosts, range(7000, 7004), strict=True))
    job = Driver(processes=2)
    job.start()
    job.arrive([0], port=7000)
    job.arrive([1])
    assert job.sent_by_node(p.FormGeneration)[0].peers == ()


@pytest.mark.parametrize("kind", [FaultKind.DEVICE_MEMORY, FaultKind.TRANSIENT])
def test_what_leaves_the_process_is_repaired_there(kind: FaultKind) -> None:
    """A rank that can repair its fault takes its state from a peer, and no process starts."""
    job = trains()
    fails(job, 0, kind)
    assert strategies(job) == [Strategy.RETRY]
    assert job.sent_by_node(p.GenerationEnded)
    torn = kind is FaultKind.DEVICE_MEMORY
    job.arrive([0], 1, torn=torn)
    job.arrive([1], 1)
    assert sources(job)[0] is (StateSource.PEER if torn else StateSource.SELF)
    assert not job.sent_by_node(p.Spawn)


def test_a_lost_rank_costs_all_processes() -> None:
    """A new process cannot join the others' collectives, so all ranks restart.

    They get a new scheduler.
    """
    job = trains()
    before = job.machine.job.store.serial
    job.exits(1, signal=SIGKILL, finished=1)
    assert strategies(job) == [Strategy.RESTART]
    assert "a new process cannot join" in job.last(journal.Decided).reason
    assert job.phase is Phase.RESTARTING
    job.killed()
    assert job.sent_by_node(p.HostStore)[0].serial == before + 1
    job.store_up()
    assert job.spawned_now() == [0, 1]


@pytest.mark.parametrize("framework", Framework)
def test_the_next_coordinator_and_the_store(framework: Framework) -> None:
    """After a takeover, MindSpore's live ranks keep their scheduler. PyTorch's get a new store."""
    job = trained(framework=framework, policy=POLICY)
    store = p.LiveStore(serial=job.machine.job.store.serial, port=7001)
    job.lose_coordinator()
    alive = tuple(p.LiveRank(rank=rank, pid=job.pids[rank], training=True) for rank in job.ranks)
    job.hello(0, generation=1, ranks=alive, store=store)
    job.arrive(job.ranks, 1)
    if framework is Framework.TORCH:
        (order,) = job.sent_by_node(p.HostStore).values()
        assert order.serial > store.serial
        return
    assert not job.sent_by_node(p.HostStore)
    assert {
        (form.step, form.store_port) for form in job.sent_by_node(p.FormGeneration).values()
    } == {(1, 7001)}
    job.ready(job.ranks)
    job.say(0, p.StoreDown(serial=store.serial))
    assert strategies(job)[-1] is Strategy.RESTART
    job.killed()
    assert job.sent_by_node(p.HostStore)[0].serial > store.serial


def test_the_host_of_the_scheduler_comes_last() -> None:
    """The next coordinator waits for the host of the scheduler and ignores other schedulers."""
    job = trained(nodes=2, processes=1, framework=Framework.MINDSPORE, policy=POLICY)
    store = p.LiveStore(serial=job.machine.job.store.serial, port=7001)
    job.lose_coordinator()
    for node in (1, 0):
        alive = (p.LiveRank(rank=node, pid=job.pids[node], training=True),)
        job.hello(node, generation=1, ranks=alive, store=None if node else store)
    assert not job.sent_by_node(p.HostStore)
    job.say(1, p.StoreUp(serial=store.serial, port=7002))
    job.arrive(job.ranks, 1)
    assert {form.store_port for form in job.sent_by_node(p.FormGeneration).values()} == {7001}
    job.ready(job.ranks)
    job.say(1, p.StoreDown(serial=store.serial))
    assert job.phase is Phase.TRAINING


def test_a_lost_node_costs_all_processes_too() -> None:
    """If a node of a MindSpore job is lost, all ranks restart."""
    job = trains(nodes=2)
    job.lose(1)
    assert strategies(job) == [Strategy.RESTART]


def test_a_scheduler_that_ends_costs_all_processes() -> None:
    """If MindSpore's scheduler ends, all ranks restart, because MindSpore would end them.

    Ranks of PyTorch do not need the store while they train.
    """
    job = trains()
    serial = job.machine.job.store.serial
    job.say(0, p.StoreDown(serial=serial - 1))
    assert strategies(job) == []
    job.say(0, p.StoreDown(serial=serial))
    assert strategies(job) == [Strategy.RESTART]
    assert job.last(journal.FaultSeen).fault.message == "the scheduler of mindspore has ended"
    calm = trained(policy=POLICY)
    calm.say(0, p.StoreDown(serial=calm.machine.job.store.serial))
    assert strategies(calm) == []


def test_its_world_does_not_change() -> None:
    """A range of nodes is refused before the job starts."""
    spec = spec_of(nodes=2, processes=1, framework=Framework.MINDSPORE, min_nodes=1)
    absolute = {"working_directory": "/", "directory": "/d", "checkpoint_store": "/c"}
    with pytest.raises(UsageError, match="a world of mindspore cannot change its size"):
        check_elsewhere(msgspec.structs.replace(spec, **absolute))


@pytest.mark.parametrize(("missing", "other"), [("torch", "mindspore"), ("mindspore", "torch")])
def test_a_framework_that_is_not_there_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str, other: str
) -> None:
    """A job whose framework is not installed is refused, except a program that may not need it."""
    (tmp_path / "train.py").touch()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    spec = spec_of(nodes=1, processes=1, framework=Framework(missing))
    absolute = {"working_directory": str(tmp_path), "directory": "/d", "checkpoint_store": "/c"}
    spec = msgspec.structs.replace(spec, target="train.py", **absolute)
    with pytest.raises(
        UsageError, match=f"is {missing}, but .* does not have it.* --framework {other}"
    ):
        check(spec)
    if missing == "torch":
        program = msgspec.structs.replace(spec, entry=EntryKind.PROGRAM)
        assert check(program) == program
