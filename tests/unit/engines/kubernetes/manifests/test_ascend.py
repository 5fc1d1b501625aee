"""Labels, annotations, variables and mounts for Ascend: all if the job requests them, else none."""

from __future__ import annotations

from typing import Any

import pytest
from rendered import container, rendered, spec, templates

from rekindle.engines.kubernetes.manifests.ascend import Ascend, job_annotations, job_labels
from rekindle.errors import UsageError
from rekindle.job.spec import Framework
from rekindle.recovery.policy.annotations import KNOWN, from_mindcluster
from rekindle.recovery.policy.policy import Strategy

NPU = "huawei.com/Ascend910"


def said_of(found: Any) -> tuple[dict[str, str], dict[str, str]]:
    """Return the labels and annotations of the workload that are not Rekindle's own."""
    metadata = found.workload["metadata"]
    both = (metadata["labels"], metadata["annotations"])
    own = [{k: v for k, v in one.items() if not k.startswith("rekindle.dev/")} for one in both]
    return own[0], own[1]


def test_process_level_online_recovery() -> None:
    """A job with online recovery of processes has all settings of MindCluster's guide."""
    found = rendered(
        "ascendjob",
        device=NPU,
        recovery="mindcluster",
        recover_strategy=["retry"],
        ascend={"fault_scheduling": "force"},
    )
    labels, annotations = said_of(found)
    assert labels == {
        "framework": "pytorch",
        "process-recover-enable": "on",
        "fault-scheduling": "force",
    }
    assert annotations == {"recover-strategy": "retry"}
    for template in templates(found, "ascendjob"):
        (only,) = template["spec"]["containers"]
        assert only["name"] == "ascend"
        env = {one["name"]: one.get("value") for one in only["env"]}
        assert env["PROCESS_RECOVER"] == "on"
        assert env["ELASTIC_PROCESS_RECOVER_ENABLE"] == "1"
    policy = from_mindcluster(labels, annotations)
    assert Strategy.RETRY in policy.strategies


@pytest.mark.parametrize("kind", ["ascendjob", "volcano-job", "indexed-job"])
def test_nothing_of_mindclusters_unless_asked_for(kind: str) -> None:
    """A job with Rekindle's own recovery has no label, port, mount or variable of MindCluster."""
    found = rendered(kind, device=NPU)
    labels, annotations = said_of(found)
    assert labels == ({"framework": "pytorch"} if kind == "ascendjob" else {})
    assert annotations == {}
    agent = container(found, kind)
    assert "ports" not in agent
    assert [one["mountPath"] for one in agent["volumeMounts"]] == ["/dev/shm"]
    assert {one["name"] for one in agent["env"]} == {
        *("REKINDLE_SECRET", "REKINDLE_POD_IP", "REKINDLE_HOST_NAME", "PYTHONUNBUFFERED")
    }
    assert found.beside == ()


LABELS = {
    "accelerator": ("ascend-910b", "ring-controller.atlas", "ascend-910b"),
    "fault_scheduling": ("grace", "fault-scheduling", "grace"),
    "fault_retry_times": (0, "fault-retry-times", "0"),
    "pod_rescheduling": (True, "pod-rescheduling", "on"),
    "process_recover": ("pause", "process-recover-enable", "pause"),
    "sub_healthy": ("hotSwitch", "subHealthyStrategy", "hotSwitch"),
    "tor_affinity": ("null", "tor-affinity", "null"),
    "podgroup_scheduling": (True, "podgroup-sched-enable", "true"),
    "custom_job_key": ("a", "customJobKey", "a"),
    "custom_job_id": ("b", "custom-job-id", "b"),
}
ANNOTATIONS = {
    "schedule_policy": ("chip8-node8", "huawei.com/schedule_policy", "chip8-node8"),
    "wait_reschedule_timeout_s": (270, "wait-reschedule-timeout", "270"),
    "sp_block": (16, "sp-block", "16"),
    "ra_block": (8, "ra-block", "8"),
    "recover_policy_path": ("pod", "huawei.com/recover_policy_path", "pod"),
    "min_available": (2, "huawei.com/schedule_minAvailable", "2"),
    "affinity_config": ("x", "huawei.com/affinity-config", "x"),
    "fault_filter_codes": ("80C98000", "huawei.com/schedule.filter.faultCode", "80C98000"),
    "fault_filter": ("Restart:30", "huawei.com/schedule.filter.faultLevel", "Restart:30"),
}
ELSEWHERE = {
    *("framework", "backoff_limit"),
    *("env", "ports", "reset_config", "data_trace", "driver"),
}


@pytest.mark.parametrize("name", LABELS)
def test_each_label_alone(name: str) -> None:
    """Each field alone sets exactly its label."""
    value, key, text = LABELS[name]
    ascend = Ascend(**{name: value})
    assert job_labels(ascend, process_level=False) == {key: text}
    assert job_annotations(ascend, ()) == {}


@pytest.mark.parametrize("name", ANNOTATIONS)
def test_each_annotation_alone(name: str) -> None:
    """Each field alone sets exactly its annotation."""
    value, key, text = ANNOTATIONS[name]
    ascend = Ascend(**{name: value})
    assert job_annotations(ascend, ()) == {key: text}
    assert job_labels(ascend, process_level=False) == {}


