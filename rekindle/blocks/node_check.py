"""Whether nodes are checked before they train, as a user configures it."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from rekindle.recovery.node_check.evidence import FACTOR, Limits


class NodeCheck(BaseModel):
    """What is measured of each node before it takes part in training."""

    model_config = ConfigDict(extra="forbid")

    enabled: bool = Field(
        default=False,
        description="Whether devices and links of each node are measured before it takes part; one "
        "that is faulty is isolated, and another one asked for.",
    )
    exclude_straggler: bool = Field(
        default=False,
        description="Whether a node that is slow is isolated, too.",
    )
    compute_factor: float = Field(
        default=FACTOR,
        gt=1,
        le=1000,
        description="A node is slow if its devices take this many times as long as others'.",
    )
    link_factor: float = Field(
        default=FACTOR,
        gt=1,
        le=1000,
        description="A node is slow if its links take this many times as long as others'.",
    )
    timeout_s: float = Field(
        default=Limits().timeout_s,
        gt=0,
        le=86_400,
        description="Seconds that a node may take for one task of the check before it has failed.",
    )

    def to_limits(self) -> Limits:
        """Return what the check goes by."""
        return Limits(
            compute_factor=self.compute_factor,
            link_factor=self.link_factor,
            timeout_s=self.timeout_s,
        )
