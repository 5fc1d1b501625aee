"""The activity and the stacks that the agent reads of real processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from waiting import wait_until

from rekindle.agent import stacks
from rekindle.agent.process_activity import activities

RESTS = "import signal; signal.pause()"
COMPUTES = "while True: pass"
HAS_A_CHILD = """
import os, subprocess, sys
subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session={away})
print("ready", flush=True)
os.read(0, 1)
"""
IN_PYTHON = """
import sys, threading, time
from pathlib import Path
from rekindle.rank import program

def innermost_function():
    print("ready", flush=True)
    {does}

threading.Thread(target=threading.Event().wait, daemon=True).start()
if {answers}:
    program.answer_signals(Path(sys.argv[1]))
innermost_function()
"""
# prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY): if the kernel lets only ancestors read a process
# (ptrace_scope 1), this call lets each process of the same user read it. Otherwise it has no
# effect.
MAY_BE_READ = """
import ctypes
ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)
"""

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a Python process that leads a session, as ranks do; kill it after the test."""
    started: list[subprocess.Popen[bytes]] = []

    def run(text: str, *arguments: str, ready: bool = False) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-c", text, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        started.append(process)
        if ready:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
        return process

    yield run
    for process in started:
        for group in {process.pid, *_children(process.pid)}:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        process.communicate()


def _children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()] if path.exists() else []


def test_a_process_that_rests(start: Start) -> None:
    """A process that waits for a signal neither computes nor reads nor writes after its start."""
    pid = start(RESTS).pid

    def rests() -> bool:
        before, after = activities([pid])[pid], activities([pid])[pid]
        return after.rests(before, 1.0) and not after.is_busy(before, 1.0)

    wait_until(rests, "a process that rests")


def test_a_process_that_computes(start: Start) -> None:
    """A process that computes counts as busy, even if the machine runs other processes."""
    pid = start(COMPUTES).pid
    before = activities([pid])[pid]
    wait_until(lambda: activities([pid])[pid].cpu_s > before.cpu_s + 0.1, "0.1 s of computing")
    after = activities([pid])[pid]
    assert after.is_busy(before, 1.0)
    assert not after.rests(before, 1.0)


@pytest.mark.parametrize("away", [False, True])
def test_what_a_rank_has_started_is_part_of_it(away: bool, start: Start) -> None:
    """The activity of a rank includes its child process, even in another session."""
    pid = start(HAS_A_CHILD.format(away=away), ready=True).pid
    before = activities([pid])[pid]
    wait_until(lambda: activities([pid])[pid].cpu_s > before.cpu_s + 0.1, "0.1 s of computing")
    assert len(activities([pid])[pid].states) == 2


def test_a_stopped_process(start: Start) -> None:
    """The activity of a process that SIGSTOP stopped has `stopped` set."""
    pid = start(RESTS).pid
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: activities([pid])[pid].stopped, "a stopped process")


def test_a_process_that_has_ended(start: Start) -> None:
    """A process that has ended has no entry in the activities."""
    process = start("pass")
    process.wait()
    assert activities([process.pid]) == {}


def ask(process: subprocess.Popen[bytes], path: Path) -> str:
    return asyncio.run(stacks.stack_of(process.pid, path))


@pytest.mark.parametrize(
    "does",
    [
        "time.sleep(600)",
        "sum(range(10**12))",
        "threading.Lock().acquire(); threading.Event().wait()",
    ],
    ids=["system call", "the GIL held", "a lock"],
)
def test_where_a_process_is(does: str, start: Start, tmp_path: Path) -> None:
    """The agent reads the stacks of all threads and finds the function of the main thread.

    The main thread is in a system call, holds the GIL, or waits for a lock.
    """
    path = tmp_path / "stacks.log"
    process = start(IN_PYTHON.format(does=does, answers=True), str(path), ready=True)
    written = ask(process, path)
    assert written.count("(most recent call first)") == 2
    assert "innermost_function (<string>:" in stacks.innermost(stacks.main_thread(written))
    assert ask(process, path).count("(most recent call first)") == 2  # only the second answer