def test_no_field_is_left_out_of_these_tests() -> None:
    """These tests cover every field, and a field can write every key that the policy reads."""
    assert {*LABELS, *ANNOTATIONS, *ELSEWHERE} == set(Ascend.__struct_fields__)
    written = {key for _, key, _ in (*LABELS.values(), *ANNOTATIONS.values())}
    own = {word for word in KNOWN if not word.startswith("fault-tolerance/")}
    assert own <= written | {"recover-strategy"}


@pytest.mark.parametrize(
    ("field", "paths"),
    [
        ("reset_config", {"/user/restore/reset/config"}),
        ("data_trace", {"/user/cluster-info/datatrace-config", "/user/cluster-info/profiling"}),
        ("driver", {"/usr/local/Ascend/driver"}),
    ],
)
def test_mounts_alone_and_with_mindcluster(field: str, paths: set[str]) -> None:
    """Each field mounts its folders, and can disable them in a job of MindCluster."""
    for settings, there in (
        ({"ascend": {field: True}}, True),
        ({"recovery": "mindcluster"}, True),
        ({"recovery": "mindcluster", "ascend": {field: False}}, False),
    ):
        found = rendered("ascendjob", **settings)
        mounts = {one["mountPath"] for one in container(found, "ascendjob")["volumeMounts"]}
        assert (paths <= mounts) == there
        volumes = {one["name"] for one in templates(found, "ascendjob")[0]["spec"]["volumes"]}
        used = {one["name"] for one in container(found, "ascendjob")["volumeMounts"]}
        assert used == volumes


def test_ports_and_variables() -> None:
    """With MindCluster, the container has its ports, and variables for devices and host."""
    agent = container(rendered("ascendjob", device=NPU, recovery="mindcluster"), "ascendjob")
    assert {one["name"]: one["containerPort"] for one in agent["ports"]} == {
        "ascendjob-port": 2222,
        "ttp-port": 8000,
        "taskd-port": 9601,
    }
    fields = {one["name"]: one.get("valueFrom", {}).get("fieldRef") for one in agent["env"]}
    assert fields["ASCEND_VISIBLE_DEVICES"] == {"fieldPath": f"metadata.annotations['{NPU}']"}
    assert fields["XDL_IP"] == {"fieldPath": "status.hostIP"}
    assert "PROCESS_RECOVER" not in fields  # the job has no recovery strategy


def test_the_accelerators_label_is_on_the_pods_too() -> None:
    """The pods also have the label of the accelerator, because Volcano's plugin reads it there."""
    found = rendered("volcano-job", ascend={"accelerator": "ascend-910b"})
    (template,) = templates(found, "volcano-job")
    assert template["metadata"]["labels"]["ring-controller.atlas"] == "ascend-910b"


@pytest.mark.parametrize(
    ("framework", "leader"),
    [("pytorch", "Master"), ("mindspore", "Scheduler"), ("tensorflow", "Chief")],
)
def test_one_leader_by_framework(framework: str, leader: str) -> None:
    """Each framework has one leader of its role; a job with one node has no workers."""
    found = rendered("ascendjob", job=spec(nodes=3), ascend={"framework": framework})
    roles = found.workload["spec"]["replicaSpecs"]
    assert {role: one["replicas"] for role, one in roles.items()} == {leader: 1, "Worker": 2}
    found = rendered("ascendjob", job=spec(nodes=1), ascend={"framework": framework})
    assert list(found.workload["spec"]["replicaSpecs"]) == [leader]


def test_a_job_of_mindspore_is_one_to_the_operator_too() -> None:
    """The engine refuses a job of MindSpore whose label has another framework.

    The operator sets roles and variables by the label.
    """
    job = spec(framework=Framework.MINDSPORE)
    with pytest.raises(UsageError, match="use mindspore in both"):
        rendered("ascendjob", job=job)
    found = rendered("ascendjob", job=job, ascend={"framework": "mindspore"})
    assert found.workload["metadata"]["labels"]["framework"] == "mindspore"
    rendered("indexed-job", job=job)


@pytest.mark.parametrize(
    ("fields", "restart", "policies"),
    [
        ({}, "OnFailure", None),
        ({"recovery": "mindcluster"}, "Never", ["PodEvicted RestartJob"]),
        (
            {"recovery": "mindcluster", "ascend": {"fault_retry_times": 3}},
            "Never",
            ["PodEvicted RestartJob", "PodFailed Ignore"],
        ),
        (
            {"recovery": "mindcluster", "ascend": {"recover_policy_path": "pod"}},
            "Never",
            ["PodEvicted RestartJob", "PodFailed RestartTask"],
        ),
        ({"recovery": "mindcluster", "ascend": {"pod_rescheduling": True}}, "Never", None),
    ],
)
def test_volcanos_policies(
    fields: dict[str, Any], restart: str, policies: list[str] | None
) -> None:
    """The restart policy and Volcano's policies follow from the settings of the recovery."""
    found = rendered("volcano-job", **fields)
    (template,) = templates(found, "volcano-job")
    assert template["spec"]["restartPolicy"] == restart
    written = found.workload["spec"].get("policies")
    assert policies == (written and [f"{one['event']} {one['action']}" for one in written])


def test_the_operators_limit() -> None:
    """An AscendJob has a backoffLimit only if the job sets one."""
    run = rendered("ascendjob", ascend={"backoff_limit": 3}).workload["spec"]["runPolicy"]
    assert run["backoffLimit"] == 3
    assert "backoffLimit" not in rendered("ascendjob").workload["spec"]["runPolicy"]
