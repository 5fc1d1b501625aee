"""MindCluster's words about a job, as a user chooses them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class AscendSettings(BaseModel):
    """Labels, annotations and mounts of MindCluster; what is empty is left out."""

    model_config = ConfigDict(extra="forbid", title="Ascend")

    framework: Literal["pytorch", "mindspore", "tensorflow"] = Field(
        default="pytorch", description="Framework of an AscendJob; it names the roles of its pods."
    )
    accelerator: str = Field(
        default="", description="Label ring-controller.atlas, as ascend-910b; on the pods, too."
    )
    schedule_policy: str = Field(
        default="", description="Annotation huawei.com/schedule_policy, as chip8-node8."
    )
    fault_scheduling: Literal["", "grace", "force", "off", "external-grace", "external-force"] = (
        Field(default="", description="Label fault-scheduling: whether faults are met at all.")
    )
    fault_retry_times: int | None = Field(
        default=None,
        ge=0,
        le=100,
        description="Label fault-retry-times: retries after faults without a known cause.",
    )
    pod_rescheduling: bool = Field(
        default=False, description="Label pod-rescheduling: a faulty pod is placed anew alone."
    )
    process_recover: Literal["", "on", "pause", "off"] = Field(
        default="",
        description="Label process-recover-enable. Empty: on where MindCluster's strategies are "
        "given.",
    )
    sub_healthy: Literal["", "ignore", "graceExit", "forceExit", "hotSwitch"] = Field(
        default="", description="Label subHealthyStrategy."
    )
    tor_affinity: Literal["", "large-model-schema", "normal-schema", "null"] = Field(
        default="", description="Label tor-affinity."
    )
    podgroup_scheduling: bool = Field(default=False, description="Label podgroup-sched-enable.")
    custom_job_key: str = Field(default="", description="Label customJobKey.")
    custom_job_id: str = Field(default="", description="Label custom-job-id.")
    wait_reschedule_timeout_s: int | None = Field(
        default=None,
        ge=30,
        le=270,
        description="Annotation wait-reschedule-timeout: seconds to wait for a new pod.",
    )
    sp_block: int | None = Field(default=None, ge=1, description="Annotation sp-block.")
    ra_block: int | None = Field(default=None, ge=1, description="Annotation ra-block.")
    recover_policy_path: Literal["", "pod"] = Field(
        default="", description="Annotation huawei.com/recover_policy_path."
    )
    min_available: int | None = Field(
        default=None, ge=1, description="Annotation huawei.com/schedule_minAvailable."
    )
    affinity_config: str = Field(default="", description="Annotation huawei.com/affinity-config.")
    fault_filter_codes: str = Field(
        default="", description="Annotation huawei.com/schedule.filter.faultCode."
    )
    fault_filter: str = Field(
        default="",
        description="Annotation huawei.com/schedule.filter.faultLevel, as RestartRequest:30.",
    )
    backoff_limit: int | None = Field(
        default=None,
        ge=0,
        description="An AscendJob's runPolicy.backoffLimit. Empty: none, and no limit.",
    )
    env: bool | None = Field(
        default=None,
        description="Whether containers get MindCluster's variables. Empty: if it recovers the "
        "job; so below.",
    )
    ports: bool | None = Field(default=None, description="Its ports 2222, 8000 and 9601.")
    reset_config: bool | None = Field(
        default=None, description="The folder in which it tells processes to begin anew."
    )
    data_trace: bool | None = Field(
        default=None, description="The folders of its profiling: the switch and what is written."
    )
    driver: bool | None = Field(default=None, description="The node's driver.")
