"""MindIO's states and actions, and the errors after which a training loop reports a state."""

from __future__ import annotations

import enum


def damaged(text: str) -> RuntimeError:
    """Return the error for damaged memory of this rank's device."""
    return RuntimeError(f"UCEError error occurs when execute, error_code=507053: UCE ERROR {text}")


def stopped(step: int) -> RuntimeError:
    """Return the error for a healthy rank that cannot continue because of another rank."""
    return RuntimeError(
        f"ForceStopError error occurs when execute: FORCE STOP, not all ranks can do step {step}"
    )


def cut_off(error: Exception) -> RuntimeError:
    """Return the error for another rank that this rank cannot reach."""
    return RuntimeError(
        f"SuspectRemoteError error occurs when execute: SUSPECT REMOTE ERROR {error}"
    )


class ReportState(enum.Enum):
    """The states that a rank reports (`tft_report_error`)."""

    RS_NORMAL = 0  # the rank was only stopped
    RS_RETRY = 1
    RS_UCE = 2
    RS_UCE_CORRUPTED = 3
    RS_HCCL_FAILED = 4
    RS_INIT_FINISH = 5
    RS_PREREPAIR_FINISH = 6
    RS_STEP_FINISH = 7
    RS_UNKNOWN = 8


class RepairType(enum.Enum):
    """The actions of a repair handler."""

    RT_SEND = 0
    RT_UCE_HIGHLEVEL = 1  # build model and optimizer again, and receive their state
    RT_UCE_LOWLEVEL = 2
    RT_RECV_REPAIR = 3
    RT_ROLLBACK = 4
    RT_LOAD_CKPT = 5
    RT_LOAD_REBUILD = 6


class Action(enum.Enum):
    """The next action of a rank."""

    RETRY = 0
    EXIT = 1


class OptimizerType(enum.Enum):
    """The optimizer whose state a group of replicas shares: a model may have two."""

    ATTENTION = 0
    MOE = 1
