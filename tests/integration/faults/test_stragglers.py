"""Nodes that become slow while they train: real ranks, whose host's device gets slow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from checked.trouble import slow
from training_jobs.checks import assert_same_training
from training_jobs.job import Job, pause_all
from training_jobs.record import Record

from rekindle import names
from rekindle.profiling.findings import Slow
from rekindle.recovery import journal
from rekindle.recovery.fault import Kind
from rekindle.recovery.node_check.evidence import Limits
from rekindle.recovery.node_check.verdicts import Health
from rekindle.recovery.policy import Policy, Stragglers, Strategy
from rekindle.recovery.precision import Precision, precision
from rekindle.recovery.stragglers import Examined, Slowed

HELD = 1
STEPS = 260
PRODUCT_S, LONGER_S = 0.015, 0.06
BEGINS = 40  # the step from which on a host is slow, about
LIMITS = Limits(compute_factor=5.0, link_factor=5.0)  # two cores are never quiet
SLOW_HOST = "local-2"


@pytest.fixture
def slowing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Start a job of four nodes, one of which becomes slow; its ranks write down what they do."""
    monkeypatch.setenv(names.ENV_HOME, str(tmp_path / "home"))
    jobs: list[Job] = []

    def begin(policy: Policy, environment: dict[str, str], **world: object) -> Job:
        for name, value in (environment | {"PRODUCT_S": str(PRODUCT_S)}).items():
            monkeypatch.setenv(name, value)
        run = Job(
            tmp_path,
            *pause_all(HELD),
            variant="ddp",
            nodes=4,
            steps=STEPS,
            snapshot_every=50,
            hosts=True,
            policy=policy,
            **world,
        )
        jobs.append(run)
        run.start(node_check=LIMITS)
        run.wait_pause(HELD)
        run.profile("communication")
        run.release_all()
        run.wait_step(BEGINS, rank=0)
        return run

    yield begin
    for each in jobs:
        each.__exit__()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """The same training on one node, at full speed."""
    with Job(tmp_path_factory.mktemp("whole"), variant="ddp", steps=STEPS) as run:
        assert run.end().outcome == "succeeded", run.story()
    return run.record


def test_a_slow_node_is_replaced_between_two_steps(
    slowing: Callable[..., Job], uninterrupted: Record, tmp_path: Path
) -> None:
    """A spare takes its place; nobody else is replaced, and no step is lost."""
    begins = tmp_path / "slow-now"
    policy = Policy(stragglers=Stragglers.REPLACE, hang_timeout_s=60.0)
    run = slowing(policy, slow(SLOW_HOST, seconds=LONGER_S, begins=begins), spares=1)
    begins.touch()
    node = run.wait_event(journal.NodeJoined, host=SLOW_HOST).node
    # On a machine that does something else as well others may be slow for a while, for real.
    run.wait_event(Slowed, hosts=(SLOW_HOST,))
    said = [each.finding for each in run.events_of(Slowed, hosts=(SLOW_HOST,))]
    assert (Slow.RANK, (node,)) in [(each.kind, each.ranks) for each in said]
    run.wait_event(journal.Isolated, host=SLOW_HOST)
    assert run.end().outcome == "succeeded", run.story()
    verdicts = {each.host: each.verdict.health for each in run.events_of(Examined)}
    assert verdicts.pop(SLOW_HOST) is Health.STRAGGLER
    assert set(verdicts.values()) == {Health.HEALTHY}
    (incident,) = run.incidents()
    assert (incident.cause.kind, incident.strategies) == (Kind.STRAGGLER, [Strategy.RECOVER])
    assert incident.steps_lost == 0
    assert [len(run.record.lives(rank)) - 1 for rank in range(4)] == [r == node for r in range(4)]
    assert precision(run.events()).right == 1
    assert_same_training(run.record, uninterrupted)


def test_a_node_that_has_more_to_do_stays(
    slowing: Callable[..., Job], uninterrupted: Record, tmp_path: Path
) -> None:
    """Its check finds it healthy: what is slow is its rank's work, not its device."""
    begins = tmp_path / "slow-now"
    policy = Policy(stragglers=Stragglers.REPLACE, hang_timeout_s=60.0)
    more = {"MORE_RANK": "2", "MORE_S": str(LONGER_S), "MORE_FILE": str(begins)}
    run = slowing(policy, more, spares=1)
    begins.touch()
    run.wait_event(Examined, node=2)
    assert run.end().outcome == "succeeded", run.story()
    assert {each.verdict.health for each in run.events_of(Examined)} == {Health.HEALTHY}
    assert not run.incidents()
    assert not run.events_of(journal.Isolated)
    assert [len(run.record.lives(rank)) for rank in range(4)] == [1] * 4
    assert precision(run.events()) == Precision(wrong=1)
    assert_same_training(run.record, uninterrupted)
