"""The plugins, settings and environment that all tests share."""

import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator

import pytest
from hypothesis import settings
from suite.environment import clean

from rekindle import console, names

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

# Prefect reads its settings on import, possibly before the first fixture, so this runs on import.
_prefect_home = tempfile.TemporaryDirectory(prefix="rekindle-tests-", ignore_cleanup_errors=True)
clean(_prefect_home.name)


# A shell starts background commands with SIGINT ignored, and child processes inherit this. The
# default handler makes Ctrl-C work again.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _remove_prefect_home() -> Iterator[None]:
    yield
    _prefect_home.cleanup()


@pytest.fixture(autouse=True)
def _restore_console(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo what a command of Rekindle that a test calls does with the console of its process."""
    monkeypatch.setattr(console, "_here", console._here)
    for module in (sys, threading):
        monkeypatch.setattr(module, "excepthook", module.excepthook)
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    form = os.environ.get(names.ENV_LOG_FORMAT)
    yield
    if form is None:
        os.environ.pop(names.ENV_LOG_FORMAT, None)
    else:
        os.environ[names.ENV_LOG_FORMAT] = form
    for each in logging.getLogger().handlers.copy():
        if isinstance(each, console._Handler):
            logging.captureWarnings(False)
            logging.getLogger().removeHandler(each)
