"""Unit tests do not start processes or open ports, unless they have the mark `process`."""

from __future__ import annotations

import multiprocessing.process
import sys
from collections.abc import Iterator
from typing import Any

import matplotlib.font_manager  # noqa: F401  # the first import on a machine starts fc-list
import pytest
import urllib3  # noqa: F401  # the import binds a port; here it precedes the first test

_FORBIDDEN = {
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.system",
    "socket.bind",
    "subprocess.Popen",
}
_seen: list[str] | None = None  # events of the running test; None: the test may do all of this


def _note(event: str) -> None:
    if _seen is not None:
        _seen.append(event)


def _audit(event: str, _: tuple[Any, ...]) -> None:
    if event in _FORBIDDEN:
        _note(event)


sys.addaudithook(_audit)
_start = multiprocessing.process.BaseProcess.start


def _noted_start(process: multiprocessing.process.BaseProcess) -> None:
    _note("multiprocessing")
    _start(process)


multiprocessing.process.BaseProcess.start = _noted_start  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def _no_process(request: pytest.FixtureRequest) -> Iterator[None]:
    global _seen
    if request.node.get_closest_marker("process") is not None:
        yield
        return
    _seen = []
    yield
    seen, _seen = _seen, None
    assert not seen, f"{sorted(set(seen))}: mark this test `process`, or move it to integration/"
