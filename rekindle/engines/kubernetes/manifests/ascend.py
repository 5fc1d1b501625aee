"""Render the parts for Ascend and MindCluster: labels, annotations, ports, mounts. Pure.

The manifests have no part that the settings do not request. Sources: MindCluster's documents on
resumable training, AscendJob and process-level recovery.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from rekindle.engines.kubernetes.manifests import Manifest, given
from rekindle.recovery.policy import dialect as words
from rekindle.settings import CHOICES

FRAMEWORK = "framework"
ACCELERATOR = "ring-controller.atlas"
SCHEDULE_POLICY = "huawei.com/schedule_policy"
VISIBLE = "ASCEND_VISIBLE_DEVICES"

TRACE_FOLDER = "/user/cluster-info/datatrace-config"
JOB_PORT, TTP_PORT, TASKD_PORT = 2222, 8000, 9601
_PORTS = (("ascendjob-port", JOB_PORT), ("ttp-port", TTP_PORT), ("taskd-port", TASKD_PORT))
_WAIT_MINDX_S = 60
RESET_CONFIG = "reset-config-"


class Ascend(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Labels, annotations and mounts of MindCluster. An empty field adds none."""

    framework: Annotated[
        str,
        Meta(
            extra={CHOICES: ("pytorch", "mindspore", "tensorflow")},
            description="Framework of an AscendJob; it names the roles of its pods.",
        ),
    ] = "pytorch"
    accelerator: Annotated[
        str, Meta(description="Label ring-controller.atlas, such as ascend-910b; also on the pods.")
    ] = ""
    schedule_policy: Annotated[
        str, Meta(description="Annotation huawei.com/schedule_policy, such as chip8-node8.")
    ] = ""
    fault_scheduling: Annotated[
        str,
        Meta(
            extra={CHOICES: ("", *words.SCHEDULING)},
            description="Label fault-scheduling: whether MindCluster handles faults, and how.",
        ),
    ] = ""
    fault_retry_times: Annotated[
        Annotated[int, Meta(ge=0, le=100)] | None,
        Meta(
            description="Label fault-retry-times: retries after faults without a known cause.",
        ),
    ] = None
    pod_rescheduling: Annotated[
        bool, Meta(description="Label pod-rescheduling: MindCluster replaces only the faulty pod.")
    ] = False
    process_recover: Annotated[
        str,
        Meta(
            extra={CHOICES: ("", "on", "pause", "off")},
            description="Label process-recover-enable. Empty: on if recover_strategy is given.",
        ),
    ] = ""
    sub_healthy: Annotated[
        str,
        Meta(
            extra={CHOICES: ("", "ignore", "graceExit", "forceExit", "hotSwitch")},
            description="Label subHealthyStrategy.",
        ),
    ] = ""
    tor_affinity: Annotated[
        str,
        Meta(
            extra={CHOICES: ("", "large-model-schema", "normal-schema", "null")},
            description="Label tor-affinity.",
        ),
    ] = ""
    podgroup_scheduling: Annotated[bool, Meta(description="Label podgroup-sched-enable.")] = False
    custom_job_key: Annotated[str, Meta(description="Label customJobKey.")] = ""
    custom_job_id: Annotated[str, Meta(description="Label custom-job-id.")] = ""
    wait_reschedule_timeout_s: Annotated[
        Annotated[int, Meta(ge=30, le=270)] | None,
        Meta(
            description="Annotation wait-reschedule-timeout: seconds to wait for a new pod.",
        ),
    ] = None
    sp_block: Annotated[
        Annotated[int, Meta(ge=1, le=1_000_000)] | None, Meta(description="Annotation sp-block.")
    ] = None
    ra_block: Annotated[
        Annotated[int, Meta(ge=1, le=1_000_000)] | None, Meta(description="Annotation ra-block.")
    ] = None
    recover_policy_path: Annotated[
        str,
        Meta(
            extra={CHOICES: ("", "pod")}, description="Annotation huawei.com/recover_policy_path."
        ),
    ] = ""
    min_available: Annotated[
        Annotated[int, Meta(ge=1, le=20_000)] | None,
        Meta(description="Annotation huawei.com/schedule_minAvailable."),
    ] = None
    affinity_config: Annotated[str, Meta(description="Annotation huawei.com/affinity-config.")] = ""
    fault_filter_codes: Annotated[
        str, Meta(description="Annotation huawei.com/schedule.filter.faultCode.")
    ] = ""
    fault_filter: Annotated[
        str,
        Meta(
            description="Annotation huawei.com/schedule.filter.faultLevel, such as "
            "RestartRequest:30."
        ),
    ] = ""
    backoff_limit: Annotated[
        Annotated[int, Meta(ge=0, le=2**31 - 1)] | None,
        Meta(
            description="runPolicy.backoffLimit of an AscendJob. Empty: the field is absent, and "
            "retries have no limit."
        ),
    ] = None
    env: Annotated[
        bool | None,
        Meta(
            description="Whether containers get MindCluster's variables. Empty: yes if MindCluster "
            "recovers the job. Empty means the same in ports, reset_config, data_trace and driver."
        ),
    ] = None
    ports: Annotated[
        bool | None, Meta(description="Whether containers get MindCluster's ports.")
    ] = None
    reset_config: Annotated[
        bool | None,
        Meta(description="Whether containers get the folder with orders to restart processes."),
    ] = None
    data_trace: Annotated[
        bool | None,
        Meta(description="Whether containers get the folders of MindCluster's profiling."),
    ] = None
    driver: Annotated[
        bool | None, Meta(description="Whether containers get the node's driver.")
    ] = None


