"""Where checkpoints go, as a user configures it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from rekindle.blocks.forms import Form, setting
from rekindle.checkpoints.retention import Retention
from rekindle.recovery.policy.interval import AUTO

Keep = Annotated[Retention, Form("Keep")]


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
    keep: Keep = setting(Retention(), "Which checkpoints are kept. Without any rule: all of them.")

    @property
    def interval(self) -> int | Literal["auto"]:
        """Steps between two checkpoints, as the runtime has it."""
        return AUTO if self.automatic else self.every
