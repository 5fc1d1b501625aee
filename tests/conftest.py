"""The plugins, settings and environment that all tests share."""

import os
import signal
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import settings

# `suite.durations` is first: the other plugins import it, and pytest must import it before them.
pytest_plugins = [
    "suite.durations",
    "suite.calibration",
    "suite.changed",
    "suite.progress",
    "suite.rerun",
]

# A slow machine must not fail a test, so no test has a deadline. `derandomize` makes a failure
# reproducible.
settings.register_profile("rekindle", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("rekindle")

# Prefixes of variables that a surrounding torchrun, job or Prefect run passes to child processes.
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
    # On SQLite, the Prefect server sometimes waits for its own lock for one minute.
    os.environ["PREFECT_API_REQUEST_TIMEOUT"] = "150"
    os.environ["DO_NOT_TRACK"] = "1"


# Prefect reads its settings on import, possibly before the first fixture, so this runs on import.
_prefect_home = tempfile.TemporaryDirectory(prefix="rekindle-tests-", ignore_cleanup_errors=True)
_clean_environment(_prefect_home.name)


# A shell starts background commands with SIGINT ignored, and child processes inherit this. The
# default handler makes Ctrl-C work again.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _remove_prefect_home() -> Iterator[None]:
    yield
    _prefect_home.cleanup()
