"""Unit tests do not start processes or open ports, unless they have the mark `process`."""

from __future__ import annotations

import multiprocessing.process
import sys
from collections.abc import Iterator
from typing import Any

import pytest

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
    if event in _FORBIDDEN and not _imports():
        _note(event)


def _imports() -> bool:
    """Return whether an import does it: urllib3 binds a port, matplotlib may start fc-list.

    Otherwise the first test that reaches such a library would fail, and the later ones would pass.
    """
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


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
