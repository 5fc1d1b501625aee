"""One factor for all time limits: how much slower this machine is than the reference.

The process that the user started measures the factor once and puts it into the environment.
Workers, reruns and all processes of a test read it there. An idle 2-core machine has factor 1.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from waiting import FACTOR_VARIABLE, factor

# Wall seconds of `_measure` on the idle 2-core machine for which the limits were chosen.
REFERENCE_S = 0.2
MAX_FACTOR = 8.0
DEFAULT_TIMEOUT_S = 120.0  # for a test without a timeout mark


def pytest_configure(config: pytest.Config) -> None:
    if not config.option.collectonly:
        calibrate()


def calibrate() -> None:
    """Measure the factor, unless the environment has it."""
    if FACTOR_VARIABLE not in os.environ:
        os.environ[FACTOR_VARIABLE] = f"{min(MAX_FACTOR, max(1.0, _measure() / REFERENCE_S)):.2f}"


def pytest_report_header() -> str:
    return f"time limits: x {factor():g}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Scale the time limit of each test. pytest-timeout uses the nearest mark."""
    for item in items:
        mark = item.get_closest_marker("timeout")
        seconds = mark.args[0] if mark and mark.args else DEFAULT_TIMEOUT_S
        item.add_marker(pytest.mark.timeout(seconds * factor()), append=False)


def _measure() -> float:
    """Return the wall seconds in which two simultaneous processes start and compute."""
    work = "import asyncio, json, subprocess, unittest; sum(i * i for i in range(3_000_000))"
    start = time.monotonic()
    running = [subprocess.Popen([sys.executable, "-I", "-c", work]) for _ in range(2)]
    for process in running:
        process.wait()
    return time.monotonic() - start
