"""Give coordinators a bug: one method raises an error while a file exists.

Python imports this module at its start if its folder is on PYTHONPATH. Only coordinators are
affected.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any


def _break(module: str, owner: str, method: str, file: str, once: bool) -> None:
    place = getattr(importlib.import_module(module), owner)
    works, cause = getattr(place, method), Path(file)

    @functools.wraps(works)
    def broken(*arguments: Any) -> Any:
        if not cause.exists():
            return works(*arguments)
        if once:
            cause.unlink()
        raise KeyError("a bug of the test")

    setattr(place, method, broken)


if "rekindle.coordinator.process" in sys.orig_argv:
    _break(**json.loads(os.environ["BROKEN"]))
