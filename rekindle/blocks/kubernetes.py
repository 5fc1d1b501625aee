"""A job's pods as a user configures them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, model_validator

from rekindle.blocks.ascend import AscendSettings
from rekindle.errors import UsageError

if TYPE_CHECKING:
    from rekindle.engines.kubernetes.manifests.settings import Pods

KindName = Literal["indexed-job", "jobset", "ascendjob", "volcano-job", "trainjob", "pytorchjob"]


class PodVolume(BaseModel):
    """A volume of the job's pods; of its sources at most one, none: an empty folder."""

    model_config = ConfigDict(extra="forbid", title="Volume")

    name: str = Field(description="Its name, of a-z 0-9 and -.")
    mount_path: str = Field(description="Where it is in the container; an absolute path.")
    claim: str = Field(default="", description="A PersistentVolumeClaim.")
    host_path: str = Field(default="", description="A path of the node.")
    config_map: str = Field(default="", description="A ConfigMap.")
    secret: str = Field(default="", description="A Secret.")
    empty_dir: bool = Field(default=False, description="An empty folder, which goes with the pod.")
    read_only: bool = Field(default=False, description="Whether it cannot be written to.")


class CoordinatorPeer(BaseModel):
    """Who else may reach a coordinator."""

    model_config = ConfigDict(extra="forbid", title="Peer")

    namespace: str = Field(default="", description="Pods of this namespace; empty: the job's own.")
    labels: dict[str, str] = Field(default={}, description="Pods with these labels.")
    cidr: str = Field(default="", description="Addresses, as 10.0.0.0/8; stands alone.")


class CoordinatorPod(BaseModel):
    """The pod of a job's coordinator."""

    model_config = ConfigDict(extra="forbid", title="Coordinator")

    image: str = Field(
        default="", description="An image with Rekindle installed. Empty: that of the nodes."
    )
    cpu: str = Field(default="100m", description="Processors that it asks for.")
    memory: str = Field(default="256Mi", description="Memory that it asks for, and its limit.")
    claim: str = Field(
        default="",
        description="PersistentVolumeClaim for the job's record. Empty: the record is lost when "
        "the pod is placed anew.",
    )
    peers: list[CoordinatorPeer] = Field(
        default=[],
        description="Who may reach it besides the job's pods and, in its namespace, those labelled "
        "rekindle.dev/role: flow.",
    )


