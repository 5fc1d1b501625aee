"""Run the demo's processes, and end them by their ids."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def background(
    command: list[str], log: Path, *, patience_s: float = 5.0
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in its own session until the block ends, also after an error in the block."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        _end(process, patience_s)


def _end(process: subprocess.Popen[bytes], patience_s: float) -> None:
    """Send SIGTERM to the process, and then SIGKILL to the rest of its session."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
