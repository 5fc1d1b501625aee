"""Rerun failed tests alone: a flaky test passes, a broken test fails again.

With `--alone 5`, the failed tests of a file run up to five more times after all workers have ended,
each time in a new pytest process with no other tests. Tests of one file often share a job, and one
fault of the job fails them all. A test that passes five times is flaky. Any other test is broken.
The run fails if a test is broken or if more than two files have flaky tests. It also fails if
pytest stopped early.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

MAX_FLAKY = 2  # files
MAX_RERUN = 10  # files; the failed tests of others do not run again, and the run fails
LIMIT_S = 900.0  # for one rerun; the time limits of the tests are shorter


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--alone", type=int, default=0, metavar="N", help="rerun each failed test N times, alone"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--alone") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Reruns(config), "rekindle-reruns")


class Reruns:
    """Rerun failed tests in the process that the user started, never in a worker."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._times: int = config.getoption("--alone")
        self._failures: dict[str, list[pytest.TestReport]] = {}
        self._flaky: list[str] = []
        self._broken: dict[str, str] = {}  # with the output of the failed rerun
        self._not_rerun: list[str] = []

    @property
    def _flaky_files(self) -> set[str]:
        return set(map(_file_of, self._flaky))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failures.setdefault(report.nodeid, []).append(report)
            # A run that someone ends in its reruns has no summary.
            self._print(f"failed: {report.nodeid} [{report.when}]: {_reason(report)}")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        # xdist ends its workers in this hook. pytest prints its summary after this hook.
        if session.exitstatus != pytest.ExitCode.TESTS_FAILED or not self._failures:
            return
        files: dict[str, list[str]] = {}
        for test in self._failures:
            files.setdefault(_file_of(test), []).append(test)
        groups = list(files.values())
        self._not_rerun = list(itertools.chain(*groups[MAX_RERUN:]))
        for tests in groups[:MAX_RERUN]:
            self._rerun(tests)
        if not (self._broken or self._not_rerun or len(self._flaky_files) > MAX_FLAKY):
            session.exitstatus = pytest.ExitCode.OK
        self._count_as_flaky()

    def _rerun(self, tests: list[str]) -> None:
        """Run the failed tests of a file again. A test that fails again does not run once more."""
        for number in range(1, self._times + 1):
            start = time.monotonic()
            output = self._run_once(tests) if tests else None
            seconds = time.monotonic() - start
            failed = [] if output is None else _failed(tests, output)
            for test in tests:
                outcome = "FAILED" if test in failed else "passed"
                self._print(f"rerun {number}/{self._times} {outcome} in {seconds:.1f} s: {test}")
            for test in failed:
                self._broken[test] = f"rerun {number} of {self._times}:\n{output}"
            tests = [test for test in tests if test not in failed]
        self._flaky += tests

    def _run_once(self, tests: list[str]) -> str | None:
        """Return the output of a run with a failure, or None if all tests passed."""
        # The console script, as in the Makefile. `python -m pytest` would add the root to sys.path.
        script = Path(sys.executable).with_name("pytest")
        options = ["-n", "0"] if self._config.pluginmanager.hasplugin("xdist") else []
        options += [
            "-p",
            "no:cacheprovider",
            "-q",
            "-rfE",
            "-m",
            self._config.getoption("-m") or "",
        ]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        try:
            finished = subprocess.run(
                [str(script), *options, *tests],
                cwd=self._config.rootpath,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            return f"the rerun did not end within {LIMIT_S:g} s\n{error.output or ''}"
        return None if finished.returncode == pytest.ExitCode.OK else finished.stdout

    def _count_as_flaky(self) -> None:
        """Count flaky tests separately in the last line of pytest."""
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is None:
            return
        for outcome in ("failed", "error"):
            reports = reporter.stats.get(outcome, [])
            flaky = [r for r in reports if getattr(r, "nodeid", "") in self._flaky]
            if flaky:
                reporter.stats[outcome] = [r for r in reports if r not in flaky]
                reporter.stats.setdefault("flaky", []).extend(flaky)

    def _print(self, line: str) -> None:
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.ensure_newline()
            reporter.write_line(line)

    @pytest.hookimpl(wrapper=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
        yield  # print after the summaries of pytest
        if not (self._flaky or self._broken or self._not_rerun):
            return
        out = terminalreporter
        for test in self._flaky:
            out.section(f"FLAKY: {test}", sep="_", yellow=True)
            for report in self._failures[test]:
                out.write_line(f"[{report.when}] {report.longreprtext[-3000:]}")
        for test, output in self._broken.items():
            out.section(f"BROKEN: {test}", sep="_", red=True)
            out.write_line(output[-3000:])
        out.section("reruns", sep="=", bold=True)
        for test in self._flaky:
            out.write_line(f"FLAKY   {test}: {self._times} of {self._times} reruns passed; fix it")
            for report in self._failures[test]:
                out.write_line(f"        {_reason(report)}")
        for test in self._broken:
            out.write_line(f"BROKEN  {test}: a rerun failed", red=True)
        for test in self._not_rerun:
            out.write_line(f"NOT RERUN {test}: more than {MAX_RERUN} tests failed", red=True)
        if len(self._flaky_files) > MAX_FLAKY:
            files = len(self._flaky_files)
            out.write_line(f"{files} files with flaky tests; the limit is {MAX_FLAKY}", red=True)


def _file_of(test: str) -> str:
    return test.partition("::")[0]


def _failed(tests: list[str], output: str) -> list[str]:
    """Return the tests that failed in a rerun; all, if the run ended without a list of them."""
    lines = output.splitlines()
    named = [
        test
        for test in tests
        if any(f"{line} - ".startswith((f"FAILED {test} - ", f"ERROR {test} - ")) for line in lines)
    ]
    return named or tests


def _reason(report: pytest.TestReport) -> str:
    """Return the first line of the error, at most 300 characters."""
    lines = [each[1:].strip() for each in report.longreprtext.splitlines() if each[:2] == "E "]
    return (lines or ["no error text"])[0][:300]
