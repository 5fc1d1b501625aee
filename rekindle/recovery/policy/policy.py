"""Define the policy: strategies, their order, their limits, and approvals. Pure values."""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec
from msgspec import Meta

from rekindle.recovery.policy.dialect import Dialect
from rekindle.settings import CHOICES, check_limits, choices_of

# The job requests agents that have not arrived by then, because their launcher may have failed
# before it started them. If a smaller world is allowed, the job starts without them.
LATE_S = 20.0

# Restarts of all ranks without a finished step in between, if a rank or node is lost before the
# ranks of a Session have met, or after they have finished all steps. They do not use up
# `max_restarts`.
RESTARTS_APART = 3

MOST = 2**31 - 1  # the maximum of every count; a count without a limit has this value


class Strategy(str, enum.Enum):
    """Name the ways to recover, the cheapest first."""

    RETRY = "retry"
    RECOVER_IN_PLACE = "recover-in-place"
    RECOVER = "recover"
    SHRINK = "shrink"
    HANG_RESTART = "hang-restart"
    RESTART = "restart"
    RESCHEDULE_POD = "reschedule-pod"
    RESCHEDULE_JOB_ISOLATED = "reschedule-job-isolated"
    RESCHEDULE_JOB = "reschedule-job"
    DUMP = "dump"
    FAIL = "fail"


class Stragglers(str, enum.Enum):
    """Name the reactions to a node that becomes slow during training; `warn` only reports it."""

    WARN = "warn"
    ISOLATE = "isolate"  # the job checks the node the next time that all ranks wait
    REPLACE = "replace"  # the job pauses training between two steps for the check


class Replicas(str, enum.Enum):
    """Name the reactions to ranks that should hold the same state, and do not."""

    ROLL_BACK = "roll-back"  # all ranks return to a state from before the difference
    FAIL = "fail"
    WARN = "warn"  # the job only reports it


INNER = (Strategy.RETRY, Strategy.RECOVER_IN_PLACE, Strategy.RECOVER, Strategy.SHRINK)
RESTARTS = (Strategy.HANG_RESTART, Strategy.RESTART)
JOBS = (Strategy.RESCHEDULE_JOB_ISOLATED, Strategy.RESCHEDULE_JOB)
OUTER = (Strategy.RESCHEDULE_POD, *JOBS)
RESET_BY = (Strategy.RECOVER_IN_PLACE, Strategy.RESTART)  # they can reset the rank's device
LADDER = (*INNER, *RESTARTS, *OUTER)
ALLOWABLE = (*LADDER, Strategy.DUMP)


# The strategies that read a setting. Without one of them in the policy, it has no effect.
_READ_BY = {
    "max_restarts": (Strategy.RESTART,),
    "max_recoveries": (*INNER, *RESTARTS),
    "max_in_row": INNER,
    "max_reschedules": JOBS,
    "max_pod_reschedules": (Strategy.RESCHEDULE_POD,),
    "max_reschedules_in_row": (Strategy.RESCHEDULE_JOB,),
    "max_hangs_in_row": (Strategy.HANG_RESTART,),
    "dump_timeout_s": (Strategy.DUMP,),
}


def _count(text: str) -> Meta:
    return Meta(ge=0, le=MOST, description=text)


def _seconds(text: str) -> Meta:
    return Meta(gt=0, description=f"Seconds {text}")