class KubernetesPods(BaseModel):
    """How the nodes of a job become pods of a cluster."""

    model_config = ConfigDict(extra="forbid", title="Kubernetes")

    image: str = Field(
        title="Image",
        description="Image with Rekindle and the training script; the job's paths are paths in it.",
    )
    kind: KindName = Field(
        default="indexed-job",
        title="Kind",
        description="What the cluster calls the job: indexed-job is in every cluster, the others "
        "need their controllers.",
    )
    namespace: str = Field(default="default", title="Namespace", description="Where it is made.")
    device: str = Field(
        default="",
        title="Device",
        description="Resource name of the accelerators, as nvidia.com/gpu or huawei.com/Ascend910. "
        "Empty: none.",
    )
    devices_per_node: int = Field(
        default=0,
        ge=0,
        title="Devices per node",
        description="How many of them a pod gets; 0: one for each of its ranks.",
    )
    cpu: str = Field(
        default="", title="CPU", description="Processors that a pod asks for, as 8 or 500m."
    )
    memory: str = Field(
        default="",
        title="Memory",
        description="Memory that a pod asks for, and its limit, as 64Gi.",
    )
    shared_memory: str = Field(
        default="",
        title="Shared memory",
        description="Size of /dev/shm. Empty: as much as the pod's memory allows.",
    )
    service_account: str = Field(
        default="",
        title="Service account",
        description="ServiceAccount of the pods; its token is not mounted.",
    )
    image_pull_policy: Literal["", "Always", "IfNotPresent", "Never"] = Field(
        default="",
        title="Image pull policy",
        description="When images are pulled. Empty: as the cluster does.",
    )
    image_pull_secrets: list[str] = Field(
        default=[], title="Image pull secrets", description="Secrets with which images are pulled."
    )
    queue: str = Field(
        default="",
        title="Queue",
        description="Queue that the job waits in: Volcano's, of other kinds Kueue's.",
    )
    priority_class: str = Field(
        default="", title="Priority class", description="PriorityClass of the pods."
    )
    node_selector: dict[str, str] = Field(
        default={}, title="Node selector", description="Labels that a pod's node must have."
    )
    tolerations: list[dict[str, Any]] = Field(
        default=[],
        title="Tolerations",
        description="Taints that the pods tolerate, as pods have it: key, operator, value, effect.",
    )
    anti_affinity: bool | None = Field(
        default=None,
        title="One node per host",
        description="Whether a host holds one node of the job at most. Empty: if a device is "
        "named, or the pods use their hosts' network.",
    )
    topology_key: str = Field(
        default="",
        title="Topology key",
        description="Label of nodes, as that of a rack, whose value the job's nodes share as far "
        "as there is room.",
    )
    gang: bool | None = Field(
        default=None,
        title="All at once",
        description="Whether all pods are placed at once or none. Empty: if Volcano places them.",
    )
    isolated_hosts: Literal["avoid", "cordon", "taint"] = Field(
        default="avoid",
        title="Isolated hosts",
        description="What becomes of a host that has broken the job: avoid (jobs of Rekindle keep "
        "off it), or also cordon or taint, which keeps everybody off it until it is released. "
        "Needs rights on nodes.",
    )
    termination_grace_s: int = Field(
        default=0,
        ge=0,
        title="Grace",
        description="Seconds that a pod may take to end. 0: as long as last words may take, and "
        "30 s.",
    )
    volumes: list[PodVolume] = Field(
        default=[], title="Volumes", description="What is mounted into the pods."
    )
    home: str = Field(
        default="",
        description="Folder, on a volume that lasts, for what ranks put out and record, below it "
        "one for each job. Empty: it goes with the pods.",
    )
    labels: dict[str, str] = Field(
        default={}, title="Labels", description="Labels of the job and its pods."
    )
    annotations: dict[str, str] = Field(
        default={}, title="Annotations", description="Annotations of the job and its pods."
    )
    env_from_secrets: list[str] = Field(
        default=[],
        title="Environment from Secrets",
        description="Secrets whose keys become environment variables.",
    )
    host_network: bool = Field(
        default=False,
        title="Host network",
        description="Whether the pods use their hosts' network. No NetworkPolicy holds there.",
    )
    network_policy: bool = Field(
        default=True,
        title="Network policy",
        description="Whether others are kept from the job's pods and its coordinator.",
    )
    coordinator: CoordinatorPod = Field(
        default=CoordinatorPod(), title="Coordinator", description="The coordinator's pod."
    )
    recovery: Literal["rekindle", "mindcluster"] = Field(
        default="rekindle",
        title="Recovery",
        description="Who mends the job. mindcluster: Rekindle, and MindCluster by what is said "
        "under Ascend; for the kinds ascendjob and volcano-job.",
    )
    recover_strategy: list[
        Literal["retry", "recover", "recover-in-place", "dump", "exit", "elastic-training"]
    ] = Field(
        default=[],
        title="MindCluster's strategies",
        description="How MindCluster recovers processes, in its order; for the kind ascendjob.",
    )
    ascend: AscendSettings = Field(
        default=AscendSettings(),
        title="Ascend",
        description="What MindCluster is told of the job.",
    )
    overrides: dict[str, Any] = Field(
        default={},
        title="Patch of the workload",
        description="Strategic merge patch of the workload's manifest.",
    )
    pod_overrides: dict[str, Any] = Field(
        default={},
        title="Patch of the pods",
        description="Strategic merge patch of each pod template: metadata and spec.",
    )

    @model_validator(mode="after")
    def _check(self) -> KubernetesPods:
        self.to_pods()
        return self

    def to_pods(self) -> Pods:
        """Return the pods as the engine reads them. Raises ValueError: it cannot be meant so."""
        # Prefect's server imports the blocks, and needs no engine.
        from rekindle.engines.kubernetes.manifests.settings import Pods
        from rekindle.engines.kubernetes.manifests.validation import check_words

        pods = msgspec.convert(self.model_dump(), Pods)
        try:
            check_words(pods)
        except UsageError as error:
            raise ValueError(str(error)) from error
        return pods
