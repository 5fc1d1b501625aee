"""DLRover's flash checkpoint, as a job has it that dlrover-run has not launched.

A process of its own then writes what the ranks have put into shared memory. What it leaves there
when the job has ended is removed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import time
from pathlib import Path
from typing import Any

ENV_RUN = "TORCHELASTIC_RUN_ID"  # what DLRover names its shared memory and sockets after
LIMIT_S = 600
POLL_S = 0.01


def is_installed() -> bool:
    """Whether it can be compared with."""
    return importlib.util.find_spec("dlrover") is not None


class Flash:
    """Saves a state that all ranks hold; all of them have to call."""

    def __init__(self, folder: Path) -> None:
        # All ranks have the same folder; sockets that another job has left are in nobody's way.
        os.environ[ENV_RUN] = f"benchmark-{hashlib.sha256(bytes(folder)).hexdigest()[:12]}"
        # It reads the variable when it is imported.
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

        logging.getLogger("dlrover").setLevel(logging.ERROR)
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._checkpointer = DdpCheckpointer(str(folder))
        self._step = 0

    def save(self, state: dict[str, Any]) -> None:
        """Put the state into shared memory, and have it written from there."""
        self._step += 1
        self._checkpointer.save_checkpoint(self._step, state)

    def wait(self) -> None:
        """Until it is written: a save that comes before is left out."""
        tracker, deadline = self._folder / "dlrover_latest.txt", time.monotonic() + LIMIT_S
        while not tracker.exists() or tracker.read_text() != str(self._step):
            if time.monotonic() > deadline:
                raise TimeoutError(f"DLRover has not written step {self._step}")
            time.sleep(POLL_S)

    def close(self) -> None:
        """Remove its shared memory."""
        for left in Path("/dev/shm").glob(f"{os.environ[ENV_RUN]}*"):
            left.unlink(missing_ok=True)
