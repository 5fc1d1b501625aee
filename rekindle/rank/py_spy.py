"""Stacks of processes that do not write their own: py-spy reads them, where it is installed.

It needs the right to read another process (ptrace), which containers may not give.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import sys
from pathlib import Path

# `py-spy dump` writes a line on each thread, and its frames below: `    function (file:line)`.
_THREAD = re.compile(r'^Thread .*?(?:: "(.*)")?$')
_FRAME = re.compile(r"^    (.+) \((.*):(\d+)\)$")


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
