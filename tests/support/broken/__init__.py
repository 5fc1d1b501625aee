"""A bug in coordinators or agents: a method raises an error as soon as the test wants it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

HOOK = Path(__file__).with_name("hook")


class Bug:
    """A bug in this method of coordinators, or of agents, that start with `environment`.

    `once`: only the first call of the method raises an error; otherwise each call does.
    """

    def __init__(self, folder: Path, method: Callable[..., Any], *, once: bool = True) -> None:
        self._cause = folder / "bug"
        owner, name = method.__qualname__.split(".")
        bug = {"module": method.__module__, "owner": owner, "method": name}
        bug |= {"file": str(self._cause), "once": once}
        paths = f"{HOOK}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        self.environment = {"PYTHONPATH": paths, "BROKEN": json.dumps(bug)}

    def begin(self) -> None:
        """Let the next call of the method raise an error."""
        self._cause.touch()
