"""Failed tests run again alone: real pytest runs of small suites, with the plugin."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from repository import SUPPORT
from waiting import run_command

pytestmark = pytest.mark.process

# The fixture `beside` is true in a run of all tests, and false in a rerun.
CONFTEST = """
import os
import pytest

pytest_plugins = ["suite.rerun"]

# The plugin starts reruns in its own hook for the end, which is called after this one.
BESIDE = os.environ.get("SUITE") == "all"


def pytest_sessionfinish():
    os.environ["SUITE"] = "alone"


@pytest.fixture(scope="session")
def beside():
    return BESIDE
"""
PASSES = "def test_passes(): pass\n"
FLAKY = "def test_flaky_{}(beside): assert not beside\n"
BROKEN = "def test_broken(): raise AssertionError('always')\n"
SET_UP = """
import pytest

@pytest.fixture
def given():
    raise OSError("no server")

def test_with_set_up(given): pass
"""
SESSION = """
import pytest

@pytest.fixture(scope="session")
def server(beside):
    assert not beside

def test_one(server): pass
def test_two(server): pass
"""
CRASH = """
import os

def test_crashes(beside):
    if beside:
        os._exit(9)

def test_after(): pass
"""
STOPS = "def test_stops(): __import__('pytest').exit('enough', 3)\n"


@dataclass(frozen=True)
class Outcome:
    """The exit status and the output of a pytest run."""

    status: int
    output: str

    def reruns(self, name: str) -> list[str]:
        """Return the outcome of each rerun of a test, in order."""
        # After results of workers, this line does not start in the first column.
        return re.findall(rf"rerun \d+/\d+ (\w+) in [\d.]+ s: \S+::{name}$", self.output, re.M)

    def listed(self, verdict: str) -> set[str]:
        """Return the tests that the last summary lists with a verdict."""
        lines = [line for line in self.output.splitlines() if line.startswith(f"{verdict} ")]
        return {line.partition("::")[2].partition(":")[0] for line in lines if "::" in line}


def run_suite(folder: Path, *files: str, times: int = 1, workers: int = 0) -> Outcome:
    """Run a suite of these files. times: reruns of each failed test."""
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -p no:hypothesispytest -p no:anyio\n")
    (folder / "conftest.py").write_text(CONFTEST)
    for number, text in enumerate(files):
        (folder / f"test_{number}.py").write_text(text)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(SUPPORT), "SUITE": "all"}
    script = Path(sys.executable).with_name("pytest")
    command = [str(script), "-n", str(workers), "-p", "no:cacheprovider", "--alone", str(times)]
    ran = run_command(command, cwd=folder, env=environment)
    return Outcome(ran.returncode, ran.stdout + ran.stderr)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Run a flaky test, a broken test and a failing set-up, with at most five reruns of each."""
    folder = tmp_path_factory.mktemp("mixed")
    return run_suite(folder, PASSES + FLAKY.format(1) + BROKEN, SET_UP, times=5)


def test_a_flaky_test_passes_five_times(mixed: Outcome) -> None:
    """The summary lists a test that passes all reruns as flaky, and counts it separately."""
    assert mixed.reruns("test_flaky_1") == ["passed"] * 5
    assert mixed.listed("FLAKY") == {"test_flaky_1"}
    assert "1 failed, 1 passed, 1 error, 1 flaky" in mixed.output


def test_a_broken_test_fails_again(mixed: Outcome) -> None:
    """After one failed rerun a test is broken, and the run fails."""
    assert mixed.status == 1, mixed.output
    assert mixed.reruns("test_broken") == ["FAILED"]
    assert "test_broken" in mixed.listed("BROKEN")


def test_an_error_in_set_up_counts_as_a_failure(mixed: Outcome) -> None:
    """A test whose fixture fails again is broken."""
    assert mixed.reruns("test_with_set_up") == ["FAILED"]
    assert mixed.listed("BROKEN") == {"test_broken", "test_with_set_up"}


def test_a_failed_session_fixture_fails_each_of_its_tests(tmp_path: Path) -> None:
    """Each test runs again alone with a new fixture; two flaky tests do not fail the run."""
    outcome = run_suite(tmp_path, SESSION, PASSES)
    assert outcome.listed("FLAKY") == {"test_one", "test_two"}, outcome.output
    assert outcome.reruns("test_one") == outcome.reruns("test_two") == ["passed"]
    assert outcome.status == 0


def test_three_files_with_flaky_tests_fail_the_run(tmp_path: Path) -> None:
    """More files than the limit fail the run, and the summary names the limit."""
    outcome = run_suite(tmp_path, *(FLAKY.format(number) for number in range(3)))
    assert outcome.status == 1, outcome.output
    assert len(outcome.listed("FLAKY")) == 3
    assert outcome.listed("BROKEN") == set()
    assert "3 files with flaky tests; the limit is 2" in outcome.output


def test_flaky_tests_of_one_file_count_once(tmp_path: Path) -> None:
    """One fault of a shared job can fail them all; the summary has the reason of each."""
    outcome = run_suite(tmp_path, "".join(FLAKY.format(number) for number in range(3)))
    assert outcome.status == 0, outcome.output
    assert len(outcome.listed("FLAKY")) == 3
    assert outcome.output.count("        assert not True") == 3


def test_the_crash_of_a_worker_counts_as_a_failure_of_its_test(tmp_path: Path) -> None:
    """The test that crashed the worker runs again alone; the others run in a new worker."""
    outcome = run_suite(tmp_path, CRASH, PASSES, workers=1)
    assert outcome.status == 0, outcome.output
    assert outcome.reruns("test_crashes") == ["passed"]
    assert outcome.listed("FLAKY") == {"test_crashes"}
    assert "2 passed, 1 flaky" in outcome.output


def test_a_run_that_stopped_early_fails(tmp_path: Path) -> None:
    """If a run stops early, no test runs again, because the other results are unknown."""
    outcome = run_suite(tmp_path, FLAKY.format(1), STOPS)
    assert outcome.status == 3, outcome.output
    assert outcome.reruns("test_flaky_1") == []