def test_a_process_that_would_die_of_it_is_not_asked(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent does not send the signal to a rank without a handler: the signal would end it.

    A rank can run any program.
    """
    monkeypatch.setattr(stacks.shutil, "which", lambda *_, **__: None)
    path = tmp_path / "stacks.log"
    process = start(IN_PYTHON.format(does="time.sleep(600)", answers=False), str(path), ready=True)
    assert ask(process, path) == ""
    assert process.poll() is None


def test_a_stopped_process_says_nothing(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without py-spy the stack of a stopped process is empty, after the request's time limit."""
    monkeypatch.setattr(stacks.shutil, "which", lambda *_, **__: None)
    path = tmp_path / "stacks.log"
    process = start(IN_PYTHON.format(does="time.sleep(600)", answers=True), str(path), ready=True)
    os.kill(process.pid, signal.SIGSTOP)
    wait_until(lambda: activities([process.pid])[process.pid].stopped, "a stopped process")
    assert ask(process, path) == ""


STACK = '  File "/x/torch/{file}", line 3 in {function}\n  File "/x/train.py", line 9 in main\n'


@pytest.mark.parametrize(
    ("file", "function", "busy", "waits"),
    [
        ("distributed/distributed_c10d.py", "all_reduce", False, True),
        ("distributed/_functional_collectives.py", "wait_tensor", False, True),
        ("distributed/rendezvous.py", "_create_c10d_store", False, True),
        ("distributed/elastic/utils/store.py", "barrier", False, True),
        ("distributed/utils.py", "_sync_params_and_buffers", False, True),
        ("distributed/checkpoint/filesystem.py", "_write_item", False, False),
        ("distributed/checkpoint/default_planner.py", "create_local_plan", True, False),
        ("cuda/__init__.py", "synchronize", True, True),
        ("autograd/graph.py", "_engine_run_backward", False, True),
        ("autograd/graph.py", "_engine_run_backward", True, False),
        ("utils/data/dataloader.py", "_try_get_data", False, False),
    ],
)
def test_who_waits_for_others_by_its_stack(
    file: str, function: str, busy: bool, waits: bool
) -> None:
    """The innermost frame decides; a backward pass counts as waiting unless it computes."""
    stack = STACK.format(file=file, function=function)
    assert stacks.waits_for_others(stack, busy=busy) is waits


def test_who_waits_in_a_function_of_torch() -> None:
    """A frame of `torch/_ops.py` does not decide; the frame that called it does."""
    called = '  File "/x/torch/_ops.py", line 1 in __call__\n'
    stack = called + STACK.format(
        file="distributed/_functional_collectives.py", function="wait_tensor"
    )
    assert stacks.waits_for_others(stack, busy=False)
    assert not stacks.waits_for_others(called, busy=False)


def test_who_compiles_by_its_stack() -> None:
    """Only the conversion of a frame counts as compiling.

    Calls of compiled code have frames of torch._dynamo as well.
    """
    stack = STACK.format(file="_dynamo/{}", function="f")
    assert stacks.compiles(stack.format("convert_frame.py"))
    assert not stacks.compiles(stack.format("eval_frame.py"))


SPIED = """Process 71: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 71 (idle): "MainThread"
    wait (/usr/lib/python3.11/threading.py:320)
    innermost_function (/job/train.py:12)
    <module> (/job/train.py:40)
Thread 72 (active): "Thread-1 (serve)"
    serve (/job/serve.py:3)
"""


def test_what_py_spy_writes_is_read_like_faulthandlers() -> None:
    """The translated stack of the main thread comes last and starts with its innermost frame."""
    stack = stacks.main_thread(stacks.translate(SPIED))
    assert stacks.innermost(stack).startswith("wait (python3.11/threading.py:320) < innermost")
    assert len(stack.splitlines()) == 4


def test_py_spy_reads_a_stopped_process(start: Start, tmp_path: Path) -> None:
    """With py-spy the agent reads the stack of a stopped process that has no signal handler."""
    path = tmp_path / "stacks.log"
    text = MAY_BE_READ + IN_PYTHON.format(does="time.sleep(600)", answers=False)
    process = start(text, str(path), ready=True)
    os.kill(process.pid, signal.SIGSTOP)
    assert "innermost_function" in stacks.main_thread(ask(process, path))
