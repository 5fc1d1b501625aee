"""Give processes a bug: one method raises an error while a file exists.

Python imports this module at its start if its folder is on PYTHONPATH. Only coordinators or agents
are affected: those whose folder of the package has the method.
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


_BUG = json.loads(os.environ["BROKEN"])
_FOLDER = ".".join(_BUG["module"].split(".")[:2])
if {f"{_FOLDER}.process", f"{_FOLDER}.pod_process"} & set(sys.orig_argv):
    _break(**_BUG)
