"""Settings that every test shares."""

import os
import signal
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import settings

# `durations` first: others import it, and pytest must be the first to do so.
pytest_plugins = [
    "suite.durations",
    "suite.calibration",
    "suite.changed",
    "suite.progress",
    "suite.rerun",
]

# A slow machine is no failure, and a failure must come again when the tests are run again.
settings.register_profile("rekindle", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("rekindle")

# What a surrounding torchrun, job or Prefect run would tell the processes that tests start.
_INHERITED = ("REKINDLE_", "PREFECT_", "TORCHELASTIC_", "MASTER_", "GROUP_", "ROLE_")
_INHERITED_NAMES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}
_MEANT_FOR_TESTS = "REKINDLE_TEST_"


def _clean_environment(prefect_home: str) -> None:
    for name in list(os.environ):
        if name.startswith(_MEANT_FOR_TESTS):
            continue
        if name.startswith(_INHERITED) or name in _INHERITED_NAMES:
            del os.environ[name]
    os.environ["PREFECT_HOME"] = prefect_home
    os.environ["PREFECT_SERVER_ANALYTICS_ENABLED"] = "false"
    # The server on SQLite has been seen to wait for its own lock for a minute.
    os.environ["PREFECT_API_REQUEST_TIMEOUT"] = "150"
    os.environ["DO_NOT_TRACK"] = "1"


# Prefect reads its settings when it is imported, which may be before the first fixture.
_prefect_home = tempfile.TemporaryDirectory(prefix="rekindle-tests-", ignore_cleanup_errors=True)
_clean_environment(_prefect_home.name)


# What a shell runs in the background ignores Ctrl-C, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _remove_prefect_home() -> Iterator[None]:
    yield
    _prefect_home.cleanup()
