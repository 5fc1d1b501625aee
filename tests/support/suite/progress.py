"""Show every 20 seconds the number of ended tests, the running tests, and the remaining time.

The remaining time is the listed seconds of all files that have not ended, divided by the workers
and scaled by the speed of this run so far.
"""

from __future__ import annotations

import time
from collections import Counter

import pytest

from suite import durations

EVERY_S = 20.0
QUICK_S = 0.02  # for each test of a file that is not listed


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput") and not config.option.collectonly:
        config.pluginmanager.register(Progress(config), "rekindle-progress")


def expected(tests: Counter[str], listed: dict[str, float]) -> dict[str, float]:
    """Return the expected seconds of each test, by its file."""
    return {
        path: listed[path] / count if path in listed else QUICK_S for path, count in tests.items()
    }


def left_s(done: float, total: float, elapsed: float) -> float | None:
    """Estimate the remaining seconds; None: too few tests have ended."""
    if done < 0.01 * total or not done:
        return None
    return elapsed * (total - done) / done


class Progress:
    """The progress, in the process that the user started.

    It sees the start and end of each test.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._expected: dict[str, float] = {}
        self._total = 0
        self._total_s = 0.0
        self._done = 0
        self._done_s = 0.0
        self._running: dict[str, float] = {}
        self._started = self._printed = time.monotonic()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:  # without workers
            self._begin([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        if not self._total:
            self._begin(ids)

    def _begin(self, tests: list[str]) -> None:
        files = Counter(map(durations.file_of, tests))
        self._expected = expected(files, durations.read())
        self._total = len(tests)
        self._total_s = sum(self._expected[path] * count for path, count in files.items())
        self._started = self._printed = time.monotonic()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running[nodeid] = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if self._running.pop(nodeid, None) is not None:
            self._done += 1
            self._done_s += self._expected.get(durations.file_of(nodeid), QUICK_S)
        now = time.monotonic()
        if now - self._printed >= EVERY_S:
            self._printed = now
            self._print(now)

    def _print(self, now: float) -> None:
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is None:
            return
        elapsed = now - self._started
        left = left_s(self._done_s, self._total_s, elapsed)
        estimate = "" if left is None else f", about {_minutes(left)} left"
        running = ", ".join(
            f"{name.removeprefix('tests/')} ({now - since:.0f} s)"
            for name, since in self._running.items()
        )
        reporter.ensure_newline()
        reporter.write_line(
            f"[{_minutes(elapsed)}{estimate}] {self._done} of {self._total} tests; "
            f"running: {running or 'nothing'}"
        )


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
