"""The stacks of a Python process: it writes them at a signal, and these functions read them.

The handler is faulthandler's. It runs in C, even if the interpreter waits or another thread holds
the GIL. A process does not answer while it is stopped, or in a system call that nothing interrupts.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sys
from pathlib import Path

SIGNAL = signal.SIGRTMIN + 8  # scripts and libraries use the named signals; no shell sends it
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


def answer_signals(path: Path) -> None:
    """Make this process append its stacks to a file at each SIGNAL."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:  # a full disk must not stop the training
        print(f"rekindle: the rank cannot write its stacks: {error}", file=sys.stderr, flush=True)
        return
    faulthandler.register(SIGNAL, file=fd, all_threads=True, chain=False)


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
