"""Checkers of nodes without enough memory: their errors, and the error for a killed checker."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from pathlib import Path

import msgspec
import pytest
import torch
from jobs.driver import spec_of
from waiting import bound_s, turns

from rekindle.agent import checkers as checkers_module
from rekindle.agent.checkers import Checker, CheckerError, NodeCheckRunner
from rekindle.agent.fork_server import Child
from rekindle.agent.watchdog import OomCounter
from rekindle.protocol.node_check import DeviceWork, Done
from rekindle.recovery.node_check.evidence import KILLED, Measurement, lacks_memory
from rekindle.training.node_check import serving
from rekindle.training.node_check.torch_checker import Bench, bench_for

NO_MEMORY = "OutOfMemoryError: CUDA out of memory."
DEVICE = Bench(
    device=torch.device("meta"),
    backend="nccl",
    size=8192,
    dtype=torch.bfloat16,
    copied=1 << 30,
    sent=64 << 20,
    window_s=0.2,
    wait=lambda: None,
)


def counter(root: Path) -> tuple[OomCounter, Path]:
    """Return a counter for the test's own cgroup, and the path of its file."""
    proc, file = root / "proc", root / "cgroup/pod/memory.events"
    proc.mkdir()
    (proc / "cgroup").write_text("0::/pod\n")
    file.parent.mkdir(parents=True)
    file.write_text("oom_kill 3\n")
    return OomCounter(root / "cgroup", proc), file


@pytest.mark.parametrize("for_memory", [True, False])
@pytest.mark.process
def test_a_checker_that_the_kernel_kills_for_want_of_memory(
    tmp_path: Path, for_memory: bool
) -> None:
    """If the OOM killer ends a checker, the agent's error names the lack of memory.

    For any other SIGKILL it does not.
    """

    oom, file = counter(tmp_path)
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)

    async def killed() -> str:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            one = Checker(0, Child(process.pid, ours), oom)
            if for_memory:
                file.write_text("oom_kill 4\n")
            os.kill(process.pid, signal.SIGKILL)
            with pytest.raises(CheckerError) as error:
                await one.ask(DeviceWork(serial=1))
        process.returncode = -signal.SIGKILL  # the checker has reaped it
        return str(error.value)

    error = asyncio.run(killed())
    assert "SIGKILL" in error
    assert (KILLED in error) is lacks_memory(error) is for_memory


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.\nmore"), ""),
        (MemoryError(), "MemoryError"),
        (OSError(12, "Cannot allocate memory"), ""),
        (RuntimeError("createHCCLComm\nEL0004: Failed to allocate memory."), "EL0004: Failed"),
    ],
)
def test_what_a_checker_says_of_memory_is_understood(
    error: Exception, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checker's memory error has the line that names the lack, even if it is not the first.

    For an error without a text, it has the name of its type.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    monkeypatch.setattr(os, "_exit", lambda status: None)
    with ours, theirs:
        serving._fail(theirs, 3, error)
        done = msgspec.msgpack.decode(ours.recv(1 << 16), type=Done)
    assert done.serial == 3
    assert lacks_memory(done.error)
    assert done.error.startswith(text)
    assert "\n" not in done.error


class SimulatedChecker:
    """A checker that answers after some turns of the loop. answer: None: it never answers."""

    def __init__(self, device: int, answer: str | float | None, after: int = 0) -> None:
        self.device, self._answer, self._after = device, answer, after

    async def ask(self, task: DeviceWork) -> Done:
        await (turns(self._after) if self._answer is not None else asyncio.Event().wait())
        if isinstance(self._answer, str):
            raise CheckerError(self.device, self._answer)
        seconds = {Measurement.COMPUTE: float(self._answer or 0.0)}
        return Done(serial=task.serial, seconds=seconds, note="a note")


@pytest.mark.parametrize(
    ("answers", "text", "device"),
    [
        (["connection reset", NO_MEMORY, None], NO_MEMORY, 1),
        ([None, NO_MEMORY, "connection reset"], NO_MEMORY, 1),
        ([1.0, None, "connection reset"], "connection reset", 2),
        (["killed", "connection reset", "connection reset"], "killed", 0),
        (["connection reset", "time-out", NO_MEMORY], NO_MEMORY, 2),
    ],
)
def test_who_has_no_memory_is_heard_though_others_fail_with_it(
    answers: list[str | float | None], text: str, device: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If several checkers fail, the error of one without memory counts, otherwise the first.

    The agent does not wait for silent checkers.
    """
    monkeypatch.setattr(checkers_module, "_SOON_S", bound_s(0.2))
    checkers = NodeCheckRunner(spec_of(nodes=1, processes=3), None, None, {}, None)
    checkers._checkers = [SimulatedChecker(n, each, 10 * n) for n, each in enumerate(answers)]
    with pytest.raises(CheckerError, match=text) as raised:
        asyncio.run(checkers._ask(lambda device: DeviceWork(serial=1)))
    assert raised.value.device == device


def test_the_slowest_device_counts() -> None:
    """The slowest device's time counts, and a note that all devices have appears once."""
    checkers = NodeCheckRunner(spec_of(nodes=1, processes=3), None, None, {}, None)
    checkers._checkers = [SimulatedChecker(n, each) for n, each in enumerate([1.0, 3.0, 2.0])]
    done = asyncio.run(checkers._ask(lambda device: DeviceWork(serial=1)))
    assert done == Done(serial=1, seconds={Measurement.COMPUTE: 3.0}, note="a note")


def test_beside_ranks_little_memory_is_taken() -> None:
    """Beside ranks, a device's own measurements take less than 0.5 GiB of tensors.

    Before training they take 2.4 GiB.
    """
    least = 0.5 * (1 << 30)
    for bench, fits in ((DEVICE, False), (DEVICE.lighter(), True)):
        matrices, copies = 3 * 2 * bench.size**2, 2 * bench.copied
        assert (matrices + copies < least) is fits
    assert DEVICE.lighter().backend == DEVICE.backend


def test_a_node_with_fewer_gpus_than_ranks_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a node has fewer GPUs than ranks, the error names the missing GPU.

    CUDA's own text is only "invalid device ordinal".
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(RuntimeError, match="torch finds 1 GPUs here, and not GPU 1"):
        bench_for(1)