def job_labels(ascend: Ascend, *, process_level: bool) -> dict[str, str]:
    """Return the labels of the workload. process_level: MindCluster shall recover processes."""
    process = ascend.process_recover or ("on" if process_level else "")
    return given(
        {
            ACCELERATOR: ascend.accelerator,
            words.FAULT_SCHEDULING: ascend.fault_scheduling,
            words.FAULT_RETRY_TIMES: _number(ascend.fault_retry_times),
            words.POD_RESCHEDULING: "on" if ascend.pod_rescheduling else "",
            words.PROCESS_RECOVER: process,
            "subHealthyStrategy": ascend.sub_healthy,
            "tor-affinity": ascend.tor_affinity,
            "podgroup-sched-enable": "true" if ascend.podgroup_scheduling else "",
            "customJobKey": ascend.custom_job_key,
            "custom-job-id": ascend.custom_job_id,
        }
    )


def job_annotations(ascend: Ascend, strategies: tuple[str, ...]) -> dict[str, str]:
    """Return the annotations of the workload."""
    return given(
        {
            words.RECOVER_STRATEGY: ",".join(strategies),
            words.WAIT_RESCHEDULE: _number(ascend.wait_reschedule_timeout_s),
            SCHEDULE_POLICY: ascend.schedule_policy,
            "sp-block": _number(ascend.sp_block),
            "ra-block": _number(ascend.ra_block),
            "huawei.com/recover_policy_path": ascend.recover_policy_path,
            "huawei.com/schedule_minAvailable": _number(ascend.min_available),
            "huawei.com/affinity-config": ascend.affinity_config,
            "huawei.com/schedule.filter.faultCode": ascend.fault_filter_codes,
            "huawei.com/schedule.filter.faultLevel": ascend.fault_filter,
        }
    )


def _number(value: int | None) -> str:
    return "" if value is None else str(value)


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """The workload, and the device that its pods request."""

    workload: str
    namespace: str
    device: str


class Extras(msgspec.Struct, frozen=True, kw_only=True):
    """The additional parts of a job's containers."""

    env: list[Manifest] = []
    ports: list[Manifest] = []
    mounts: list[Manifest] = []
    volumes: list[Manifest] = []


def extras(ascend: Ascend, place: Place, *, by_mindcluster: bool, process_level: bool) -> Extras:
    """Return the additional parts of a pod's container that the settings request."""

    def wanted(choice: bool | None) -> bool:
        return by_mindcluster if choice is None else choice

    folders: list[tuple[str, str, str, bool]] = []
    if wanted(ascend.reset_config):
        source = f"/user/restore/reset/{place.namespace}.reset-config-{place.workload}"
        folders.append(("reset-config", "/user/restore/reset/config", source, True))
    if wanted(ascend.data_trace):
        source = f"{TRACE_FOLDER}/{place.namespace}.data-trace-{place.workload}"
        folders.append(("data-trace-config", TRACE_FOLDER, source, False))
        profiles = "/user/cluster-info/profiling"
        folders.append(("data-trace", profiles, profiles, False))
    if wanted(ascend.driver):
        driver = "/usr/local/Ascend/driver"
        folders.append(("ascend-driver", driver, driver, True))
    return Extras(
        env=_env(place.device, process_level=process_level) if wanted(ascend.env) else [],
        ports=[{"name": name, "containerPort": port} for name, port in _PORTS]
        if wanted(ascend.ports)
        else [],
        mounts=[_mount(name, path, read_only=ro) for name, path, _, ro in folders],
        volumes=[{"name": name, "hostPath": {"path": source}} for name, _, source, _ in folders],
    )


def _env(device: str, *, process_level: bool) -> list[Manifest]:
    found = [field_of_pod("XDL_IP", "status.hostIP"), field_of_pod("POD_IP", "status.podIP")]
    if device:
        found.append(field_of_pod(VISIBLE, f"metadata.annotations['{device}']"))
    found.append({"name": "TTP_PORT", "value": str(TTP_PORT)})
    if process_level:
        found += [
            {"name": "PROCESS_RECOVER", "value": "on"},
            {"name": "ELASTIC_PROCESS_RECOVER_ENABLE", "value": "1"},
            {"name": "MINDIO_WAIT_MINDX_TIME", "value": str(_WAIT_MINDX_S)},
            {"name": "TASKD_PROCESS_ENABLE", "value": "on"},
        ]
    return found


def field_of_pod(name: str, path: str) -> Manifest:
    """Return an environment variable whose value is a field of the pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _mount(name: str, path: str, *, read_only: bool) -> Manifest:
    found: Manifest = {"name": name, "mountPath": path}
    return found | {"readOnly": True} if read_only else found


def reset_config(workload: str, namespace: str) -> Manifest:
    """Return the ConfigMap through which MindCluster orders a job's processes to restart."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": f"{RESET_CONFIG}{workload}",
            "namespace": namespace,
            "labels": {"reset": "true"},
        },
        "data": {"reset.json": '{"status":"initializing"}\n', "checkCode": ""},
    }


def is_mindclusters(manifest: Manifest) -> bool:
    """Return whether MindCluster writes to this object; Rekindle then creates it only once."""
    return str(manifest["metadata"]["name"]).startswith(RESET_CONFIG)
