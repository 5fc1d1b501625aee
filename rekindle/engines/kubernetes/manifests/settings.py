"""Declare the settings of a job's pods; `validation` checks the values."""

from __future__ import annotations

import enum
import math
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from rekindle.engines.kubernetes.manifests.ascend import Ascend
from rekindle.job.spec import JobSpec
from rekindle.settings import CHOICES


class WorkloadKind(str, enum.Enum):
    """The kind of a job's workload in Kubernetes."""

    INDEXED_JOB = "indexed-job"
    JOBSET = "jobset"
    ASCENDJOB = "ascendjob"
    VOLCANO_JOB = "volcano-job"
    TRAINJOB = "trainjob"
    PYTORCHJOB = "pytorchjob"


class Recovery(str, enum.Enum):
    """The system that recovers a job."""

    REKINDLE = "rekindle"
    MINDCLUSTER = "mindcluster"  # Rekindle sets MindCluster's labels, and mounts its files


class IsolationMode(str, enum.Enum):
    """The treatment of an isolated host; Rekindle places no job there in any case."""

    AVOID = "avoid"  # no mark: other pods may use it
    CORDON = "cordon"
    TAINT = "taint"


class Volume(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A volume and its mount point. Give at most one source; without a source it is an emptyDir."""

    name: Annotated[str, Meta(description="Name of the volume, of a-z 0-9 and -.")]
    mount_path: Annotated[str, Meta(description="Mount point in the container; an absolute path.")]
    claim: Annotated[str, Meta(description="A PersistentVolumeClaim.")] = ""
    host_path: Annotated[str, Meta(description="A path of the node.")] = ""
    config_map: Annotated[str, Meta(description="A ConfigMap.")] = ""
    secret: Annotated[str, Meta(description="A Secret.")] = ""
    empty_dir: Annotated[bool, Meta(description="An empty folder, removed with the pod.")] = False
    read_only: Annotated[bool, Meta(description="Whether the mount is read-only.")] = False

    @property
    def sources(self) -> list[str]:
        """Return the names of the fields that state the source."""
        every = ("claim", "host_path", "config_map", "secret", "empty_dir")
        return [name for name in every if getattr(self, name)]


class Peer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A peer that may reach the coordinator: pods of a namespace with labels, or addresses."""

    namespace: Annotated[str, Meta(description="Pods of this namespace; empty: the job's own.")] = (
        ""
    )
    labels: Annotated[dict[str, str], Meta(description="Pods with these labels.")] = {}
    cidr: Annotated[
        str, Meta(description="Addresses, such as 10.0.0.0/8; excludes the two others.")
    ] = ""


class Coordinator(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The pod of the job's coordinator."""

    image: Annotated[
        str, Meta(description="An image with Rekindle installed. Empty: the image of the nodes.")
    ] = ""
    cpu: Annotated[str, Meta(description="CPUs that the pod requests.")] = "100m"
    memory: Annotated[str, Meta(description="Memory that the pod requests, and its limit.")] = (
        "256Mi"
    )
    claim: Annotated[
        str,
        Meta(
            description="PersistentVolumeClaim for the coordinator's job directory. Empty: the "
            "directory is lost with the pod, and the next coordinator continues from the flow's "
            "copy of the journal."
        ),
    ] = ""
    peers: Annotated[
        tuple[Peer, ...],
        Meta(
            description="Peers that may reach the coordinator, besides the job's pods and the pods "
            "of its namespace with the label rekindle.dev/role: flow."
        ),
    ] = ()


class KubernetesSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings for the pods of a job's nodes."""

    image: Annotated[
        str,
        Meta(
            title="Image",
            description="Image with Rekindle and the training script; the job's paths are paths in"
            " this image.",
        ),
    ]
    kind: Annotated[
        WorkloadKind,
        Meta(
            title="Kind",
            description="Kind of the workload. Every cluster has indexed-job; the others need "
            "their controllers.",
        ),
    ] = WorkloadKind.INDEXED_JOB
    namespace: Annotated[str, Meta(title="Namespace", description="Namespace of the job.")] = (
        "default"
    )
    device: Annotated[
        str,
        Meta(
            title="Device",
            description="Resource name of the accelerators, such as nvidia.com/gpu or "
            "huawei.com/Ascend910. Empty: none.",
        ),
    ] = ""
    devices_per_node: Annotated[
        int,
        Meta(
            ge=0,
            title="Devices per node",
            description="Accelerators of each pod; 0: one for each of its ranks.",
        ),
    ] = 0
    cpu: Annotated[
        str, Meta(title="CPU", description="CPUs that a pod requests, such as 8 or 500m.")
    ] = ""
    memory: Annotated[
        str,
        Meta(
            title="Memory", description="Memory that a pod requests, and its limit, such as 64Gi."
        ),
    ] = ""
    shared_memory: Annotated[
        str,
        Meta(
            title="Shared memory",
            description="Size of /dev/shm. Empty: as much as the pod's memory allows.",
        ),
    ] = ""
    service_account: Annotated[
        str,
        Meta(
            title="Service account",
            description="ServiceAccount of the pods; Rekindle does not mount its token.",
        ),
    ] = ""
    image_pull_policy: Annotated[
        str,
        Meta(
            extra={CHOICES: ("", "Always", "IfNotPresent", "Never")},
            title="Image pull policy",
            description="When the node pulls images. Empty: the default of the cluster.",
        ),
    ] = ""
    image_pull_secrets: Annotated[
        tuple[str, ...],
        Meta(title="Image pull secrets", description="Secrets for pulling images."),
    ] = ()
    queue: Annotated[
        str,
        Meta(
            title="Queue",
            description=(
                "Queue of the job: a queue of Volcano if Volcano places the pods, otherwise a "
                "queue of Kueue."
            ),
        ),
    ] = ""
    priority_class: Annotated[
        str, Meta(title="Priority class", description="PriorityClass of the pods.")
    ] = ""
    node_selector: Annotated[
        dict[str, str],
        Meta(title="Node selector", description="Labels that a pod's node must have."),
    ] = {}
    tolerations: Annotated[
        tuple[dict[str, Any], ...],
        Meta(
            title="Tolerations",
            description="Tolerations of the pods, in the format of Kubernetes: key, operator, "
            "value, effect.",
        ),
    ] = ()
    anti_affinity: Annotated[
        bool | None,
        Meta(
            title="One node per host",
            description="Whether a host may have only one node of the job. Empty: yes if a device "
            "is named, or if the pods use their hosts' network.",
        ),
    ] = None
    topology_key: Annotated[
        str,
        Meta(
            title="Topology key",
            description="Label of nodes, for example the label of a rack. Kubernetes prefers "
            "nodes with one value for all pods of the job.",
        ),
    ] = ""
    gang: Annotated[
        bool | None,
        Meta(
            title="All at once",
            description="Whether the scheduler places all pods or none. Empty: yes if Volcano "
            "places them.",
        ),
    ] = None
    isolated_hosts: Annotated[
        IsolationMode,
        Meta(
            title="Isolated hosts",
            description="The reaction to a host that has broken the job. With avoid, jobs of "
            "Rekindle do not use the host. With cordon or taint, other pods do not "
            "use it either until a person releases it; this needs rights on nodes.",
        ),
    ] = IsolationMode.AVOID
    termination_grace_s: Annotated[
        int,
        Meta(
            ge=0,
            title="Grace",
            description="Seconds that a pod may take to end. 0: dump_timeout_s of the policy, and "
            "30 s; a smaller value is refused.",
        ),
    ] = 0
    volumes: Annotated[
        tuple[Volume, ...], Meta(title="Volumes", description="Volumes of the pods.")
    ] = ()
    home: Annotated[
        str,
        Meta(
            description="Folder for logs and records of ranks, on a persistent volume, with a "
            "folder for each job. Empty: Kubernetes removes them with the pods."
        ),
    ] = ""
    labels: Annotated[
        dict[str, str], Meta(title="Labels", description="Labels of the job and its pods.")
    ] = {}
    annotations: Annotated[
        dict[str, str],
        Meta(title="Annotations", description="Annotations of the job and its pods."),
    ] = {}
    env_from_secrets: Annotated[
        tuple[str, ...],
        Meta(
            title="Environment from Secrets",
            description="Secrets whose keys become environment variables.",
        ),
    ] = ()
    host_network: Annotated[
        bool,
        Meta(
            title="Host network",
            description="Whether the pods use their hosts' network. A NetworkPolicy has no effect "
            "there.",
        ),
    ] = False
    network_policy: Annotated[
        bool,
        Meta(
            title="Network policy",
            description="Whether a NetworkPolicy closes the job's pods and its coordinator to "
            "others.",
        ),
    ] = True
    coordinator: Annotated[
        Coordinator, Meta(title="Coordinator", description="The coordinator's pod.")
    ] = Coordinator()
    recovery: Annotated[
        Recovery,
        Meta(
            title="Recovery",
            description="The system that recovers the job. With mindcluster, Rekindle and "
            "MindCluster recover it, with the settings under Ascend; only for the "
            "kinds ascendjob and volcano-job.",
        ),
    ] = Recovery.REKINDLE
    recover_strategy: Annotated[
        tuple[str, ...],
        Meta(
            extra={
                CHOICES: (
                    *("retry", "recover", "recover-in-place"),
                    *("dump", "exit", "elastic-training"),
                )
            },
            title="MindCluster's strategies",
            description="Strategies of MindCluster for processes, in its order; for the kind "
            "ascendjob.",
        ),
    ] = ()
    ascend: Annotated[Ascend, Meta(title="Ascend", description="Settings for MindCluster.")] = (
        Ascend()
    )
    overrides: Annotated[
        dict[str, Any],
        Meta(
            title="Patch of the workload",
            description="Strategic merge patch of the workload's manifest.",
        ),
    ] = {}
    pod_overrides: Annotated[
        dict[str, Any],
        Meta(
            title="Patch of the pods",
            description="Strategic merge patch of each pod template: metadata and spec.",
        ),
    ] = {}

    @property
    def by_mindcluster(self) -> bool:
        """Return whether MindCluster also recovers the job."""
        return self.recovery is Recovery.MINDCLUSTER

    @property
    def process_level(self) -> bool:
        """Return whether MindCluster recovers processes, and not only reschedules the job."""
        return self.by_mindcluster and bool(self.recover_strategy)

    @property
    def one_per_host(self) -> bool:
        """Return whether a host may hold only one node of the job."""
        alone = bool(self.device) or self.host_network  # nodes would share devices or ports
        return alone if self.anti_affinity is None else self.anti_affinity


def replicas(spec: JobSpec) -> int:
    """Return the number of pods of a job: its nodes and its spares."""
    return spec.nodes + spec.spares


def devices(spec: JobSpec, pods: KubernetesSettings) -> int:
    """Return the number of devices that each pod requests."""
    return (pods.devices_per_node or spec.processes_per_node) if pods.device else 0


def final_checkpoint_s(spec: JobSpec) -> int:
    """Return the shortest grace period, in seconds, for the final checkpoint of a node."""
    return math.ceil(spec.policy.dump_timeout_s) + 30


def grace_s(spec: JobSpec, pods: KubernetesSettings) -> int:
    """Return the grace period of a pod, in seconds."""
    return pods.termination_grace_s or final_checkpoint_s(spec)
