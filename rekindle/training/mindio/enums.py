"""MindIO's states and actions, and the errors that make a training loop report a state."""

from __future__ import annotations

import enum


def damaged(told: str) -> RuntimeError:
    """The memory of this rank's device."""
    return RuntimeError(f"UCEError error occurs when execute, error_code=507053: UCE ERROR {told}")


def stopped(step: int) -> RuntimeError:
    """This rank is well, and cannot go on because of another."""
    return RuntimeError(
        f"ForceStopError error occurs when execute: FORCE STOP, not all ranks can do step {step}"
    )


def cut_off(error: Exception) -> RuntimeError:
    """Another rank cannot be reached."""
    return RuntimeError(
        f"SuspectRemoteError error occurs when execute: SUSPECT REMOTE ERROR {error}"
    )


class ReportState(enum.Enum):
    """What a rank reports (`tft_report_error`)."""

    RS_NORMAL = 0  # it was only stopped
    RS_RETRY = 1
    RS_UCE = 2
    RS_UCE_CORRUPTED = 3
    RS_HCCL_FAILED = 4
    RS_INIT_FINISH = 5
    RS_PREREPAIR_FINISH = 6
    RS_STEP_FINISH = 7
    RS_UNKNOWN = 8


class RepairType(enum.Enum):
    """What a repair handler is to do."""

    RT_SEND = 0
    RT_UCE_HIGHLEVEL = 1  # build model and optimizer anew, and receive their state
    RT_UCE_LOWLEVEL = 2
    RT_RECV_REPAIR = 3
    RT_ROLLBACK = 4
    RT_LOAD_CKPT = 5
    RT_LOAD_REBUILD = 6


class Action(enum.Enum):
    """What a rank does next."""

    RETRY = 0
    EXIT = 1


class OptimizerType(enum.Enum):
    """Which of its two optimizers a group of replicas shares."""

    ATTENTION = 0
    MOE = 1
