"""Test a training script: run it, break it, and check that nothing was lost.

The fixture `rekindle_run` comes with the installed package. It starts a `Run`, whose result is a
`Report`. A `JobHandle` has the same waits for a job that another process has started. The events of
a job are in `journal`.

This package may not import Prefect, flows, tasks or coordinator.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rekindle.recovery.journal import journal
    from rekindle.testing.handle import JobHandle, RunError
    from rekindle.testing.runs import KINDS, Report, Run

__all__ = ["KINDS", "JobHandle", "Report", "Run", "RunError", "journal"]

_MODULES = {
    "JobHandle": "rekindle.testing.handle",
    "KINDS": "rekindle.testing.runs",
    "Report": "rekindle.testing.runs",
    "Run": "rekindle.testing.runs",
    "RunError": "rekindle.testing.handle",
}


def __getattr__(name: str) -> Any:
    # pytest imports this package in every test run, so it imports each name at its first use.
    if name == "journal":
        return importlib.import_module("rekindle.recovery.journal.journal")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
