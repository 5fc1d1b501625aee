"""Define the parameter of the train flow: the description of one training run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)

from rekindle import names
from rekindle.blocks.forms import BlockChoice, mistakes, setting
from rekindle.blocks.job_fields import (
    Annotations,
    CheckpointDirectory,
    DeviceName,
    KubernetesPods,
    MinNodes,
    NodeCheck,
    Nodes,
    ProcessesPerNode,
    RecoveryPolicy,
    Spares,
    policy_of_rekindle,
    refuse_both,
)
from rekindle.checkpoints.location import absolute, below
from rekindle.errors import UsageError
from rekindle.job.spec import (
    EntryKind,
    Framework,
    JobSpec,
    check,
    check_elsewhere,
    job_directory,
    on_this_machine,
)
from rekindle.recovery.policy.policy import Policy
from rekindle.recovery.policy.policy_file import policy_of_keys

DEFAULT_NAME = "train"
_OF_CLUSTER = ("nodes", "processes_per_node", "min_nodes", "spares")
_VARIABLE = re.compile(r"[^=\0]+")
# Not in the form's schema: the server would answer with the pattern, and without a possible name.
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")
_NOT_IN_A_NAME = re.compile(r"[^a-z0-9]+")
# The fields of a flow run that a job id may contain. They stay the same in a rerun, except that a
# rerun of a parent gives each subflow another id and name: root_id is the id of the topmost run.
FLOW_RUN_FIELDS = ("id", "root_id", "name", "flow_id", "deployment_id", "work_queue_name")
_FLOW_RUN_FIELD = re.compile(r"\{flow_run\.([a-z_]+)\}")
# The keys of Prefect's artifacts contain the id, and have no other characters.
_GIVEN_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_NOT_IN_A_GIVEN_ID = re.compile(r"[^a-z0-9-]")


class TrainingJob(BaseModel):
    """One distributed training run: its script, its ranks, and its protection."""

    # An environment may contain secrets, which errors must not show.
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    name: str = Field(
        default=DEFAULT_NAME,
        description="Short name of the job, of 1 to 40 of a-z 0-9 and -; the job id begins with "
        "it.",
    )
    job_id: str = Field(
        default="",
        description="Id of the job, of a-z 0-9 and -. Runs with the same id share one job: each of "
        "them adopts it, continues it or takes its result, and is refused if it describes another "
        "job. The id may contain fields of the flow run, such as {flow_run.name} or "
        "{flow_run.root_id}. Empty: Rekindle derives it.",
    )
    script: str = Field(
        default="",
        description="Python file that every rank runs, relative to the working directory. Give "
        "one of script, module and program.",
    )
    module: str = Field(
        default="",
        description="Python module that every rank runs, as in `python -m`.",
    )
    program: str = Field(
        default="",
        description="Any program that every rank runs, such as bash, instead of a script or a "
        "module. With processes_per_node 1 it may start the ranks of its node itself.",
    )
    arguments: list[str] = Field(
        default=[],
        description="Command-line arguments of the script, module or program.",
    )
    framework: Literal["torch", "mindspore"] = Field(
        default="torch",
        description="Framework of the script. Install it where the ranks run. Allowed: torch, "
        "mindspore.",
    )
    nodes: Nodes = 1
    processes_per_node: ProcessesPerNode = 1
    min_nodes: MinNodes = 0
    spares: Spares = 0
    environment: dict[str, str] = Field(
        default={},
        description="Environment variables that each rank gets besides those of its node.",
    )
    working_directory: str = Field(
        default="",
        description=(
            "Folder in which the ranks start. Empty: the working directory of the flow's process. "
            "With `kubernetes`: an absolute path in the image; required."
        ),
    )
    devices: list[DeviceName] | None = Field(
        default=None,
        title="Devices",
        description="Devices of the flow's machine that the job holds alone while it runs. Another "
        "job that names one of them waits. Empty: every accelerator that the ranks can see, and "
        "nothing on a machine without. An empty list: none. With `kubernetes` the cluster's "
        "scheduler gives the devices.",
    )
    checkpoint: CheckpointDirectory = Field(
        default=CheckpointDirectory(),
        description="Where the job writes checkpoints, and how often.",
    )
    snapshot_every: int = Field(
        default=10,
        ge=0,
        description="Steps between two snapshots of the training state in memory; 0: none. If a "
        "node is lost, the job repeats at most this many steps. Allowed: at least 0.",
    )
    allow_injection: bool = Field(
        default=False,
        description="Whether `rekindle inject` may inject faults into the job.",
    )
    only_newest: bool = Field(
        default=False,
        description="Whether a run is skipped if a newer run of its deployment is due when it "
        "begins, for example after the worker was down. A run that has launched its job, and one "
        "that a person retries, is not skipped.",
    )
    saved_cluster: Annotated[str, BlockChoice("rekindle-cluster")] = Field(
        default="",
        title="Saved cluster",
        description="A block of type Rekindle Cluster, which replaces the numbers of "
        "nodes, ranks and spares. Empty: none.",
    )
    saved_store: Annotated[str, BlockChoice("rekindle-checkpoint-store")] = Field(
        default="",
        title="Saved store",
        description="A block of type Rekindle Checkpoint Store, which replaces the "
        "checkpoint settings. Empty: none.",
    )
    saved_policy: Annotated[str, BlockChoice("rekindle-policy")] = Field(
        default="",
        title="Saved policy",
        description="A block of type Rekindle Policy, which replaces the policy below. "
        "Empty: none.",
    )
    fault_tables: str = Field(
        default="",
        description="TOML file with your own entries for fault codes, exits and error texts, "
        "relative to the working directory. Empty: none.",
    )
    policy: RecoveryPolicy = setting(
        Policy(), "The recovery policy: which strategies the job may use, and its limits."
    )
    annotations: Annotations = {}
    node_check: NodeCheck = Field(
        default=NodeCheck(),
        description="Whether the job checks nodes before they train, and the limits of the check.",
    )
    kubernetes: KubernetesPods | None = Field(
        default=None,
        title="Kubernetes",  # pydantic gives a union none, and Prefect then shows "Field"
        description="How the nodes become pods of a cluster; all paths are then paths in their "
        "image. Empty: the nodes are processes of this machine.",
    )

    # Not a field: a reader of the job, or of a flow run's parameters, must not see it.
    _credentials: dict[str, str] = PrivateAttr(default_factory=dict)
    _secret_variables: frozenset[str] = PrivateAttr(default=frozenset())
    _notices: list[str] = PrivateAttr(default_factory=list)

    @field_validator("name")
    @classmethod
    def _name_is_possible(cls, name: str) -> str:
        if not _NAME.fullmatch(name):
            possible = _NOT_IN_A_NAME.sub("-", name.lower()).strip("-")[:40] or DEFAULT_NAME
            raise ValueError(
                f"{name!r} is no name of a job; use 1 to 40 of a-z 0-9 and -, and begin with a "
                f"letter or digit, such as {possible!r}"
            )
        return name

    @field_validator("job_id")
    @classmethod
    def _job_id_is_possible(cls, job_id: str) -> str:
        if job_id:
            try:
                fill_in_job_id(job_id, dict.fromkeys(FLOW_RUN_FIELDS, "x"))
            except UsageError as error:
                raise ValueError(str(error)) from error
        return job_id

    @field_validator("environment")
    @classmethod
    def _environment_is_settable(cls, environment: dict[str, str]) -> dict[str, str]:
        for name, value in environment.items():
            if not _VARIABLE.fullmatch(name) or "\0" in value:
                raise ValueError(
                    f"Rekindle cannot set the environment variable {name!r}: a name must not "
                    "contain =, and a value must not contain a null character"
                )
            if name.startswith("REKINDLE_") and name not in names.PROFILING_SETTINGS:
                raise ValueError(f"Rekindle sets {name}; leave it out")
        return environment

    @model_validator(mode="after")
    def _one_entry(self) -> TrainingJob:
        given = [name for name in ("script", "module", "program") if getattr(self, name)]
        if len(given) != 1:
            found = f"{' and '.join(given)} are given" if given else "none is given"
            raise ValueError(f"give a script, a module or a program; {found}")
        return self

    @model_validator(mode="after")
    def _one_policy(self) -> TrainingJob:
        if self.annotations and self.saved_policy:
            raise ValueError("annotations and saved_policy exclude each other; give one of them")
        refuse_both(self.annotations, self.policy)
        return self

    @model_validator(mode="after")
    def _devices_are_of_this_machine(self) -> TrainingJob:
        if self.devices is not None and self.kubernetes is not None:
            raise ValueError("leave devices out: in a cluster the scheduler gives them to the pods")
        return self

    @property
    def entry(self) -> EntryKind:
        """Return what every rank runs."""
        if self.program:
            return EntryKind.PROGRAM
        return EntryKind.SCRIPT if self.script else EntryKind.MODULE

    def filled_in(self) -> TrainingJob:
        """Return the job with the values of its blocks and annotations.

        Raises UsageError: a block does not exist, or its values do not fit the job.
        """
        if not (self.saved_cluster or self.saved_store or self.saved_policy or self.annotations):
            return self
        values: dict[str, object] = {"annotations": {}}
        secret_variables: frozenset[str] = frozenset()
        credentials: dict[str, str] = {}
        notices: list[str] = []
        if self.annotations:
            values["policy"], notices = policy_of_keys(self.annotations)
        if self.saved_cluster or self.saved_store or self.saved_policy:
            from rekindle.blocks import saved  # imports Prefect, which other jobs do not need
        if self.saved_cluster:
            cluster = saved.load(saved.SavedCluster, self.saved_cluster)
            values |= {name: getattr(cluster, name) for name in _OF_CLUSTER}
            secret = cluster.environment.get_secret_value()
            values["environment"] = secret | self.environment
            secret_variables = frozenset(secret) - frozenset(self.environment)
        if self.saved_store:
            store = saved.load(saved.SavedStore, self.saved_store)
            values["checkpoint"], credentials = store.with_key()
            values["job_id"] = self.job_id or store.job_id
        if self.saved_policy:
            policy = saved.load(saved.SavedPolicy, self.saved_policy)
            values["policy"], notices = policy.to_policy()
        none = {"saved_cluster": "", "saved_store": "", "saved_policy": ""}
        try:
            job = TrainingJob.model_validate(self.model_dump() | none | values)
        except ValidationError as error:
            raise UsageError(f"the blocks do not fit the job: {mistakes(error)}") from None
        job._credentials, job._secret_variables = credentials, secret_variables
        job._notices = notices
        return job

    @property
    def secret_variables(self) -> frozenset[str]:
        """Return the names of the variables whose values come from a block."""
        return self._secret_variables

    @property
    def notices(self) -> list[str]:
        """Return sentences about annotations whose result surprises."""
        return self._notices

    def to_spec(self, job_id: str) -> JobSpec:
        """Return the job's description for its engine, with absolute paths.

        Raises UsageError: the script, the working directory or a saved block does not exist.
        """
        spec = self.filled_in().unchecked_spec(job_id)
        if self.kubernetes is None:
            return on_this_machine(check(spec))
        return check_elsewhere(spec)

    def unchecked_spec(self, job_id: str) -> JobSpec:
        """Return the description of a job whose blocks are filled in, for a comparison.

        Raises UsageError: the working directory in the image is unknown.
        """
        if self.kubernetes is None:
            directory = job_directory(job_id)
            work = Path(self.working_directory).expanduser().absolute()
        else:
            directory = job_directory(job_id, Path(names.POD_HOME))
            work = self._work_in_image()
        checkpoints = self.checkpoint.path
        return JobSpec(
            job_id=job_id,
            entry=self.entry,
            target=self.script or self.module or self.program,
            arguments=tuple(self.arguments),
            framework=Framework(self.framework),
            nodes=self.nodes,
            processes_per_node=self.processes_per_node,
            min_nodes=self.min_nodes,
            spares=self.spares,
            environment=self.environment | self._credentials,
            working_directory=str(work),
            directory=str(directory),
            log_directory=str(directory / names.LOGS_DIRECTORY),
            checkpoint_store=below(absolute(checkpoints, work), job_id)
            if checkpoints
            else str(directory / names.CHECKPOINT_DIRECTORY),
            snapshot_every=self.snapshot_every,
            checkpoint_every=self.checkpoint.interval,
            keep=self.checkpoint.keep,
            allow_injection=self.allow_injection,
            policy=policy_of_rekindle(self.policy, self.kubernetes),
            network_check=self.node_check.enabled or self.node_check.exclude_straggler,
            exclude_straggler=self.node_check.exclude_straggler,
            node_check=self.node_check.to_limits(),
            fault_tables=str(work / Path(self.fault_tables).expanduser())
            if self.fault_tables
            else "",
        )

    def _work_in_image(self) -> Path:
        """Return the working directory in the pods' image. Raises UsageError: it is unknown."""
        for name in ("working_directory", "fault_tables"):
            path = getattr(self, name)
            if path.startswith("~"):
                raise UsageError(
                    f"{name} is {path}; Rekindle does not know the home directory in the image, "
                    "so give an absolute path"
                )
        if not self.working_directory.startswith("/"):
            raise UsageError(
                f"working_directory is {self.working_directory!r}; give an absolute path in the "
                "image of the pods"
            )
        return Path(self.working_directory)


def fill_in_job_id(template: str, values: Mapping[str, str]) -> str:
    """Return the job id of a flow run. values: of its fields; a field without a value is empty.

    A character that no job id has becomes a dash. Raises UsageError: the run has no such field, or
    the result is no job id.
    """

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name not in FLOW_RUN_FIELDS:
            known = ", ".join(f"{{flow_run.{each}}}" for each in FLOW_RUN_FIELDS)
            raise UsageError(f"job_id has {match[0]}; choose from {known}")
        if not values[name]:
            raise UsageError(f"job_id has {match[0]}, but this flow run has no {name}")
        return _NOT_IN_A_GIVEN_ID.sub("-", values[name].lower())

    job_id = _FLOW_RUN_FIELD.sub(value, template)
    if not _GIVEN_ID.fullmatch(job_id):
        raise UsageError(
            f"job_id is {job_id!r}; use 1 to 63 of a-z 0-9 and -, begin with a letter or digit, "
            "and write a field of the flow run as {flow_run.name}"
        )
    return job_id
