"""What people say of a job's pods: values alone (`checking` says whether they can be meant)."""

from __future__ import annotations

import enum
import math
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from rekindle.engines.kubernetes.manifests.ascend import STRATEGIES, Ascend
from rekindle.job.spec import JobSpec
from rekindle.settings import CHOICES

PULL = ("", "Always", "IfNotPresent", "Never")


class WorkloadKind(str, enum.Enum):
    """What Kubernetes calls a job."""

    INDEXED_JOB = "indexed-job"
    JOBSET = "jobset"
    ASCENDJOB = "ascendjob"
    VOLCANO_JOB = "volcano-job"
    TRAINJOB = "trainjob"
    PYTORCHJOB = "pytorchjob"


class Recovery(str, enum.Enum):
    """Who mends a job."""

    REKINDLE = "rekindle"
    MINDCLUSTER = "mindcluster"  # its labels are set, and its files are mounted


class IsolationMode(str, enum.Enum):
    """What becomes of a host that is isolated, besides that no job of ours is placed there."""

    AVOID = "avoid"  # nothing: others may use it
    CORDON = "cordon"
    TAINT = "taint"


class Volume(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A volume and where it is mounted. Of claim to secret at most one; none: an emptyDir."""

    name: Annotated[str, Meta(description="Its name, of a-z 0-9 and -.")]
    mount_path: Annotated[str, Meta(description="Where it is in the container; an absolute path.")]
    claim: Annotated[str, Meta(description="A PersistentVolumeClaim.")] = ""
    host_path: Annotated[str, Meta(description="A path of the node.")] = ""
    config_map: Annotated[str, Meta(description="A ConfigMap.")] = ""
    secret: Annotated[str, Meta(description="A Secret.")] = ""
    empty_dir: Annotated[bool, Meta(description="An empty folder, which goes with the pod.")] = (
        False
    )
    read_only: Annotated[bool, Meta(description="Whether it cannot be written to.")] = False

    @property
    def sources(self) -> list[str]:
        """The fields that say what is mounted."""
        every = ("claim", "host_path", "config_map", "secret", "empty_dir")
        return [name for name in every if getattr(self, name)]


class Peer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who else may reach a coordinator: pods of a namespace, with these labels, or addresses."""

    namespace: Annotated[str, Meta(description="Pods of this namespace; empty: the job's own.")] = (
        ""
    )
    labels: Annotated[dict[str, str], Meta(description="Pods with these labels.")] = {}
    cidr: Annotated[str, Meta(description="Addresses, as 10.0.0.0/8; stands alone.")] = ""


class Coordinator(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The pod of the job's coordinator. Its field peers is besides the pods of flow runs."""

    image: Annotated[
        str, Meta(description="An image with Rekindle installed. Empty: that of the nodes.")
    ] = ""
    cpu: Annotated[str, Meta(description="Processors that it asks for.")] = "100m"
    memory: Annotated[str, Meta(description="Memory that it asks for, and its limit.")] = "256Mi"
    claim: Annotated[
        str,
        Meta(
            description="PersistentVolumeClaim for the job's record. Empty: the record is lost "
            "when the pod is placed anew."
        ),
    ] = ""
    peers: Annotated[
        tuple[Peer, ...],
        Meta(
            description="Who may reach it besides the job's pods and, in its namespace, those "
            "labelled rekindle.dev/role: flow."
        ),
    ] = ()


class KubernetesSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the nodes of a job become pods of a cluster."""

    image: Annotated[
        str,
        Meta(
            title="Image",
            description="Image with Rekindle and the training script; the job's paths are paths in"
            " it.",
        ),
    ]
    kind: Annotated[
        WorkloadKind,
        Meta(
            title="WorkloadKind",
            description="What the cluster calls the job: indexed-job is in every cluster, the "
            "others need their controllers.",
        ),
    ] = WorkloadKind.INDEXED_JOB
    namespace: Annotated[str, Meta(title="Namespace", description="Where it is made.")] = "default"
    device: Annotated[
        str,
        Meta(
            title="Device",
            description="Resource name of the accelerators, as nvidia.com/gpu or "
            "huawei.com/Ascend910. Empty: none.",
        ),
    ] = ""
    devices_per_node: Annotated[
        int,
        Meta(
            ge=0,
            title="Devices per node",
            description="How many of them a pod gets; 0: one for each of its ranks.",
        ),
    ] = 0
    cpu: Annotated[
        str, Meta(title="CPU", description="Processors that a pod asks for, as 8 or 500m.")
    ] = ""
    memory: Annotated[
        str, Meta(title="Memory", description="Memory that a pod asks for, and its limit, as 64Gi.")
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
            description="ServiceAccount of the pods; its token is not mounted.",
        ),
    ] = ""
    image_pull_policy: Annotated[
        str,
        Meta(
            extra={CHOICES: PULL},
            title="Image pull policy",
            description="When images are pulled. Empty: as the cluster does.",
        ),
    ] = ""
    image_pull_secrets: Annotated[
        tuple[str, ...],
        Meta(title="Image pull secrets", description="Secrets with which images are pulled."),
    ] = ()
    queue: Annotated[
        str,
        Meta(
            title="Queue",
            description="Queue that the job waits in: Volcano's, of other kinds Kueue's.",
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
            description="Taints that the pods tolerate, as pods have it: key, operator, value, "
            "effect.",
        ),
    ] = ()
    anti_affinity: Annotated[
        bool | None,
        Meta(
            title="One node per host",
            description="Whether a host holds one node of the job at most. Empty: if a device is "
            "named, or the pods use their hosts' network.",
        ),
    ] = None
    topology_key: Annotated[
        str,
        Meta(
            title="Topology key",
            description="Label of nodes, as that of a rack, whose value the job's nodes share as "
            "far as there is room.",
        ),
    ] = ""
    gang: Annotated[
        bool | None,
        Meta(
            title="All at once",
            description="Whether all pods are placed at once or none. Empty: if Volcano places "
            "them.",
        ),
    ] = None
    isolated_hosts: Annotated[
        IsolationMode,
        Meta(
            title="Isolated hosts",
            description="What becomes of a host that has broken the job: avoid (jobs of Rekindle "
            "keep off it), or also cordon or taint, which keeps everybody off it until it is "
            "released. Needs rights on nodes.",
        ),
    ] = IsolationMode.AVOID
    termination_grace_s: Annotated[
        int,
        Meta(
            ge=0,
            title="Grace",
            description="Seconds that a pod may take to end. 0: as long as last words may take, "
            "and 30 s.",
        ),
    ] = 0
    volumes: Annotated[
        tuple[Volume, ...], Meta(title="Volumes", description="What is mounted into the pods.")
    ] = ()
    home: Annotated[
        str,
        Meta(
            description="Folder, on a volume that lasts, for what ranks put out and record, below "
            "it one for each job. Empty: it goes with the pods."
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
            description="Whether the pods use their hosts' network. No NetworkPolicy holds there.",
        ),
    ] = False
    network_policy: Annotated[
        bool,
        Meta(
            title="Network policy",
            description="Whether others are kept from the job's pods and its coordinator.",
        ),
    ] = True
    coordinator: Annotated[
        Coordinator, Meta(title="Coordinator", description="The coordinator's pod.")
    ] = Coordinator()
    recovery: Annotated[
        Recovery,
        Meta(
            title="Recovery",
            description="Who mends the job. mindcluster: Rekindle, and MindCluster by what is said"
            " under Ascend; for the kinds ascendjob and volcano-job.",
        ),
    ] = Recovery.REKINDLE
    recover_strategy: Annotated[
        tuple[str, ...],
        Meta(
            extra={CHOICES: STRATEGIES},
            title="MindCluster's strategies",
            description="How MindCluster recovers processes, in its order; for the kind ascendjob.",
        ),
    ] = ()
    ascend: Annotated[
        Ascend, Meta(title="Ascend", description="What MindCluster is told of the job.")
    ] = Ascend()
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
        """Whether MindCluster is to mend the job, too."""
        return self.recovery is Recovery.MINDCLUSTER

    @property
    def process_level(self) -> bool:
        """Whether MindCluster is to recover processes, not only to place the job anew."""
        return self.by_mindcluster and bool(self.recover_strategy)

    @property
    def one_per_host(self) -> bool:
        """Whether no host may hold two nodes of the job."""
        alone = bool(self.device) or self.host_network  # where two would be in each other's way
        return alone if self.anti_affinity is None else self.anti_affinity


def replicas(spec: JobSpec) -> int:
    """Return how many pods a job has: its nodes and those in reserve."""
    return spec.nodes + spec.spares


def devices(spec: JobSpec, pods: KubernetesSettings) -> int:
    """Return how many devices each pod asks for."""
    return (pods.devices_per_node or spec.processes_per_node) if pods.device else 0


def last_words_s(spec: JobSpec) -> int:
    """Return the shortest grace in which an agent can write its node's last words."""
    return math.ceil(spec.policy.dump_timeout_s) + 30


def grace_s(spec: JobSpec, pods: KubernetesSettings) -> int:
    """Return how long a pod that is told to end may take."""
    return pods.termination_grace_s or last_words_s(spec)
