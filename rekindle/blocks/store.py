"""Where checkpoints go, as a user configures it."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class CheckpointDirectory(BaseModel):
    """A folder for checkpoints and how often one is written to it."""

    model_config = ConfigDict(extra="forbid", title="Checkpoint")

    path: str = Field(
        default="",
        description="Folder for checkpoints, best on storage that all nodes share; relative to the "
        "working directory. Each job has a folder below it. Empty: one in the job's own directory.",
    )
    every: int = Field(
        default=0,
        ge=0,
        description="Steps between two checkpoints; 0: none is written. A new attempt of the job "
        "goes on from the newest valid one.",
    )
