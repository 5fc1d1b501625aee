"""What is raised to have a training loop report something.

Each says it in MindSpore's words, which its `Model.train` looks for, and in torch-npu's, which
`tft_exception_handler` looks for: neither finds any of the other's.
"""

from __future__ import annotations


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
