"""What people say of a job's pods: values alone (`checking` says whether they can be meant)."""

from __future__ import annotations

import enum
import math
from typing import Any

import msgspec

from rekindle.engines.kubernetes.manifests.ascend import Ascend
from rekindle.job.spec import JobSpec


class Kind(str, enum.Enum):
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


class Isolation(str, enum.Enum):
    """What becomes of a host that is isolated, besides that no job of ours is placed there."""

    AVOID = "avoid"  # nothing: others may use it
    CORDON = "cordon"
    TAINT = "taint"


class Volume(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A volume and where it is mounted. Of claim to secret at most one; none: an emptyDir."""

    name: str
    mount_path: str
    claim: str = ""
    host_path: str = ""
    config_map: str = ""
    secret: str = ""
    empty_dir: bool = False
    read_only: bool = False

    @property
    def sources(self) -> list[str]:
        """The fields that say what is mounted."""
        every = ("claim", "host_path", "config_map", "secret", "empty_dir")
        return [name for name in every if getattr(self, name)]


class Peer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who else may reach a coordinator: pods of a namespace, with these labels, or addresses."""

    namespace: str = ""
    labels: dict[str, str] = {}
    cidr: str = ""


class Coordinator(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The pod of the job's coordinator.

    image: "": that of the nodes. claim: a PersistentVolumeClaim for its record; "": an emptyDir,
    which is lost with the pod. peers: who may reach it besides the job's pods and flow runs' pods
    of the same namespace.
    """

    image: str = ""
    cpu: str = "100m"
    memory: str = "256Mi"
    claim: str = ""
    peers: tuple[Peer, ...] = ()


class Pods(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a job's nodes become pods.

    device: name of the extended resource, "": none. devices_per_node: 0: one for each rank.
    shared_memory: size of /dev/shm, "": whatever the node's memory allows.
    queue: Volcano's, of other kinds Kueue's.
    anti_affinity: whether a host holds one node of the job at most; None: if a device is named,
    or the pods use their hosts' network.
    topology_key: label of nodes whose value the job's nodes share as far as there is room.
    gang: whether all pods are placed at once or none; None: where the kind always can.
    home: folder, on a volume that lasts, for what ranks record; "": it goes with the pods.
    termination_grace_s: 0: as long as last words may take, and 30 s.
    recover_strategy: MindCluster's, in its words.
    overrides, pod_overrides: strategic merge patches of the workload, and of each pod template.
    """

    image: str
    kind: Kind = Kind.INDEXED_JOB
    namespace: str = "default"
    device: str = ""
    devices_per_node: int = 0
    cpu: str = ""
    memory: str = ""
    shared_memory: str = ""
    service_account: str = ""
    image_pull_policy: str = ""
    image_pull_secrets: tuple[str, ...] = ()
    queue: str = ""
    priority_class: str = ""
    node_selector: dict[str, str] = {}
    tolerations: tuple[dict[str, Any], ...] = ()
    anti_affinity: bool | None = None
    topology_key: str = ""
    gang: bool | None = None
    isolated_hosts: Isolation = Isolation.AVOID
    termination_grace_s: int = 0
    volumes: tuple[Volume, ...] = ()
    home: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    env_from_secrets: tuple[str, ...] = ()
    host_network: bool = False
    network_policy: bool = True
    coordinator: Coordinator = Coordinator()
    recovery: Recovery = Recovery.REKINDLE
    recover_strategy: tuple[str, ...] = ()
    ascend: Ascend = Ascend()
    overrides: dict[str, Any] = {}
    pod_overrides: dict[str, Any] = {}

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


def devices(spec: JobSpec, pods: Pods) -> int:
    """Return how many devices each pod asks for."""
    return (pods.devices_per_node or spec.processes_per_node) if pods.device else 0


def last_words_s(spec: JobSpec) -> int:
    """Return the shortest grace in which an agent can write its node's last words."""
    return math.ceil(spec.policy.dump_timeout_s) + 30


def grace_s(spec: JobSpec, pods: Pods) -> int:
    """Return how long a pod that is told to end may take."""
    return pods.termination_grace_s or last_words_s(spec)
