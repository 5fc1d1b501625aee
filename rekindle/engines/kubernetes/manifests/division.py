"""Divide recovery between Rekindle and MindCluster, so that only one answers a fault. Pure.

The policy of the job decides about Rekindle's part, and the settings below `kubernetes` about
MindCluster's. No other place may set a label or annotation of recovery.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from rekindle.engines.kubernetes.manifests import ascend
from rekindle.engines.kubernetes.manifests.settings import KubernetesSettings
from rekindle.errors import UsageError
from rekindle.recovery.policy import dialect as words
from rekindle.recovery.policy.annotations import from_mindcluster
from rekindle.recovery.policy.dialect import Dialect
from rekindle.recovery.policy.policy import Policy, Strategy

# The setting of each label and annotation of MindCluster.
_SETTINGS = {
    words.PROCESS_RECOVER: "ascend.process_recover",
    words.FAULT_SCHEDULING: "ascend.fault_scheduling",
    words.FAULT_RETRY_TIMES: "ascend.fault_retry_times",
    words.POD_RESCHEDULING: "ascend.pod_rescheduling",
    words.RECOVER_STRATEGY: "recover_strategy",
    words.WAIT_RESCHEDULE: "ascend.wait_reschedule_timeout_s",
}
# Settings that let MindCluster recover the job, and their values that do not.
_HANDS_OVER: Mapping[str, tuple[object, ...]] = {
    "fault_scheduling": ("", "off"),
    "fault_retry_times": (None, 0),
    "pod_rescheduling": (False,),
    "process_recover": ("", "off"),
    "sub_healthy": ("", "ignore"),
    "wait_reschedule_timeout_s": (None,),
    "recover_policy_path": ("",),
}


def deciding(policy: Policy, pods: KubernetesSettings) -> Policy:
    """Return the part of the policy that Rekindle carries out.

    It lacks the strategies that MindCluster uses. Raises UsageError: the policy has the rules of
    another platform.
    """
    if not pods.by_mindcluster:
        return policy
    if policy.dialect is Dialect.MODELARTS:
        raise UsageError(
            "policy.dialect is modelarts, but kubernetes.recovery is mindcluster, and their rules "
            "contradict each other; keep one"
        )
    theirs = of_mindcluster(pods)
    kept = tuple(strategy for strategy in policy.strategies if strategy not in theirs)
    return msgspec.structs.replace(policy, strategies=kept, dialect=Dialect.MINDCLUSTER)


def check_division(pods: KubernetesSettings) -> None:
    """Check that each rule of recovery is in its place, and that one system recovers the job.

    Raises UsageError: another place has a label or annotation of recovery, or a setting lets
    MindCluster recover a job of Rekindle.
    """
    _check_places(pods)
    if not pods.by_mindcluster:
        _check_alone(pods)


def of_mindcluster(pods: KubernetesSettings) -> tuple[Strategy, ...]:
    """Return the strategies that MindCluster's labels and annotations let it use.

    A final checkpoint is not among them, because both may write one.
    """
    labels = ascend.job_labels(pods.ascend, process_level=pods.process_level)
    annotations = ascend.job_annotations(pods.ascend, pods.recover_strategy)
    found = from_mindcluster(labels, annotations, backoff_limit=pods.ascend.backoff_limit)
    return tuple(each for each in found.strategies if each is not Strategy.DUMP)


def _check_alone(pods: KubernetesSettings) -> None:
    """Check that nothing lets MindCluster recover a job that Rekindle recovers."""
    for name, harmless in _HANDS_OVER.items():
        value = getattr(pods.ascend, name)
        if value not in harmless:
            raise UsageError(
                f"ascend.{name} lets MindCluster recover the job, but kubernetes.recovery is "
                "rekindle; set recovery to mindcluster, or write the rule in the policy of the job"
            )


def _check_places(pods: KubernetesSettings) -> None:
    places = {"labels": pods.labels, "annotations": pods.annotations}
    patches = {"overrides": pods.overrides, "pod_overrides": pods.pod_overrides}
    for where, given in places.items():
        for key in given:
            _check_key(where, key)
    for where, patch in patches.items():
        for key in _labels_in(patch):
            _check_key(where, key)


def _labels_in(patch: Any) -> Iterator[str]:
    """Yield the labels and annotations in a patch, of the workload and of its pods."""
    if isinstance(patch, list):
        for each in patch:
            yield from _labels_in(each)
    if not isinstance(patch, dict):
        return
    for key, value in patch.items():
        if key in ("labels", "annotations") and isinstance(value, dict):
            yield from value
        else:
            yield from _labels_in(value)


def _check_key(where: str, key: str) -> None:
    if key.startswith(words.MODELARTS_PREFIX):
        raise UsageError(
            f"{where}: {key} is a rule of recovery, which only the policy of the job has; write it "
            "there (`rekindle policy FILE` prints the policy of an object with such annotations)"
        )
    if key in _SETTINGS:
        raise UsageError(
            f"{where}: {key} is a rule of recovery; write it in kubernetes.{_SETTINGS[key]}"
        )
