"""Make file system calls of agents hang, and record the calls on an event loop.

Python imports this module at its start if its folder is on PYTHONPATH. Only agents are affected.
Python reports calls of `open`, `os.mkdir` and others to audit hooks, before it makes them.
"""

from __future__ import annotations

import json
import os
import sys
import time

PACE_S = 0.05
SETTINGS = json.loads(os.environ["HANGING"])


def _hook(event: str, arguments: tuple[object, ...]) -> None:
    path = arguments[0] if arguments else None
    if event.partition(".")[0] not in ("open", "os") or not isinstance(path, str | os.PathLike):
        return
    path = os.fspath(path)
    if not path.startswith(tuple(SETTINGS["below"])):
        return
    loops = sys.modules.get("asyncio.events")
    if loops is not None and loops._get_running_loop() is not None:
        _record(f"node {_node} on its loop: {event} {path}")
    call = f"{event} {path.rpartition('/')[2]}"
    if call in _hangs and path.startswith(SETTINGS["hangs_below"]) and os.access(_cause, os.F_OK):
        seconds = _hangs.pop(call)
        _record(f"node {_node} hangs: {call}")
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            time.sleep(PACE_S)


def _record(line: str) -> None:
    fd = os.open(SETTINGS["record"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(fd, f"{line}\n".encode())
    os.close(fd)


if "rekindle.agent.process" in sys.orig_argv:
    _node = sys.orig_argv[sys.orig_argv.index("--node") + 1]
    _cause = SETTINGS["cause"]
    _hangs = SETTINGS["hangs"].get(_node, {})  # seconds of each call that hangs, once
    if SETTINGS["logs_s"]:
        from rekindle.agent import output

        output.LOGS_S = SETTINGS["logs_s"]
    sys.addaudithook(_hook)
