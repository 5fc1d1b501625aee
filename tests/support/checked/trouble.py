"""Faults for the checkers of a simulated host: a test kills them or slows their devices."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil

from rekindle.training.node_check.serving import NAME

_SLOW_DEVICE = Path(__file__).parent / "slow_device"


def checkers(host: str, within: Path) -> Iterator[psutil.Process]:
    """Yield the running checkers of a simulated host of the job in this folder."""
    for process in psutil.process_iter(["name", "ppid"]):
        if process.info["name"] != NAME:
            continue
        with contextlib.suppress(psutil.NoSuchProcess):
            words = [Path(word) for word in psutil.Process(process.info["ppid"]).cmdline()]
            if any(word.name == host and word.is_relative_to(within) for word in words):
                yield process


class Killer:
    """Kill each checker of a host as soon as it starts, until the context ends."""

    def __init__(self, host: str, within: Path) -> None:
        self._host, self._within = host, within
        self._over = threading.Event()
        self.victims: set[int] = set()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.is_set():
            for process in checkers(self._host, self._within):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
                    self.victims.add(process.pid)
            self._over.wait(0.005)


def slow(*hosts: str, seconds: float, begins: Path | None = None) -> dict[str, str]:
    """Return the environment in which each matrix product of these hosts takes additional seconds.

    `begins`: the file whose creation starts the delay; None: the delay exists from the start.
    """
    return {
        "PYTHONPATH": str(_SLOW_DEVICE),
        "SLOW_HOSTS": " ".join(hosts),
        "SLOW_S": str(seconds),
        "SLOW_FILE": str(begins or ""),
    }
