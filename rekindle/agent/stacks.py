"""Reads the stacks of a rank: the rank writes them at a signal (`rekindle.rank.program`)."""

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

from rekindle.agent.devices import tools as device_tools
from rekindle.agent.threads import in_thread
from rekindle.console import say
from rekindle.job.lifeline import catches
from rekindle.rank.program import stack_signal

LIMIT_S = 0.8
_TICK_S = 0.02
_CALM_LOOKS = 5  # looks without growth; the process writes line by line
# `py-spy dump` writes a line for each thread, and under it its frames: `    function (file:line)`.
_THREAD = re.compile(r'^Thread .*?(?:: "(.*)")?$')
_SPIED = re.compile(r"^    (.+) \((.*):(\d+)\)$")

MOST = 6000  # characters of a stack in a message; the file has the whole stack
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
_INNERMOST = 4

# Other code under torch/distributed computes on its own, such as the writer of its checkpoints.
_WAITS = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/_functional_collectives.py",
    "torch/distributed/rendezvous.py",
    "torch/distributed/elastic/utils/store.py",
    " in _sync_params_and_buffers",
    " in _verify_param_shape_across_processes",
    "training/torch/groups/gloo_waits.py",
    " in synchronize",
)
_DISPATCHER = "torch/_ops.py"  # calls the C++ code of a torch function
_MAY_WAIT = " in _engine_run_backward"  # in C++: DDP's all-reduce, and computation
_WRAPPERS = (
    "training/torch/groups/gloo_waits.py",
    "torch/distributed/c10d_logger.py",
)  # frames without information
# These are on the stack while torch.compile compiles, not while the compiled code runs.
_COMPILES = ("torch/_dynamo/convert_frame.py", "torch/_inductor/compile_fx.py", "triton/compiler/")


async def stack_of(pid: int, path: Path) -> str:
    """Return the stacks of a process; empty: it writes none in time, and py-spy cannot read them.

    path: the file to which the process writes its stacks.
    """
    with contextlib.suppress(asyncio.TimeoutError, ProcessLookupError):
        # The thread may wait for a file system while the process ends: it signals no other one.
        process = os.pidfd_open(pid)
        written = await asyncio.wait_for(in_thread(_ask, pid, process, path), 2 * LIMIT_S)
        if written:
            return written
    return await dump(pid, LIMIT_S)


def _ask(pid: int, process: int, path: Path) -> str:
    """Make a process write its stacks, and return them. Closes `process`, its pidfd."""
    begin = _size(path)
    try:
        if not catches(pid, stack_signal()):  # it would end any other process
            return ""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, stack_signal())
    finally:
        os.close(process)
    deadline = time.monotonic() + LIMIT_S
    last_size, calm = begin, 0
    while calm < _CALM_LOOKS and time.monotonic() < deadline:
        time.sleep(_TICK_S)
        size = _size(path)
        calm = calm + 1 if size == last_size > begin else 0
        last_size = size
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(begin)
        return file.read().decode(errors="replace")
    return ""


async def dump(pid: int, limit_s: float) -> str:
    """Return the stacks of a process in faulthandler's form; empty: py-spy cannot read them."""
    try:
        tool = await asyncio.wait_for(in_thread(_py_spy), limit_s)
    except asyncio.TimeoutError:
        say(f"the search for py-spy took more than {limit_s:g} s")
        return ""
    if tool is None:
        return ""
    arguments = ("dump", "--nonblocking", "--full-filenames", "--pid", str(pid))
    written, error, _ = await device_tools.run(limit_s, tool, *arguments)
    if error and not written:  # the inspection continues without the stack
        say(error)
    return translate(written)


def _py_spy() -> str | None:
    return shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))


def translate(written: str) -> str:
    """Convert py-spy's output to faulthandler's form, in which the main thread is the last."""
    main, others, frames = "", list[str](), list[str]()
    for line in reversed(written.splitlines()):
        if frame := _SPIED.match(line):
            frames.append(f'  File "{frame[2]}", line {frame[3]} in {frame[1]}')
        elif thread := _THREAD.match(line):
            stack = "\n".join((f"{line} (most recent call first):", *reversed(frames)))
            frames = []
            if thread[1] == "MainThread":
                main = stack
            else:
                others.append(stack)
    return "\n\n".join(filter(None, (*others, main)))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def main_thread(stacks: str) -> str:
    """Return the stack of the main thread: the oldest thread, whose stack is the last one."""
    return stacks.rstrip().rpartition("\n\n")[2]


def innermost(stack: str) -> str:
    """Return the innermost frames of a stack in one line: `function (file:line) < ...`."""
    found = [match for line in stack.splitlines() if (match := _FRAME.match(line))]
    frames = [match for match in found if not match[1].endswith(_WRAPPERS)]
    return " < ".join(
        f"{function} ({'/'.join(Path(file).parts[-2:])}:{line})"
        for file, line, function in (match.groups() for match in frames[:_INNERMOST])
    )


def waits_for_others(stack: str, *, busy: bool) -> bool:
    """Return whether a process with this stack waits for other ranks. busy: it computes."""
    frames = (line for line in stack.splitlines() if _FRAME.match(line))
    innermost = next((line for line in frames if _DISPATCHER not in line), "")
    if _MAY_WAIT in innermost:
        return not busy
    return any(mark in innermost for mark in _WAITS)


def compiles(stack: str) -> bool:
    """Return whether a process with this stack compiles."""
    return any(mark in stack for mark in _COMPILES)
