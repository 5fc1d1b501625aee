"""Reads the stacks of a rank's process: the process writes them, or py-spy reads them.

py-spy reads what cannot answer, where it is installed. It needs the right to read another process
(ptrace), which containers may not give.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

from rekindle.agent.threads import in_thread
from rekindle.rank.stacks import SIGNAL

LIMIT_S = 0.8
_TICK_S = 0.02
_CALM_LOOKS = 5  # looks without growth; the process writes line by line
# `py-spy dump` writes a line on each thread, and its frames below: `    function (file:line)`.
_THREAD = re.compile(r'^Thread .*?(?:: "(.*)")?$')
_FRAME = re.compile(r"^    (.+) \((.*):(\d+)\)$")


async def stack_of(pid: int, path: Path) -> str:
    """Return the stacks of a process; empty: it writes none in time, and cannot be read.

    path: the file that the process writes its stacks to.
    """
    with contextlib.suppress(asyncio.TimeoutError, ProcessLookupError):
        # The thread may wait for a file system while the process ends: it signals no other one.
        process = os.pidfd_open(pid)
        written = await asyncio.wait_for(in_thread(_ask, pid, process, path), 2 * LIMIT_S)
        if written:
            return written
    return await dump(pid, LIMIT_S)


def _ask(pid: int, process: int, path: Path) -> str:
    """Have a process write its stacks, and return them. Closes `process`, its pidfd."""
    begin = _size(path)
    try:
        if not _listens(pid):
            return ""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, SIGNAL)
    finally:
        os.close(process)
    deadline = time.monotonic() + LIMIT_S
    seen, calm = begin, 0
    while calm < _CALM_LOOKS and time.monotonic() < deadline:
        time.sleep(_TICK_S)
        size = _size(path)
        calm = calm + 1 if size == seen > begin else 0
        seen = size
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(begin)
        return file.read().decode(errors="replace")
    return ""


async def dump(pid: int, limit_s: float) -> str:
    """Return the stacks of a process as faulthandler would write them; empty: it cannot be read."""
    tool = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if tool is None:
        return ""
    try:
        process = await asyncio.create_subprocess_exec(
            tool,
            *("dump", "--nonblocking", "--full-filenames", "--pid", str(pid)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError as error:  # without its stack a rank is judged by what else is known
        print(f"rekindle agent: {tool} cannot be run: {error}", file=sys.stderr, flush=True)
        return ""
    try:
        written, _ = await asyncio.wait_for(process.communicate(), limit_s)
    except asyncio.TimeoutError:
        return ""
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    return translate(written.decode(errors="replace"))


def translate(written: str) -> str:
    """Turn what py-spy has written into faulthandler's form: the main thread comes last."""
    main, others, frames = "", list[str](), list[str]()
    for line in reversed(written.splitlines()):
        if frame := _FRAME.match(line):
            frames.append(f'  File "{frame[2]}", line {frame[3]} in {frame[1]}')
        elif thread := _THREAD.match(line):
            stack = "\n".join((f"{line} (most recent call first):", *reversed(frames)))
            frames = []
            if thread[1] == "MainThread":
                main = stack
            else:
                others.append(stack)
    return "\n\n".join(filter(None, (*others, main)))


def _listens(pid: int) -> bool:
    """Whether a process handles SIGNAL; it would end one that does not."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")  # its name is any bytes
    except OSError:
        return False
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (SIGNAL - 1) & 1)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
