"""Policies that are converted to ModelArts and MindCluster and back."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rekindle.errors import UsageError
from rekindle.recovery.policy import annotations as a
from rekindle.recovery.policy.policy import ALLOWABLE, Policy, Strategy
from rekindle.recovery.policy.policy_file import PolicyFormat, read_policy, write_policy

JOBS = {Strategy.RESCHEDULE_JOB, Strategy.RESCHEDULE_JOB_ISOLATED}
PROCESSES = {*a._RECOVERING.values()} - {Strategy.FAIL}  # MindCluster has words for these

counts = st.one_of(st.integers(0, 200), st.just(a.UNLIMITED))
policies = st.builds(
    Policy,
    strategies=st.lists(st.sampled_from(ALLOWABLE), unique=True).map(tuple),
    max_reschedules=counts,
    max_pod_reschedules=counts,
    unconditional=st.booleans(),
    max_reschedules_in_row=st.integers(0, 9),
    node_timeout_s=st.floats(1.0, 1000.0),
)
labels = st.fixed_dictionaries(
    {},
    optional={
        a.PROCESS_RECOVER: st.sampled_from(["on", "off", "pause"]),
        a.FAULT_SCHEDULING: st.sampled_from(["grace", "force", "off"]),
        a.FAULT_RETRY_TIMES: st.integers(0, 100).map(str),
        a.POD_RESCHEDULING: st.sampled_from(["on", "off"]),
    },
)
words = st.lists(st.sampled_from(["retry", "recover", "recover-in-place", "dump"]), unique=True)


def to_and_from_mindcluster(policy: Policy) -> Policy:
    """Write a policy for MindCluster, and read it again."""
    written, annotations, limit = a.to_mindcluster(policy)
    return a.from_mindcluster(written, annotations, backoff_limit=limit)


@given(policies)
def test_mindcluster_is_told_no_more_than_the_policy_says(policy: Policy) -> None:
    """The labels for MindCluster allow no more than the policy, except one reschedule.

    MindCluster recovers no process without a reschedule. It gets all strategies that it can
    express.
    """
    again = to_and_from_mindcluster(policy)
    assert set(again.strategies) & PROCESSES == set(policy.strategies) & PROCESSES
    job = policy.max_reschedules if JOBS & set(policy.strategies) else 0
    pod = policy.max_pod_reschedules if Strategy.RESCHEDULE_POD in policy.strategies else 0
    if job or pod:
        assert again.max_reschedules in (job or pod, 100)
        assert again.max_reschedules <= (job or pod)
    else:
        assert again.max_reschedules == bool(set(policy.strategies) & PROCESSES)
    assert (Strategy.RESCHEDULE_POD in again.strategies) is bool(pod)
    assert again.unconditional <= policy.unconditional
    assert a.to_mindcluster(again) == a.to_mindcluster(policy)


@given(labels, words, st.one_of(st.none(), st.integers(-1, 200)))
def test_what_mindcluster_says_goes_back_to_it(
    given_labels: dict[str, str], listed: list[str], backoff: int | None
) -> None:
    """Labels of MindCluster give the same policy after they are read, written and read again.

    An exception is process recovery without reschedules, which is written with one reschedule.
    """
    policy = a.from_mindcluster(
        given_labels, {a.RECOVER_STRATEGY: ",".join(listed)}, backoff_limit=backoff
    )
    again = to_and_from_mindcluster(policy)
    if policy.max_reschedules:
        again = msgspec.structs.replace(again, node_timeout_s=policy.node_timeout_s)
        assert again == policy
    else:
        assert again.max_reschedules <= 1


@given(policies)
def test_modelarts_is_told_no_more_than_the_policy_says(policy: Policy) -> None:
    """The annotations for ModelArts allow no more than the policy.

    Without a reschedule of jobs, the policy cannot be written.
    """
    if not policy.max_reschedules or not JOBS & set(policy.strategies):
        with pytest.raises(UsageError, match="only by placing it again"):
            a.to_modelarts(policy)
        return
    written = a.to_modelarts(policy)
    again = a.from_modelarts(written, policy)
    assert again.max_reschedules == min(policy.max_reschedules, 128)
    assert again.max_pod_reschedules <= policy.max_pod_reschedules
    assert again.unconditional <= policy.unconditional
    assert a.to_modelarts(again) == written


@pytest.mark.parametrize(
    ("retries", "backoff", "limit", "in_row"),
    [("3", 100, 3, 3), ("10", None, 10, 10), ("10", 4, 4, 4), (None, 100, 100, 3)],
)
def test_whichever_limit_is_reached_first(
    retries: str | None, backoff: int | None, limit: int, in_row: int
) -> None:
    """The lower of two limits applies. A script without a Session uses all retries of its label.

    It reports no steps, so all its retries are consecutive.
    """
    on = {a.FAULT_SCHEDULING: "force"} | ({a.FAULT_RETRY_TIMES: retries} if retries else {})
    policy = a.from_mindcluster(on, {}, backoff_limit=backoff)
    assert (policy.max_reschedules, policy.max_reschedules_in_row) == (limit, in_row)


def test_a_limit_without_retries_is_the_back_off_limit(tmp_path: Path) -> None:
    """A policy without retries is written with a back-off limit, and read the same from a file."""
    policy = Policy(max_reschedules=8, unconditional=False)
    path = tmp_path / "job.yaml"
    path.write_text(write_policy(policy, PolicyFormat.MINDCLUSTER))
    assert yaml.safe_load(path.read_text())["spec"] == {"runPolicy": {"backoffLimit": 8}}
    again = read_policy(path)
    assert (again.max_reschedules, again.unconditional) == (8, False)


def test_online_recovery_is_written_as_in_seed_000() -> None:
    """Process recovery is written with `fault-scheduling: force`."""
    written, annotations, _ = a.to_mindcluster(Policy(strategies=(Strategy.RETRY,)))
    assert written == {a.PROCESS_RECOVER: "on", a.FAULT_SCHEDULING: "force"}
    assert annotations[a.RECOVER_STRATEGY] == "retry"
