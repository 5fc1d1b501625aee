"""Define the fields of a job in forms and files: cluster, checkpoints, policy, node check, pods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from rekindle.blocks.forms import Form, field_of, setting
from rekindle.checkpoints.retention import Retention
from rekindle.engines.kubernetes.manifests.division import deciding
from rekindle.engines.kubernetes.manifests.settings import KubernetesSettings
from rekindle.engines.kubernetes.manifests.validation import check_words
from rekindle.errors import UsageError
from rekindle.recovery.node_check.evidence import NodeCheckLimits
from rekindle.recovery.policy.interval import AUTO
from rekindle.recovery.policy.policy import Policy
from rekindle.recovery.policy.policy_file import policy_of_keys

KubernetesPods = Annotated[KubernetesSettings, Form("Kubernetes", check_words)]
RecoveryPolicy = Annotated[Policy, Form("Policy")]
Nodes = Annotated[int, Field(ge=1, description="Number of nodes. Allowed: at least 1.")]
ProcessesPerNode = Annotated[
    int,
    Field(
        ge=1,
        description="Ranks on each node, usually one per accelerator. Allowed: at least 1.",
    ),
]
MinNodes = Annotated[
    int,
    Field(
        ge=0,
        description="Fewest nodes with which training may continue after others are lost; 0: all "
        "nodes are needed. Allowed: at least 0.",
    ),
]
Spares = Annotated[
    int,
    Field(
        ge=0,
        description="Spare nodes, each ready to replace a lost node immediately. Allowed: at least "
        "0.",
    ),
]

DeviceName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]

Keep = Annotated[Retention, Form("Keep")]


def _check_annotations(annotations: dict[str, str]) -> dict[str, str]:
    if annotations:
        try:
            policy_of_keys(annotations)
        except UsageError as error:
            raise ValueError(str(error)) from error
    return annotations


Annotations = Annotated[
    dict[str, str],
    AfterValidator(_check_annotations),
    Field(
        title="Labels and annotations",
        description="Labels and annotations of ModelArts or MindCluster, instead of the policy, "
        'such as {"fault-tolerance/job-retry-num": "3"}, or {"process-recover-enable": "on", '
        '"recover-strategy": "retry,recover"}. They are converted as by `rekindle run --policy`. '
        "The key backoffLimit is that of runPolicy. Empty: the policy applies.",
    ),
]


def refuse_both(annotations: Mapping[str, str], policy: Policy) -> None:
    """Check that a person gives annotations or a policy. Raises ValueError."""
    if annotations and policy != Policy():
        raise ValueError("annotations and policy exclude each other; give one of them")


def policy_of_rekindle(policy: Policy, pods: KubernetesSettings | None) -> Policy:
    """Return the part of a job's policy that Rekindle carries out; MindCluster has the rest.

    Raises UsageError: the policy and the settings of the pods contradict each other.
    """
    return policy if pods is None else deciding(policy, pods)


def left_to_mindcluster(policy: Policy, pods: KubernetesSettings | None) -> str:
    """Return the names of the strategies of a job's policy that only MindCluster carries out."""
    kept = policy_of_rekindle(policy, pods).strategies
    return ", ".join(each.value for each in policy.strategies if each not in kept)


class NodeCheck(BaseModel):
    """The check of each node before it takes part in training."""

    model_config = ConfigDict(extra="forbid", title="Node Check")

    enabled: bool = Field(
        default=False,
        description="Whether the job measures devices and links of each node before the node takes "
        "part. The job isolates a faulty node and requests another one.",
    )
    exclude_straggler: bool = Field(
        default=False,
        description="Whether the job also isolates a slow node.",
    )
    compute_factor: float = field_of(NodeCheckLimits, "compute_factor")
    link_factor: float = field_of(NodeCheckLimits, "link_factor")
    timeout_s: float = field_of(NodeCheckLimits, "timeout_s")

    def to_limits(self) -> NodeCheckLimits:
        """Return the limits of the check."""
        return NodeCheckLimits(
            compute_factor=self.compute_factor,
            link_factor=self.link_factor,
            timeout_s=self.timeout_s,
        )


class CheckpointDirectory(BaseModel):
    """The location of checkpoints, and their interval."""

    model_config = ConfigDict(extra="forbid", title="Checkpoint")

    path: str = Field(
        default="",
        description="Folder for checkpoints, best on storage that all nodes share, relative to "
        "the working directory; or s3://bucket/prefix?endpoint=https://host:port. "
        "Each job has its own folder below it. Empty: a folder in the job's own "
        "directory.",
    )
    every: int = Field(
        default=0,
        ge=0,
        description="Steps between two checkpoints; 0: none. A new attempt of the job continues "
        "from the newest valid one. Allowed: at least 0.",
    )
    automatic: bool = Field(
        default=False,
        description="Whether Rekindle chooses the steps between two checkpoints, from the duration "
        "of a checkpoint and the rate of faults; the number above then has no effect.",
    )
    required: bool = Field(
        default=True,
        description="Whether the flow run fails if training has finished, but the job could not "
        "write its last checkpoint. Otherwise it ends as CompletedWithoutCheckpoint.",
    )
    keep: Keep = setting(
        Retention(), "Which checkpoints the job keeps. Without any rule: all of them."
    )

    @property
    def interval(self) -> int | Literal["auto"]:
        """Return the steps between two checkpoints, or "auto", for the description of the job."""
        return AUTO if self.automatic else self.every
