"""The environment of the tests, without what surrounding processes have passed on."""

from __future__ import annotations

import os

# Prefixes of variables that a surrounding torchrun, job or Prefect run passes to child processes.
_INHERITED = ("REKINDLE_", "PREFECT_", "TORCHELASTIC_", "MASTER_", "GROUP_", "ROLE_")
_INHERITED_NAMES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}
_MEANT_FOR_TESTS = "REKINDLE_TEST_"


def clean(prefect_home: str) -> None:
    """Remove inherited variables, and set those of Prefect."""
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
