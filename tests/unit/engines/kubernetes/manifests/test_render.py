"""The objects of a job in a cluster, for every kind of workload."""

from __future__ import annotations

import base64
import os
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from rendered import SECRET, adapter_of, container, of, rendered, spec, templates

from rekindle.cli.kubernetes import stream
from rekindle.engines.kubernetes.manifests.render import keeps_off
from rekindle.engines.kubernetes.manifests.settings import (
    IsolationMode,
    KubernetesSettings,
    WorkloadKind,
)
from rekindle.job.spec import JobSpec, KeepsOff

pytest.importorskip("kubernetes.client")
from rendered.fields import wrong_fields

GOLDEN = Path(__file__).parent / "golden"
KINDS = [kind.value for kind in WorkloadKind]
OWN_CONTAINERS = {"ascendjob": "ascend", "pytorchjob": "pytorch", "trainjob": "node"}

# All settings of pods, for any kind.
EVERYTHING: dict[str, Any] = {
    "namespace": "research",
    "device": "nvidia.com/gpu",
    "devices_per_node": 8,
    "cpu": "16",
    "memory": "128Gi",
    "shared_memory": "32Gi",
    "service_account": "trainer",
    "image_pull_policy": "Always",
    "image_pull_secrets": ["registry"],
    "queue": "night",
    "priority_class": "high",
    "node_selector": {"pool": "a"},
    "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "topology_key": "topology.kubernetes.io/rack",
    "volumes": [
        {"name": "data", "mount_path": "/data", "claim": "data", "read_only": True},
        {"name": "disk", "mount_path": "/disk", "host_path": "/mnt/disk"},
        {"name": "conf", "mount_path": "/conf", "config_map": "conf"},
        {"name": "keys", "mount_path": "/keys", "secret": "keys"},
        {"name": "more", "mount_path": "/more", "empty_dir": True},
    ],
    "labels": {"team": "nlp"},
    "annotations": {"example.com/cost": "1"},
    "env_from_secrets": ["tokens"],
    "coordinator": {
        "image": "example.com/rekindle:1",
        "claim": "record",
        "peers": [{"namespace": "flows"}, {"cidr": "10.0.0.0/8"}, {"labels": {"app": "ui"}}],
    },
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "settings", [{}, EVERYTHING, {"host_network": True}], ids=["least", "all", "host"]
)
def test_only_fields_that_exist(kind: str, settings: dict[str, Any]) -> None:
    """No object has an unknown field, or a value of a wrong type."""
    found = rendered(kind, avoid=("bad",), **settings)
    wrong = [text for one in found.every for text in wrong_fields(one)]
    assert not wrong


@pytest.mark.parametrize("kind", KINDS)
def test_golden(kind: str) -> None:
    """The objects of one job are equal to the reviewed ones (GOLDEN=write replaces them)."""
    settings = {"device": "huawei.com/Ascend910" if kind == "ascendjob" else "nvidia.com/gpu"}
    text = stream(rendered(kind, job=spec(spares=1), **settings).every)
    text = re.sub("(?<=job.json: ).*", "JOB", text)  # it changes with every new field of a job
    path = GOLDEN / f"{kind}.yaml"
    if os.environ.get("GOLDEN") == "write":
        path.write_text(text)
    assert yaml.safe_load_all(text)
    assert path.read_text() == text


@pytest.mark.parametrize("kind", KINDS)
def test_pods_for_nodes_and_spares_with_the_agent_inside(kind: str) -> None:
    """Each node and spare has a pod, which runs an agent with the coordinator's address."""
    found = rendered(kind, job=spec(spares=1), namespace="research")
    assert _pods(found.workload) == 3
    agent = container(found, kind)
    assert agent["name"] == OWN_CONTAINERS.get(kind, "training")
    assert agent["command"] == [
        *("rekindle", "run", "--coordinator", "demo-coordinator.research.svc:29600"),
        *("--join-timeout", "600", "--local-addr", "$(REKINDLE_POD_IP)"),
    ]
    variables = {one["name"]: one for one in agent["env"]}
    assert variables["REKINDLE_SECRET"]["valueFrom"]["secretKeyRef"] == {
        "name": "demo-secret",
        "key": "secret",
    }
    assert variables["REKINDLE_HOST_NAME"]["valueFrom"]["fieldRef"]["fieldPath"] == "spec.nodeName"


def _pods(workload: dict[str, Any]) -> int:
    spec = workload["spec"]
    if "trainer" in spec:
        return int(spec["trainer"]["numNodes"])
    if "replicatedJobs" in spec:
        return int(spec["replicatedJobs"][0]["template"]["spec"]["completions"])
    if "tasks" in spec:
        return sum(task["replicas"] for task in spec["tasks"])
    roles = spec.get("replicaSpecs") or spec.get("pytorchReplicaSpecs")
    return sum(role["replicas"] for role in roles.values()) if roles else spec["completions"]


@pytest.mark.parametrize("kind", KINDS)
def test_secrets_are_in_the_secret_alone(kind: str) -> None:
    """Only the Secret has the job's secret and the values of its environment.

    Other objects do not have them in a hashed form either.
    """
    found = rendered(kind)
    secret = of(found, "Secret")
    content = {key: base64.b64decode(text) for key, text in secret["data"].items()}
    assert content["secret"].decode() == SECRET
    assert msgspec.json.decode(content["job.json"], type=JobSpec) == msgspec.structs.replace(
        spec(), keeps_off=keeps_off(KubernetesSettings(kind=WorkloadKind(kind), image="training"))
    )
    others = [one for one in found.every if one is not secret]
    for hidden in (SECRET, "hush", *secret["data"].values()):
        assert hidden not in str(others)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_prefects_is_on_any_object(kind: str) -> None:
    """No object has a label or annotation of Prefect.

    Otherwise Prefect's observer would treat the job as the job of a flow run.
    """
    assert "prefect.io" not in str(rendered(kind, **EVERYTHING).every)


