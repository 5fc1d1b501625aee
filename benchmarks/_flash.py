"""Use DLRover's flash checkpoint in a job that dlrover-run has not launched.

A separate process then writes the state that the ranks have put into shared memory. This module
removes the shared memory that remains when the job has ended.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import time
from pathlib import Path
from typing import Any

ENV_RUN = "TORCHELASTIC_RUN_ID"  # DLRover uses it in the names of its shared memory and sockets
LIMIT_S = 600
POLL_S = 0.01


def is_installed() -> bool:
    """Return whether DLRover is installed for the comparison."""
    return importlib.util.find_spec("dlrover") is not None


class Flash:
    """Saves a state that all ranks hold; all ranks must call each method."""

    def __init__(self, folder: Path) -> None:
        # All ranks have the same folder, and its name avoids conflicts with another job's sockets.
        os.environ[ENV_RUN] = f"benchmark-{hashlib.sha256(bytes(folder)).hexdigest()[:12]}"
        # DLRover reads the variable when it is imported.
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

        logging.getLogger("dlrover").setLevel(logging.ERROR)
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._checkpointer = DdpCheckpointer(str(folder))
        self._step = 0

    def save(self, state: dict[str, Any]) -> None:
        """Put the state into shared memory, from which DLRover writes it."""
        self._step += 1
        self._checkpointer.save_checkpoint(self._step, state)

    def wait(self) -> None:
        """Wait until the state is written: DLRover skips a save that comes earlier."""
        tracker, deadline = self._folder / "dlrover_latest.txt", time.monotonic() + LIMIT_S
        while not tracker.exists() or tracker.read_text() != str(self._step):
            if time.monotonic() > deadline:
                raise TimeoutError(f"DLRover has not written step {self._step}")
            time.sleep(POLL_S)

    def close(self) -> None:
        """Remove DLRover's shared memory."""
        for left in Path("/dev/shm").glob(f"{os.environ[ENV_RUN]}*"):
            left.unlink(missing_ok=True)
