"""Where checkpoints go, as a user configures it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rekindle.checkpoints.retention import Retention
from rekindle.recovery.policy.interval import AUTO


class Keep(BaseModel):
    """Which checkpoints stay when a newer one is written: each that one of the rules keeps."""

    model_config = ConfigDict(extra="forbid", title="Keep")

    last: int = Field(default=0, ge=0, description="The newest ones, so many; 0: no such rule.")
    every_steps: int = Field(
        default=0, ge=0, description="The first one of every so many steps; 0: no such rule."
    )
    best: int = Field(
        default=0,
        ge=0,
        description="Those with the best value of the metric, so many; 0: no such rule.",
    )
    metric: str = Field(
        default="",
        description="Name under which the training script logs that value, in the step of the "
        "checkpoint.",
    )
    highest: bool = Field(
        default=False, description="Whether its highest value is the best, not its lowest."
    )
    hours: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="Those that are not older than so many hours; 0: no such rule.",
    )

    @model_validator(mode="after")
    def _rules_fit(self) -> Keep:
        self.to_retention()
        return self

    def to_retention(self) -> Retention:
        """Return the rules as the runtime has them. Raises ValueError: they do not fit."""
        return Retention(**self.model_dump())


class CheckpointDirectory(BaseModel):
    """A folder for checkpoints and how often one is written to it."""

    model_config = ConfigDict(extra="forbid", title="Checkpoint")

    path: str = Field(
        default="",
        description="Folder for checkpoints, best on storage that all nodes share, relative to the "
        "working directory; or s3://bucket/prefix?endpoint=https://host:port. Each job has a place "
        "of its own below it. Empty: a folder in the job's own directory.",
    )
    every: int = Field(
        default=0,
        ge=0,
        description="Steps between two checkpoints; 0: none is written. A new attempt of the job "
        "goes on from the newest valid one.",
    )
    automatic: bool = Field(
        default=False,
        description="Choose the steps between two checkpoints from how long one takes, and how "
        "often faults come; the number above is then of no effect.",
    )
    keep: Keep = Field(
        default=Keep(),
        description="Which checkpoints are kept. Without any rule: all of them.",
    )

    @property
    def interval(self) -> int | Literal["auto"]:
        """Steps between two checkpoints, as the runtime has it."""
        return AUTO if self.automatic else self.every
