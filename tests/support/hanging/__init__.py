"""Files that hang: a log directory, in which agents wait before some calls, and a full pipe."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from jobs import Place

from rekindle.coordinator.agent_connection import LOOK_S, LOST_AFTER

HOOK = Path(__file__).with_name("hook")
# An agent whose loop waits for so long loses its connection.
LONG_S = 1.5 * LOST_AFTER * LOOK_S
FOREVER_S = 3600.0


class HangingLogs:
    """The calls of agents below the log directory `logs` that hang, once each.

    `hangs`: by node, the call with the name of its file, and its seconds. `logs_s`: the time after
    which an agent no longer waits for its logs; 0: the product's own.
    """

    def __init__(
        self,
        place: Place,
        hangs: Mapping[int, Mapping[str, float]],
        *,
        logs_s: float = 0.0,
    ) -> None:
        self.logs = place.folder / "logs"
        self._record = place.folder / "calls"
        self._cause = place.folder / "hang"
        settings = {
            "below": [str(place.home), str(self.logs)],
            "hangs_below": str(self.logs),
            "hangs": hangs,
            "cause": str(self._cause),
            "record": str(self._record),
            "logs_s": logs_s,
        }
        paths = f"{HOOK}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        hook = {"PYTHONPATH": paths, "HANGING": json.dumps(settings)}
        self.environment = place.environment(hook)

    def begin(self) -> None:
        """Let the next call with each file hang."""
        self._cause.touch()

    def calls(self) -> list[str]:
        """Return the calls so far that hung or that were on an event loop, sorted."""
        return sorted(self._record.read_text().splitlines()) if self._record.exists() else []


class HangingFile:
    """A named pipe with the name of a file. It takes no more data until the test reads from it."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(path)
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        self.text = ""

    def fill(self) -> None:
        """Let the next write hang."""
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(self._fd, b"\0" * 4096)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(self._fd, b"\0")

    def read(self) -> str:
        """Take all data, so that writes continue. Return the text so far."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._fd, 1 << 16):
                self.text += data.replace(b"\0", b"").decode()
        return self.text

    def close(self) -> None:
        os.close(self._fd)
