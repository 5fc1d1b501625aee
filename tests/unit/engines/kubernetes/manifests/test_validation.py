"""Refused settings: the error has the field and the valid values."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from rendered import pods, rendered, spec

from rekindle.engines.kubernetes.manifests.ascend import Ascend
from rekindle.engines.kubernetes.manifests.settings import KubernetesSettings
from rekindle.engines.kubernetes.manifests.validation import check_pods
from rekindle.errors import UsageError
from rekindle.recovery.policy.policy import Policy


def volume(name: str = "data", mount_path: str = "/data", **others: Any) -> dict[str, Any]:
    """Return a volume in the form of a job file."""
    return {"name": name, "mount_path": mount_path} | others


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"image": ""}, "image is ''; name the image that holds the training script"),
        ({"image": "a b"}, "image is 'a b'; name the image"),
        ({"namespace": "My"}, "namespace is 'My'; use at most 63 of a-z 0-9 -"),
        ({"service_account": "A"}, "service_account is 'A'; use at most 253"),
        ({"priority_class": "A"}, "priority_class is 'A'; use at most 253"),
        ({"image_pull_secrets": [""]}, "image_pull_secrets is ''; use at most 253"),
        ({"env_from_secrets": ["_"]}, "env_from_secrets is '_'; use at most 253"),
        ({"queue": "Night"}, "queue is 'Night'; use at most 253"),
        ({"image_pull_policy": "always"}, "image_pull_policy is 'always'; .* did you mean Always"),
        (
            {"device": "gpu"},
            "device is 'gpu'; give a resource with its domain, for example nvidia.com/gpu",
        ),
        ({"device": "nvidia.com/"}, "device: 'nvidia.com/' is not a valid key"),
        ({"topology_key": "a/b/c"}, "topology_key: 'a/b/c' is not a valid key"),
        ({"cpu": "many"}, "cpu is 'many'; give a quantity, for example 4, 500m or 64Gi"),
        ({"memory": "64GB"}, "memory is '64GB'; give a quantity"),
        ({"memory": "0"}, "memory is '0'; give a quantity"),
        ({"memory": "-1Gi"}, "memory is '-1Gi'; give a quantity"),
        ({"shared_memory": "1 Gi"}, "shared_memory is '1 Gi'; give a quantity"),
        (
            {"devices_per_node": 8},
            "devices_per_node needs device; give it, for example nvidia.com/gpu",
        ),
        ({"termination_grace_s": 30}, "termination_grace_s is 30; give at least 630, or 0"),
        ({"labels": {"a b": "c"}}, "labels: 'a b' is not a valid key"),
        ({"labels": {"a": "c d"}}, "labels: a is 'c d'; give at most 63"),
        ({"labels": {"rekindle.dev/job": "x"}}, "labels: Rekindle sets rekindle.dev/job"),
        (
            {"labels": {"prefect.io/flow-run-id": "x"}},
            "Prefect's observer would treat the job's pods",
        ),
        ({"annotations": {"x.prefect.io/a": "x"}}, "Prefect's observer would treat the job's pods"),
        ({"node_selector": {"a": "*"}}, r"node_selector: a is '\*'"),
        ({"tolerations": [{"keys": "a"}]}, r"tolerations\[0\]: keys is unknown; use key"),
        (
            {"volumes": [volume("Data")]},
            "volumes: Data: the name is invalid; use at most 63 of a-z 0-9 -",
        ),
        (
            {"volumes": [volume("shm")]},
            "volumes: shm: another volume has this name; choose another",
        ),
        (
            {"volumes": [volume(), volume(mount_path="/b")]},
            "volumes: data: another volume has this name",
        ),
        ({"volumes": [volume(), volume("b", "/data/")]}, "volumes: b: /data is mounted twice"),
        ({"volumes": [volume("b", "data")]}, "volumes: b: mount_path is 'data'; give an absolute"),
        ({"volumes": [volume("b", "/")]}, "volumes: b: mount_path is '/'; give an absolute path"),
        ({"volumes": [volume("b", "/dev/shm")]}, "volumes: b: Rekindle mounts /dev/shm"),
        ({"volumes": [volume(claim="a", secret="b")]}, "claim and secret are given; keep one"),
        ({"volumes": [volume(claim="A")]}, "volumes: data: claim is 'A'; use at most 253"),
        ({"volumes": [volume(host_path="mnt")]}, "host_path is 'mnt'; give an absolute path"),
        ({"coordinator": {"cpu": "x"}}, "coordinator.cpu is 'x'; give a quantity"),
        ({"coordinator": {"claim": "X"}}, "coordinator.claim is 'X'; use at most 253"),
        ({"coordinator": {"peers": [{}]}}, r"coordinator.peers\[0\]: give namespace, labels or"),
        (
            {"coordinator": {"peers": [{"cidr": "10.0.0.0/8", "namespace": "a"}]}},
            r"coordinator.peers\[0\]: a peer with cidr must not have",
        ),
        (
            {"coordinator": {"peers": [{"cidr": "ten"}]}},
            "cidr is 'ten'; give addresses, for example 10",
        ),
        ({"coordinator": {"peers": [{"namespace": "A"}]}}, r"peers\[0\].namespace is 'A'; use"),
        ({"gang": True}, "gang: a indexed-job cannot place all pods at once"),
        (
            {"recovery": "mindcluster"},
            "mindcluster, but MindCluster does not recover the kind indexed-job; choose ascendjob",
        ),
        ({"recover_strategy": ["retry"]}, "recover_strategy has no effect without MindCluster"),
        (
            {"kind": "volcano-job", "recovery": "mindcluster", "recover_strategy": ["retry"]},
            "recovers only the processes of an ascendjob, not of a volcano-job",
        ),
        (
            {"kind": "ascendjob", "recovery": "mindcluster", "recover_strategy": ["recovr"]},
            "recover_strategy is 'recovr'; .* did you mean recover",
        ),
        (
            {"kind": "ascendjob", "recovery": "mindcluster", "recover_strategy": ["dump", "dump"]},
            "recover_strategy has the same strategy twice; keep one",
        ),
        ({"ascend": {"framework": "jax"}}, "ascend.framework is 'jax'; give one of pytorch"),
        ({"ascend": {"framework": ""}}, "ascend.framework is ''; give one of pytorch"),
        ({"ascend": {"fault_scheduling": "forced"}}, "'forced'; .* did you mean force"),
        ({"ascend": {"process_recover": "yes"}}, "ascend.process_recover is 'yes'; give one of on"),
        ({"ascend": {"sub_healthy": "exit"}}, "ascend.sub_healthy is 'exit'; give one of ignore"),
        ({"ascend": {"tor_affinity": "no"}}, "ascend.tor_affinity is 'no'; give one of large"),
        ({"ascend": {"recover_policy_path": "x"}}, "ascend.recover_policy_path is 'x'; give one"),
        ({"ascend": {"accelerator": "a b"}}, "ascend.accelerator is 'a b'; give at most 63"),
    ],
)
def test_wrong_words(fields: dict[str, Any], text: str) -> None:
    """check_pods() refuses each wrong value, and the error has its field and the remedy."""
    with pytest.raises(UsageError, match=text):
        check_pods(pods(fields.pop("kind", "indexed-job"), **fields), spec())


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"fault_retry_times": 101}, "ascend: fault_retry_times is 101; give at most 100"),
        ({"wait_reschedule_timeout_s": 5}, "timeout_s is 5; give at least 30"),
        ({"sp_block": 0}, "ascend: sp_block is 0; give at least 1"),
    ],
)
def test_numbers_outside_of_their_limits(fields: dict[str, Any], text: str) -> None:
    """The reader refuses such a number in a file, and check_pods() refuses it from Python code."""
    with pytest.raises(UsageError, match=text):
        check_pods(KubernetesSettings(image="x", ascend=Ascend(**fields)), spec())
    with pytest.raises(msgspec.ValidationError, match=next(iter(fields))):
        pods(ascend=fields)
    with pytest.raises(UsageError, match="kubernetes: devices_per_node is -1; give at least 0"):
        check_pods(KubernetesSettings(image="x", devices_per_node=-1), spec())


def test_a_grace_may_be_short_where_final_checkpoint_are() -> None:
    """The smallest grace period follows the timeout of the policy."""
    short = spec(policy=Policy(dump_timeout_s=5))
    check_pods(pods(termination_grace_s=35), short)
    with pytest.raises(UsageError, match="give at least 35, or 0"):
        check_pods(pods(termination_grace_s=34), short)


@pytest.mark.parametrize(
    ("store", "fields"),
    [
        ("/data/ckpt", {"volumes": [volume(claim="data")]}),
        ("s3://bucket/prefix", {}),
        ("/anywhere", {"pod_overrides": {"spec": {"volumes": []}}}),
    ],
)
def test_checkpoints_that_last(store: str, fields: dict[str, Any]) -> None:
    """Checkpoints go to a mounted volume or an object store; the check ignores patches."""
    check_pods(pods(**fields), spec(checkpoint_store=store, checkpoint_every=5))


@pytest.mark.parametrize(
    "fields",
    [{}, {"volumes": [volume(empty_dir=True)]}, {"volumes": [volume(mount_path="/da", claim="a")]}],
)
def test_checkpoints_that_would_be_lost(fields: dict[str, Any]) -> None:
    """check_pods() refuses checkpoints in the files of a container, unless the job writes none."""
    with pytest.raises(
        UsageError, match="the job would write checkpoints to /data in each container"
    ):
        check_pods(pods(**fields), spec(checkpoint_store="/data", checkpoint_every=5))
    check_pods(pods(**fields), spec(checkpoint_store="/data"))


def test_an_ascendjob_has_a_largest_size() -> None:
    """check_pods() refuses more replicas than the operator accepts, only for an AscendJob."""
    job = spec(nodes=20_000, spares=1)
    with pytest.raises(UsageError, match="at most 20000 replicas, but nodes and spares are 20001"):
        check_pods(pods("ascendjob"), job)
    check_pods(pods(), job)


@pytest.mark.parametrize(
    ("patch", "text"),
    [
        ({"metadata": {"labels": {"framework": "jax"}}}, "label framework is 'jax'; give one of"),
        (
            {"spec": {"replicaSpecs": {"Master": {"replicas": 2}}}},
            "replicaSpecs.Master has 2 replicas; pytorch has exactly one leader",
        ),
        ({"spec": {"replicaSpecs": {"Master": None}}}, "replicaSpecs.Master has 0 replicas"),
        (
            {"metadata": {"labels": {"framework": "mindspore"}}},
            "replicaSpecs.Master is not a role of mindspore; its roles are Scheduler and Worker",
        ),
    ],
)
def test_what_the_ascend_operator_would_refuse(patch: dict[str, Any], text: str) -> None:
    """The engine refuses a patch that breaks the rules of the operator.

    The operator itself reports it only in events.
    """
    with pytest.raises(UsageError, match=text):
        rendered("ascendjob", overrides=patch)


def test_the_ascend_operators_container() -> None:
    """A patch cannot remove the container with the name that the operator needs."""
    gone = {"spec": {"containers": [{"$patch": "replace"}, {"name": "other", "image": "x"}]}}
    with pytest.raises(UsageError, match="Master has no container named ascend with an image"):
        rendered("ascendjob", pod_overrides=gone)


@pytest.mark.parametrize(
    ("patch", "text"),
    [
        ({"metadata": {"name": "x"}}, "overrides: a patch must not change metadata.name"),
        ({"kind": "CronJob"}, "overrides: a patch must not change kind"),
        ({"metadata": {"labels": None}}, "overrides: Rekindle sets the label rekindle.dev/job"),
        (
            {"spec": {"template": None}},
            "overrides: the patches leave the Job without a pod template",
        ),
        ({"spec": {"template": []}}, "overrides: the patch has a list at spec.template"),
    ],
)
def test_patches_that_would_lose_the_job(patch: dict[str, Any], text: str) -> None:
    """A patch cannot remove the pods, or the values by which the engine finds the job."""
    with pytest.raises(UsageError, match=text):
        rendered(overrides=patch)


def test_our_variables_are_not_patched() -> None:
    """A patch cannot set the variables of the agent."""
    env = [{"name": "REKINDLE_POD_IP", "value": "x"}]
    patch = {"spec": {"containers": [{"name": "training", "env": env}]}}
    with pytest.raises(UsageError, match="pod_overrides: Rekindle sets REKINDLE_POD_IP"):
        rendered(pod_overrides=patch)


@pytest.mark.parametrize(
    ("patch", "text"),
    [
        (
            {"metadata": {"labels": {"rekindle.dev/role": "x"}}},
            "Rekindle sets the label rekindle.dev/role",
        ),
        ({"metadata": None}, "Rekindle sets the label rekindle.dev/job; leave it out"),
        ({"spec": {"containers": None}}, "the patches leave the Job without a pod template"),
        ({"spec": None}, "the patches leave the Job without a pod template"),
    ],
)
def test_pods_that_nobody_would_find(patch: dict[str, Any], text: str) -> None:
    """A patch of the pods cannot remove Rekindle's labels or the container."""
    with pytest.raises(UsageError, match=text):
        rendered(pod_overrides=patch)


def test_unknown_fields_are_refused() -> None:
    """The reader refuses an unknown field."""
    with pytest.raises(msgspec.ValidationError, match="imagePullPolicy"):
        pods(imagePullPolicy="Always")
