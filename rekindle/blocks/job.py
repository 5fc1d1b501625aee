"""The parameter of the train flow: one training run, described by a user."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from rekindle import names
from rekindle.blocks.policy import RecoveryPolicy
from rekindle.blocks.store import CheckpointDirectory
from rekindle.runtime.spec import EntryKind, JobSpec, check, job_directory

DEFAULT_NAME = "train"
_VARIABLE = re.compile(r"[^=\0]+")


class TrainingJob(BaseModel):
    """One distributed training run: what is started, on how many ranks, and what protects it."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(
        default=DEFAULT_NAME,
        pattern=r"^[a-z0-9][a-z0-9-]{0,39}$",
        description="Short name of the job, of a-z 0-9 and -; its id is the name and the end of "
        "the flow run's id.",
    )
    script: str = Field(
        default="",
        description="Python file that every rank runs, relative to the working directory. Give "
        "either this or a module.",
    )
    module: str = Field(
        default="",
        description="Python module that every rank runs, as in `python -m`. Give either this or a "
        "script.",
    )
    arguments: list[str] = Field(
        default=[],
        description="Command-line arguments of the script or module.",
    )
    nodes: int = Field(
        default=1,
        ge=1,
        description="Number of nodes.",
    )
    processes_per_node: int = Field(
        default=1,
        ge=1,
        description="Ranks on each node, usually one per accelerator.",
    )
    min_nodes: int = Field(
        default=0,
        ge=0,
        description="Least number of nodes that training may go on with when some are lost; 0: all "
        "of them are needed.",
    )
    spares: int = Field(
        default=0,
        ge=0,
        description="Nodes in reserve, each ready to take the place of a lost one at once.",
    )
    environment: dict[str, str] = Field(
        default={},
        description="Environment variables that each rank gets besides those of its node.",
    )
    working_directory: str = Field(
        default="",
        description="Folder in which the ranks are started. Empty: that of the flow's process.",
    )
    checkpoint: CheckpointDirectory = Field(
        default=CheckpointDirectory(),
        description="Where checkpoints go, and how often one is written.",
    )
    snapshot_every: int = Field(
        default=10,
        ge=0,
        description="Steps between two snapshots of the training state in memory; 0: none. A lost "
        "node costs at most this many steps.",
    )
    allow_injection: bool = Field(
        default=False,
        description="Whether faults may be injected with `rekindle inject`, to see it recover.",
    )
    policy: RecoveryPolicy = Field(
        default=RecoveryPolicy(),
        description="How faults are met: which strategies are used, and within which limits.",
    )

    @field_validator("environment")
    @classmethod
    def _environment_is_settable(cls, environment: dict[str, str]) -> dict[str, str]:
        for name, value in environment.items():
            if not _VARIABLE.fullmatch(name) or "\0" in value:
                raise ValueError(f"{name!r} cannot be set: no = or null character is allowed")
            if name.startswith("REKINDLE_"):
                raise ValueError(f"{name} is set by Rekindle itself; leave it out")
        return environment

    @model_validator(mode="after")
    def _one_entry(self) -> TrainingJob:
        if bool(self.script) == bool(self.module):
            given = "both are given" if self.script else "neither is given"
            raise ValueError(f"give a script or a module; {given}")
        return self

    def to_spec(self, job_id: str) -> JobSpec:
        """Return the job as the runtime reads it, all paths absolute.

        Raises UsageError: the script or the working directory does not exist.
        """
        directory = job_directory(job_id)
        work = Path(self.working_directory).expanduser().absolute()
        checkpoints = self.checkpoint.path
        spec = JobSpec(
            job_id=job_id,
            entry=EntryKind.SCRIPT if self.script else EntryKind.MODULE,
            target=self.script or self.module,
            arguments=tuple(self.arguments),
            nodes=self.nodes,
            processes_per_node=self.processes_per_node,
            min_nodes=self.min_nodes,
            spares=self.spares,
            environment=self.environment,
            working_directory=str(work),
            directory=str(directory),
            log_directory=str(directory / names.LOGS_DIRECTORY),
            checkpoint_directory=str(
                work / Path(checkpoints).expanduser()
                if checkpoints
                else directory / names.CHECKPOINT_DIRECTORY
            ),
            snapshot_every=self.snapshot_every,
            checkpoint_every=self.checkpoint.every,
            allow_injection=self.allow_injection,
            policy=self.policy.to_policy(),
        )
        return check(spec)
