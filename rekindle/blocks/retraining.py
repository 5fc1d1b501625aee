"""Define the parameter of the retrain flow: data, evaluation, publication, deployments."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Retraining(BaseModel):
    """The commands before and after training, and the publication of the checkpoint."""

    model_config = ConfigDict(extra="forbid")

    prepare: list[str] = Field(
        default=[],
        description="Command that prepares the data, as a list of words; run once, before "
        "training. Empty: none.",
    )
    evaluate: list[str] = Field(
        default=[],
        description="Command that evaluates the checkpoint whose folder is in "
        "REKINDLE_CHECKPOINT, and prints its metrics as one JSON object in its last line.",
    )
    at_least: dict[str, float] = Field(
        default={},
        description="Lowest value of each metric; below it the checkpoint is not published.",
    )
    at_most: dict[str, float] = Field(
        default={},
        description="Highest value of each metric; above it the checkpoint is not published.",
    )
    publish_to: str = Field(
        default="published",
        min_length=1,
        description="Folder for copies of published checkpoints, best on shared storage, relative "
        "to the working directory; or s3://bucket/prefix?endpoint=https://host:port, with the key "
        "of the job's checkpoint store.",
    )
    downstream: list[str] = Field(
        default=[],
        description="Deployments (flow/deployment) that run once with the parameter `checkpoint`, "
        "the reference of the published checkpoint.",
    )
