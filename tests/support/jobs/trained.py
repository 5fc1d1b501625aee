"""A training job of simulated ranks, and queries about it."""

from __future__ import annotations

from jobs.driver import Driver
from rekindle.coordinator.machine.job_state import Phase
from rekindle.protocol import agent as p
from rekindle.recovery.faults import classification as c
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.plan import StateSource
from rekindle.recovery.policy.policy import Policy, Strategy

SIGKILL = 9


def trained(finished: int = 1, **world: object) -> Driver:
    """Return a job whose ranks have all finished this many steps."""
    job = Driver(**world)
    job.train(finished)
    assert job.phase is Phase.TRAINING
    return job


def sources(job: Driver) -> dict[int, StateSource]:
    """Return the source of each rank's state, from the last commands."""
    forms = job.sent_by_node(p.FormGeneration)
    return {rank: plan.source for form in forms.values() for rank, plan in form.plan.items()}


def strategies(job: Driver) -> list[Strategy]:
    """Return the strategies of all decisions so far."""
    return [decided.strategy for decided in job.recorded(journal.Decided)]


def untouched(policy: Policy, *, devices: bool = False, **world: object) -> Driver:
    """Return a job of a script without a Session: its ranks run and send no messages."""
    job = Driver(policy=policy, **world)
    for node in range(job.machine.job.spec.nodes):
        job.hello(node, devices=devices)
    job.store_up()
    job.spawned()
    return job


def report(job: Driver, source: c.EventSource, what: str, *, node: int = 0, **more: object) -> str:
    """Report a health event, and return the reason of a refusal."""
    refused = job.machine.health.on_health_event(
        c.HealthEvent(source=source, what=what, node=node, **more), job.now
    )
    job.collect()
    return refused


def take_over(
    job: Driver,
    *,
    dead: tuple[int, ...] = (),
    ended: tuple[int, ...] = (),
    training: bool = True,
) -> None:
    """Replace the coordinator, and connect all agents to the new one.

    `dead`, `ended`: ranks without a process; `ended` ranks finished the script. training: whether
    the others have a Session.
    """
    generation, restart = job.machine.job.generation, job.machine.job.restarts
    hosts = {node.node: node.host for node in job.machine.job.roster.nodes.values()}
    job.lose_coordinator()
    for node in range(job.machine.job.spec.nodes):
        ranks = [r for r in job.ranks if job.node_of(r) == node and r not in (*dead, *ended)]
        live = tuple(p.LiveRank(rank=r, pid=job.pids[r], training=training) for r in ranks)
        mine = tuple(r for r in ended if job.node_of(r) == node)
        more = {"host": hosts[node]} if node in hosts else {}
        job.hello(node, generation=generation, restart=restart, ranks=live, ended=mine, **more)