@pytest.mark.parametrize("kind", KINDS)
def test_nodes_are_kept_off_besides_what_people_demand(kind: str) -> None:
    """Every term of a user's affinity excludes the avoided nodes, in a fixed order."""
    demand = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
    other = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n9"]}]}
    required = {"nodeSelectorTerms": [demand, other]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    found = rendered(kind, avoid=("n2", "n1", "n2"), pod_overrides={"spec": {"affinity": affinity}})
    off = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["n1", "n2"]}
    for template in templates(found, kind):
        node = template["spec"]["affinity"]["nodeAffinity"]
        terms = node["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        assert terms == [
            {"matchExpressions": [*demand["matchExpressions"], off]},
            {"matchFields": other["matchFields"], "matchExpressions": [off]},
        ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_device_keeps_nodes_of_a_job_apart(kind: str) -> None:
    """With a device, each rank has one device, and a host has at most one node of the job."""
    agent = container(rendered(kind, device="nvidia.com/gpu"), kind)
    assert agent["resources"] == {
        "requests": {"nvidia.com/gpu": "4"},
        "limits": {"nvidia.com/gpu": "4"},
    }
    for settings, apart in (
        ({}, False),
        ({"anti_affinity": True}, True),
        ({"device": "nvidia.com/gpu"}, True),
        ({"device": "nvidia.com/gpu", "anti_affinity": False}, False),
        ({"host_network": True}, True),
    ):
        (template, *_) = templates(rendered(kind, **settings), kind)
        assert ("affinity" in template["spec"]) == apart


@pytest.mark.parametrize("kind", KINDS)
def test_the_grace_is_longer_than_final_checkpoint(kind: str) -> None:
    """The grace period of a pod is long enough for the final checkpoint of its node."""
    (template, *_) = templates(rendered(kind), kind)
    assert template["spec"]["terminationGracePeriodSeconds"] == 630
    (template, *_) = templates(rendered(kind, termination_grace_s=900), kind)
    assert template["spec"]["terminationGracePeriodSeconds"] == 900


@pytest.mark.parametrize("kind", KINDS)
def test_all_objects_bear_the_jobs_label(kind: str) -> None:
    """Every object has the job's label, and every pod also has its role."""
    found = rendered(kind, job=spec(job_id="A.b".lower()))
    assert len({one["metadata"]["labels"]["rekindle.dev/job"] for one in found.every}) == 1
    for template in templates(found, kind):
        assert template["metadata"]["labels"]["rekindle.dev/role"] == "worker"


@pytest.mark.parametrize("kind", KINDS)
def test_what_patches_can_do(kind: str) -> None:
    """A patch resumes a suspended workload, or changes the hosts that a live one avoids."""
    its = adapter_of(kind)
    avoiding = rendered(kind, avoid=("n1",)).workload
    if its.follows:
        avoided = its.avoid_patch(avoiding)
        assert "n1" in str(avoided)
        assert "suspend" not in str(avoided)
    if its.suspend is None:
        assert its.suspend_patch() is its.resume_patch(rendered(kind).workload, ()) is None
    else:
        assert "True" in str(its.suspend_patch())
        assert "False" in str(its.resume_patch(rendered(kind).workload, ()))
        patch = its.resume_patch(avoiding, ("n1",))
        assert ("n1" in str(patch)) == (patch is not None) == (its.next_templates is not None)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"kind": WorkloadKind.INDEXED_JOB}, KeepsOff.RESTARTS),
        (
            {"kind": WorkloadKind.INDEXED_JOB, "isolated_hosts": IsolationMode.TAINT},
            KeepsOff.AT_ONCE,
        ),
        ({"kind": WorkloadKind.ASCENDJOB}, KeepsOff.AT_ONCE),
    ],
)
def test_how_single_pods_are_kept_off_a_host(settings: dict[str, Any], wanted: KeepsOff) -> None:
    assert keeps_off(KubernetesSettings(image="training", **settings)) is wanted


def test_resuming_takes_back_what_is_no_longer_avoided() -> None:
    """If the job avoids no node, the patch removes the affinity."""
    its = adapter_of("indexed-job")
    patch = its.resume_patch(rendered().workload, ())
    assert patch is not None
    assert patch["spec"]["template"]["spec"] == {"affinity": {"nodeAffinity": None}}
    assert patch["spec"]["template"]["metadata"]["labels"]["rekindle.dev/attempt"] == "0"


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_fields_are_seen(kind: str) -> None:
    """The check of fields finds an unknown field and a wrong type within a template."""
    found = rendered(kind)
    (agent,) = templates(found, kind)[0]["spec"]["containers"]
    agent |= {"comand": ["x"], "ports": [{"containerPort": "80"}]}
    wrong = [text for one in (*found.beside, found.workload) for text in wrong_fields(one)]
    assert any(text.endswith(".comand is unknown") for text in wrong)
    assert any(text.endswith("is '80', no int") for text in wrong)
