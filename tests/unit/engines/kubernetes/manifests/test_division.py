"""Who recovers a job in a cluster: each rule has one place, and each strategy one system."""

from __future__ import annotations

from typing import Any

import pytest
from rendered import rendered

from rekindle.blocks.job import TrainingJob
from rekindle.blocks.job_fields import left_to_mindcluster
from rekindle.errors import UsageError
from rekindle.recovery.policy.dialect import Dialect
from rekindle.recovery.policy.policy import ALLOWABLE, JOBS, Policy, Strategy

RETRY, RECOVER = Strategy.RETRY, Strategy.RECOVER


def described(**kubernetes: Any) -> TrainingJob:
    """Return a job as a file describes it."""
    pods = {"image": "i", "kind": "ascendjob"} | kubernetes
    policy = pods.pop("policy", {})
    return TrainingJob.model_validate(
        {"script": "a.py", "working_directory": "/a", "kubernetes": pods, "policy": policy}
    )


@pytest.mark.parametrize(
    ("settings", "taken"),
    [
        ({}, set()),
        ({"recovery": "mindcluster"}, set()),
        ({"recovery": "mindcluster", "recover_strategy": ["retry", "dump", "exit"]}, {RETRY}),
        (
            {
                "recovery": "mindcluster",
                "recover_strategy": ["recover"],
                "ascend": {"fault_scheduling": "force"},
            },
            {RECOVER, *JOBS},
        ),
        (
            {
                "recovery": "mindcluster",
                "ascend": {"fault_scheduling": "grace", "pod_rescheduling": True},
            },
            {Strategy.RESCHEDULE_POD, *JOBS},
        ),
        ({"recovery": "mindcluster", "ascend": {"fault_scheduling": "off"}}, set()),
        (
            {
                "recovery": "mindcluster",
                "recover_strategy": ["retry"],
                "ascend": {"process_recover": "pause"},
            },
            set(),
        ),
    ],
)
def test_rekindle_leaves_out_what_mindcluster_does(
    settings: dict[str, Any], taken: set[Strategy]
) -> None:
    """The policy that the coordinator gets lacks the strategies of MindCluster's labels."""
    job = described(**settings)
    policy = job.to_spec("a").policy
    assert set(policy.strategies) == set(ALLOWABLE) - taken
    by_mindcluster = settings.get("recovery") == "mindcluster"
    assert policy.dialect is (Dialect.MINDCLUSTER if by_mindcluster else Dialect.NONE)
    left = left_to_mindcluster(job.policy, job.kubernetes)
    assert {*filter(None, left.split(", "))} == {each.value for each in taken}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"annotations": {"fault-tolerance/job-retry-num": "8"}},
            "annotations: fault-tolerance/job-retry-num is a rule of recovery, which only",
        ),
        (
            {"labels": {"fault-scheduling": "force"}},
            "write it in kubernetes.ascend.fault_scheduling",
        ),
        ({"annotations": {"recover-strategy": "retry"}}, "write it in kubernetes.recover_strategy"),
        (
            {"overrides": {"metadata": {"labels": {"process-recover-enable": "on"}}}},
            "overrides: process-recover-enable is a rule of recovery",
        ),
        (
            {"pod_overrides": {"metadata": {"annotations": {"wait-reschedule-timeout": "30"}}}},
            "pod_overrides: wait-reschedule-timeout .* kubernetes.ascend.wait_reschedule_timeout_s",
        ),
        ({"ascend": {"fault_scheduling": "force"}}, "ascend.fault_scheduling lets MindCluster"),
        ({"ascend": {"fault_retry_times": 3}}, "ascend.fault_retry_times lets MindCluster recover"),
        ({"ascend": {"pod_rescheduling": True}}, "set recovery to mindcluster, or write the rule"),
        ({"ascend": {"process_recover": "on"}}, "ascend.process_recover lets MindCluster"),
        ({"ascend": {"sub_healthy": "graceExit"}}, "ascend.sub_healthy lets MindCluster"),
    ],
)
def test_each_rule_is_in_its_place(settings: dict[str, Any], words: str) -> None:
    """The form and the manifests refuse a rule elsewhere; the text names its place."""
    with pytest.raises(UsageError, match=words):
        rendered("ascendjob", **settings)
    with pytest.raises(ValueError, match=words):
        described(**settings)


def test_both_platforms_at_once_are_refused() -> None:
    """A policy with the rules of ModelArts does not fit a job that MindCluster recovers."""
    job = described(recovery="mindcluster", policy={"dialect": "modelarts"})
    with pytest.raises(UsageError, match="dialect is modelarts, but"):
        job.to_spec("a")


def test_other_settings_of_mindcluster_need_no_recovery_by_it() -> None:
    """A plain AscendJob of Rekindle may have labels that place its pods."""
    rendered("ascendjob", ascend={"fault_scheduling": "off", "accelerator": "ascend-910b"})
    assert described(policy={}).to_spec("a").policy == Policy()
