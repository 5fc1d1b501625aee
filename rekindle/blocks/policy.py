"""The recovery policy as a user configures it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rekindle.recovery.policy.policy import ALLOWABLE, LADDER, Policy, Stragglers, Strategy


def _one_of(strategies: Iterable[Strategy]) -> str:
    """Make a pattern of names: a form lets people order such a list, and none of choices."""
    return f"^({'|'.join(strategy.value for strategy in strategies)})$"


StrategyName = Annotated[str, Field(pattern=_one_of(ALLOWABLE))]
StragglersName = Literal["warn", "isolate", "replace"]
AskedName = Annotated[str, Field(pattern=_one_of(LADDER))]


class RecoveryPolicy(BaseModel):
    """What may be done about faults, and how often."""

    model_config = ConfigDict(extra="forbid", title="Policy")

    strategies: list[StrategyName] = Field(
        default=[strategy.value for strategy in ALLOWABLE],
        description="What may be done, in the order in which it is tried. Inside the running job: "
        "retry (all ranks do the step again), recover-in-place (a broken rank is started anew on "
        "its node), recover (a new node takes the place of a lost one), shrink (training goes on "
        "without the lost node, where min_nodes allows it). Of all ranks: hang-restart and "
        "restart. Of places: reschedule-pod, reschedule-job-isolated and reschedule-job, which "
        "have limits of their own below. dump, wherever it stands: a job that ends without success "
        "has its newest snapshot written as a checkpoint.",
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
        description="How often the strategies inside the running job may be used, and restarts "
        "that end a hang or heal a device; after that every fault restarts all ranks.",
    )
    max_in_row: int = Field(
        default=3,
        ge=0,
        description="How often the same rank or node may be recovered without a finished step in "
        "between.",
    )
    max_reschedules: int = Field(
        default=0,
        ge=0,
        description="How often the whole job may be placed anew (ModelArts: job-retry-num).",
    )
    max_pod_reschedules: int = Field(
        default=0,
        ge=0,
        description="How often one node alone may be placed anew (ModelArts: pod-retry-num).",
    )
    unconditional: bool = Field(
        default=True,
        description="Whether the whole job may also be placed anew when no node or device is to "
        "blame (ModelArts: job-unconditional-retry).",
    )
    max_reschedules_in_row: int = Field(
        default=3,
        ge=0,
        description="How often that may happen in a row; then the script is taken for the cause.",
    )
    max_hangs_in_row: int = Field(
        default=3,
        ge=0,
        description="Restarts in a row because of a hang; then the job ends.",
    )
    progress_resets: bool = Field(
        default=True,
        description="Whether a new step ends such a row. ModelArts knows of no steps.",
    )
    approve: list[AskedName] = Field(
        default=[],
        description="What a person has to approve first: the run pauses and shows a form.",
    )
    approval_timeout_s: float = Field(
        default=86_400.0,
        gt=0,
        description="Seconds that the job waits for that person; then it ends.",
    )
    hang_timeout_s: float = Field(
        default=10.0,
        gt=0,
        description="Seconds that a rank may make no progress in a step before the job is looked "
        "at as hanging, even if all steps so far were short.",
    )
    idle_timeout_s: float = Field(
        default=Policy().idle_timeout_s,
        gt=0,
        description="Seconds after which a script without a Session hangs when none of its "
        "processes has done anything.",
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
    stragglers: StragglersName = Field(
        default="warn",
        description="What follows when light profiling shows that a node has become slow: warn, no "
        "more; isolate, it is checked when all ranks wait the next time, and replaced if the check "
        "finds it sick; replace, training is held between two steps for that check.",
    )
    stragglers_shadow: bool = Field(
        default=False,
        description="Only say what would follow, and how often that would have been right.",
    )

    @model_validator(mode="after")
    def _check(self) -> RecoveryPolicy:
        self.to_policy()
        return self

    def to_policy(self) -> Policy:
        """Return the policy as coordinator and flow read it."""
        fields = self.model_dump(exclude={"strategies", "approve", "stragglers"})
        return Policy(
            stragglers=Stragglers(self.stragglers),
            strategies=tuple(map(Strategy, self.strategies)),
            approve=tuple(map(Strategy, self.approve)),
            **fields,
        )
