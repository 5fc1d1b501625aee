"""The recovery policy as a user configures it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from rekindle.recovery.policy import Policy, Strategy


class RecoveryPolicy(BaseModel):
    """What may be done about faults, and how often."""

    model_config = ConfigDict(extra="forbid")

    strategies: list[Literal["retry", "recover-in-place", "recover", "shrink", "dump"]] = Field(
        default=["retry", "recover-in-place", "recover", "shrink", "dump"],
        description="What may be done besides restarts: retry (all ranks do the step "
        "again), recover-in-place (a broken rank is started anew on its node) and recover (a new "
        "node takes the place of a lost one), shrink (training goes on without the lost node, "
        "where min_nodes allows it); and dump: a job that fails or is stopped has its "
        "newest snapshot written as a checkpoint. Without the first four every fault restarts all "
        "ranks.",
    )
    max_restarts: int = Field(
        default=3,
        ge=0,
        description="How often all ranks may be started anew in one job. An error of the training "
        "script always needs one of these; 0 ends the job at the first.",
    )
    max_recoveries: int = Field(
        default=128,
        ge=0,
        description="How often the first four may be used in one job; after that every fault "
        "restarts all ranks.",
    )
    max_in_row: int = Field(
        default=3,
        ge=0,
        description="How often the same rank or node may be recovered without a finished step in "
        "between.",
    )
    leave_timeout_s: float = Field(
        default=300.0,
        gt=0,
        description="Seconds that a healthy rank may take to leave its step after a fault; then it "
        "is started anew as well. Give more than the longest stretch of a step without a "
        "collective.",
    )
    join_timeout_s: float = Field(
        default=600.0,
        gt=0,
        description="Seconds that a started rank may take until it is ready to train (imports, "
        "building the model, compiling).",
    )
    node_timeout_s: float = Field(
        default=600.0,
        gt=0,
        description="Seconds that the job waits for a new node in the place of a lost one.",
    )
    coordinator_timeout_s: float = Field(
        default=600.0,
        gt=0,
        description="Seconds that ranks train on without a coordinator, when it died and nobody "
        "has started another one.",
    )

    dump_timeout_s: float = Field(
        default=600.0,
        gt=0,
        description="Seconds that a node may take to write the last snapshot of a job that ends.",
    )

    def to_policy(self) -> Policy:
        """Return the policy as coordinator and flow read it."""
        fields = self.model_dump(exclude={"strategies"})
        return Policy(strategies=tuple(Strategy(name) for name in self.strategies), **fields)