class Policy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A recovery policy: the strategies that a job may use, and their limits.

    The defaults are those of policy files, forms, blocks and job files.
    """

    strategies: Annotated[
        tuple[Strategy, ...],
        Meta(
            description="The strategies that the job may use, in the order in which it tries "
            "them. Some strategies keep the job running. With retry, all ranks "
            "leave the step and continue from their newest state. With "
            "recover-in-place, the agent restarts a failed rank on its node. With "
            "recover, a new node replaces a lost node. With "
            "shrink, training continues without the lost node, if min_nodes allows "
            "it. The strategies hang-restart and restart restart all ranks. The "
            "strategies reschedule-pod, reschedule-job-isolated and reschedule-job "
            "place pods again, and have separate limits below. With dump, at any "
            "position, a job that ends without success writes its newest snapshot "
            "as a checkpoint.",
            extra={CHOICES: ALLOWABLE},
        ),
    ] = ALLOWABLE
    max_restarts: Annotated[
        int,
        _count(
            "Restarts of all ranks in one job. An error of the training script always uses one of "
            "these; with 0 the first such error ends the job."
        ),
    ] = 3
    max_recoveries: Annotated[
        int,
        _count(
            "Uses of the strategies inside the running job, and restarts that end a hang or reset "
            "a device. After that a fault needs another strategy, such as restart, within its "
            "limit; without one the job ends."
        ),
    ] = 128
    max_in_row: Annotated[
        int,
        _count(
            "Recoveries of the same rank or node without a finished step in between; after that a "
            "later strategy follows."
        ),
    ] = 3
    max_reschedules: Annotated[
        int,
        _count(
            "Number of times that the platform may place the whole job again (ModelArts: "
            "job-retry-num)."
        ),
    ] = 0
    max_pod_reschedules: Annotated[
        int,
        _count(
            "Number of times that the platform may place one node again (ModelArts: pod-retry-num)."
        ),
    ] = 0
    unconditional: Annotated[
        bool,
        Meta(
            description="Whether the platform may place the whole job again when no node or device "
            "is faulty (ModelArts: job-unconditional-retry)."
        ),
    ] = True
    max_reschedules_in_row: Annotated[
        int,
        _count(
            "Consecutive uses of reschedule-job for the same problem; after that the script counts "
            "as the cause, and the job ends."
        ),
    ] = 3
    max_hangs_in_row: Annotated[
        int, _count("Consecutive uses of hang-restart; after that the job ends.")
    ] = 3
    progress_resets: Annotated[
        bool,
        Meta(
            description="Whether a newly finished step resets the counts of max_reschedules_in_row "
            "and max_hangs_in_row. ModelArts does not count steps."
        ),
    ] = True
    dialect: Annotated[
        Dialect,
        Meta(
            description="The platform whose rules judge fault codes of Ascend devices that occur "
            "again, and codes that no table lists. With none and modelarts, the third consecutive "
            "time within 24 hours isolates the device, and minor and major faults can heal. With "
            "mindcluster, the rules of MindCluster's device plugin apply. Annotations of ModelArts "
            "and labels of MindCluster set it."
        ),
    ] = Dialect.NONE
    device_resets: Annotated[
        bool,
        Meta(
            description="Whether an agent outside of Kubernetes may reset a device whose fault "
            "code demands it. An agent in a pod always may. No agent resets a device that another "
            "program uses, or whose reset ends devices of others."
        ),
    ] = False
    approve: Annotated[
        tuple[Strategy, ...],
        Meta(
            description="Strategies that a person must approve first. The flow run pauses and "
            "shows a form.",
            extra={CHOICES: LADDER},
        ),
    ] = ()
    leave_timeout_s: Annotated[
        float,
        _seconds(
            "that a healthy rank may take to leave its step after a fault; after that its agent "
            "also restarts it. A rank notices the fault at its next collective, so give more than "
            "the longest time between two collectives of a step."
        ),
    ] = 300.0
    join_timeout_s: Annotated[
        float,
        _seconds(
            "that a rank may take from its start until it is ready to train (imports, building "
            "the model, compiling), and for its state. After that the job replaces it if it does "
            "nothing. A rank that computes or reads has 1,800 s more."
        ),
    ] = 600.0
    node_timeout_s: Annotated[
        float, _seconds("that the job waits for a new node that replaces a lost one.")
    ] = 600.0
    coordinator_timeout_s: Annotated[
        float,
        _seconds(
            "that ranks continue to train without a coordinator after it has died; then they end."
        ),
    ] = 600.0
    dump_timeout_s: Annotated[
        float, _seconds("that a node may take to write the final checkpoint of a job that ends.")
    ] = 600.0
    approval_timeout_s: Annotated[
        float, _seconds("that the job waits for the approval of a person; after that it ends.")
    ] = 86_400.0
    hang_timeout_s: Annotated[
        float,
        _seconds(
            "without progress of a rank in a step, after which the job checks for a hang, even if "
            "all steps so far were short."
        ),
    ] = 10.0
    between_timeout_s: Annotated[
        float,
        _seconds(
            "between two steps without a sign of life of a rank, after which the job checks for a "
            "hang. A value below hang_timeout_s has no effect."
        ),
    ] = 300.0
    idle_timeout_s: Annotated[
        float,
        _seconds(
            "without any activity of its processes, after which a script without a Session counts "
            "as hung."
        ),
    ] = 1800.0
    replicas: Annotated[
        Replicas,
        Meta(
            description="The reaction when ranks that should hold the same parameters and "
            "optimizer state hold different ones. With roll-back, all ranks return once to the "
            "newest state from before the difference; without such a state, and the second time "
            "for the same tensors, the job ends. With fail, the job ends. With warn, the job "
            "reports the difference once and trains on, until a process must be replaced."
        ),
    ] = Replicas.ROLL_BACK
    stragglers: Annotated[
        Stragglers,
        Meta(
            description="The reaction when light profiling shows that a node has become slow. "
            "With warn, the job prints a warning. With isolate, the job checks the "
            "node the next time that all ranks wait, and replaces it if it is faulty "
            "or slow. With replace, the job pauses training between two steps for "
            "that check."
        ),
    ] = Stragglers.WARN
    stragglers_shadow: Annotated[
        bool,
        Meta(
            description=(
                "Whether the job only logs the reaction, without an action, and how often the "
                "reaction would be right."
            )
        ),
    ] = False

    def __post_init__(self) -> None:
        """Check the values.

        Raises ValueError: a strategy is not allowed or occurs twice, or a number is outside its
        limits.
        """
        for name, choice in choices_of(Policy).items():
            _check_strategies(name, getattr(self, name), choice)
        check_limits(self, "policy")

    @property
    def ladder(self) -> tuple[Strategy, ...]:
        """Return all strategies in this policy's order; unnamed strategies keep their place."""
        named = iter(s for s in self.strategies if s is not Strategy.DUMP)
        return tuple(next(named) if s in self.strategies else s for s in LADDER)


def without_effect(policy: Policy) -> list[str]:
    """Return a sentence for each value, other than the default, that the job would never use."""
    usual, found = Policy(), []
    for name, strategies in _READ_BY.items():
        if getattr(policy, name) != getattr(usual, name) and not any(
            strategy in policy.strategies for strategy in strategies
        ):
            lacking = " or ".join(strategy.value for strategy in strategies)
            found.append(f"{name} has no effect, because strategies does not name {lacking}")
    for strategy in policy.approve:
        if strategy not in policy.strategies:
            word = strategy.value
            found.append(f"approve: {word} has no effect, because strategies does not name {word}")
    if policy.approval_timeout_s != usual.approval_timeout_s and not policy.approve:
        found.append("approval_timeout_s has no effect, because approve names no strategy")
    return found


def _check_strategies(name: str, given: tuple[Strategy, ...], choice: tuple[Strategy, ...]) -> None:
    for index, strategy in enumerate(given):
        if strategy not in choice:
            allowed = ", ".join(s.value for s in choice)
            raise ValueError(f"policy: {name} has {strategy!r}; choose from {allowed}")
        if strategy in given[:index]:
            raise ValueError(f"policy: {name} names {strategy.value} twice")
