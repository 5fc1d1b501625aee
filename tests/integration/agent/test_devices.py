"""How an agent resets and reads devices: simulated ones, and real ones through their tools."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from host_conditions import set_condition
from waiting import bound_s, finished

from rekindle.agent.devices import resets
from rekindle.agent.devices import tools as device_tools
from rekindle.agent.devices.resets import ResetOutcome, ResetTerms
from rekindle.agent.devices.tools import SimulatedCondition

# The output of `npu-smi info -m` on a machine with two cards of two chips (logical numbers 0 to 3).
MAPPED = """
	NPU ID            Chip ID            Chip Logic ID         Chip Name
	4               0               0               Ascend
	4               1               1               Ascend
	4               2               -               Mcu
	5               0               2               Ascend
	5               1               3               Ascend
"""


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of tools, first in PATH; the machine has neither an NPU nor a GPU."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name in ("ASCEND_RT_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(device_tools, "NPU_MANAGER", tmp_path / "no-npu")
    monkeypatch.setattr(device_tools, "GPU_MANAGER", tmp_path / "no-gpu")
    return tmp_path


def tool(tools: Path, name: str, script: str) -> Path:
    """Write a tool that appends the arguments of each call to a file; return that file."""
    path = tools / name
    path.write_text(f'#!/bin/sh\necho "$@" >> {tools}/calls\n{script}\n')
    path.chmod(0o755)
    return tools / "calls"


def reset(
    device: int, host: Path | None = None, *, allowed: bool = True, devices: int = 4
) -> ResetOutcome:
    terms = ResetTerms(tuple(range(devices)), allowed=allowed, host=host)
    return asyncio.run(resets.reset_device(device, terms))


def npus(tools: Path, *, using: str = "", then: str = "") -> Path:
    """Make npu-smi list the chips of MAPPED. using: a line about the processes of chip 3.

    then: what the reset does.
    """
    (tools / "no-npu").touch()
    (tools / "mapped").write_text(MAPPED)
    (tools / "processes").write_text(using)
    return tool(
        tools,
        "npu-smi",
        f"""case "$*" in
        "info -m") cat {tools}/mapped;;
        "info -t proc-mem -i 5 -c 1") cat {tools}/processes;;
        set*) {then or ":"};;
        esac""",
    )


def test_a_simulated_device_resets_unless_it_is_to_stay_broken(tmp_path: Path) -> None:
    """The reset of a simulated device succeeds unless the test has made its fault permanent."""
    host = tmp_path / "hosts" / "local-0"
    set_condition(host, SimulatedCondition(sick_devices=(1,)))
    broken = ResetOutcome("the device is still faulty after the reset")
    assert (reset(0, host), reset(1, host)) == (ResetOutcome(), broken)


def test_a_cpu_has_nothing_to_reset(tools: Path) -> None:
    assert reset(0) == ResetOutcome()


def test_an_npu_is_reset_by_card_and_chip(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent finds a local device's card and chip through the node's visible devices."""
    calls = npus(tools)
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "3,2,1,0")
    assert reset(1) == ResetOutcome()
    made = calls.read_text().splitlines()
    assert (made[0], made[-1]) == ("info -m", "set -t reset -i 5 -c 0")
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "9")
    unknown = "npu-smi does not list a chip with the logical number 9"
    assert reset(0) == ResetOutcome(unknown, tried=False)


@pytest.mark.parametrize(
    ("visible", "options", "words"),
    [
        # without Kubernetes, only with the policy
        ("0,1,2,3", {"allowed": False}, "the policy does not allow it outside of Kubernetes"),
        # the whole reset group belongs to the node's ranks
        ("3,2", {"devices": 2}, "a reset would also end chip 0, which no rank of this node has"),
        # no process holds a device of the group
        ("0,1,2,3", {"using": "Process id : 4711"}, "process 4711 uses chip 3"),
        # pods forbid privilege escalation
        ("0,1,2,3", {"then": "echo Insufficient Permissions; exit 1"}, "Insufficient Permissions"),
        ("0,1,2,3", {"then": "echo not supported; exit 1"}, "not supported"),
    ],
)
def test_a_reset_that_cannot_be_tried(
    tools: Path,
    monkeypatch: pytest.MonkeyPatch,
    visible: str,
    options: dict[str, Any],
    words: str,
) -> None:
    """The result states the reason, and says nothing about the device."""
    terms = {name: options.pop(name) for name in ("allowed", "devices") if name in options}
    npus(tools, **options)
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", visible)
    done = reset(0, **terms)
    assert (done.tried, words in done.error) == (False, True), done


@pytest.mark.parametrize(
    ("name", "listed", "number", "group", "missing"),
    [
        ("Ascend 910B3", 8, 3, range(8), 0),
        ("Ascend 910B3", 16, 9, range(8, 16), 0),
        ("Ascend 910B3", 2, 1, range(2), 8),  # a container with two of eight chips
        ("Ascend 910A", 8, 5, range(4, 8), 0),
        ("Ascend910", 16, 5, range(16), 0),  # the name shows no ring: all chips
    ],
)
def test_the_chips_that_a_reset_ends(
    name: str, listed: int, number: int, group: range, missing: int
) -> None:
    """A ring of an Ascend 910A or 910B resets together. Otherwise all chips of the machine do."""
    chips = {str(at): device_tools.Chip((), name) for at in range(listed)}
    assert resets.reset_group(number, chips) == (frozenset(group), missing)


def test_a_gpu_is_reset(tools: Path) -> None:
    (tools / "no-gpu").touch()
    calls = tool(tools, "nvidia-smi", "")
    assert reset(2) == ResetOutcome()
    assert calls.read_text().splitlines()[-1] == "--gpu-reset -i 2"


@pytest.mark.parametrize(
    ("script", "tried", "words"),
    [
        ('case "$1" in --query*) echo 4711;; esac', False, "process 4711 uses device 0"),
        ('case "$1" in --gpu*) echo "in use by a client" >&2; exit 5;; esac', False, "in use by"),
        ('case "$1" in --gpu*) echo "uncorrectable" >&2; exit 5;; esac', True, "uncorrectable"),
    ],
)
def test_a_gpu_that_is_not_reset(tools: Path, script: str, tried: bool, words: str) -> None:
    """Only a reset that the tool has tried says something about the device."""
    (tools / "no-gpu").touch()
    tool(tools, "nvidia-smi", script)
    done = reset(0)
    assert (done.tried, words in done.error) == (tried, True), done


def test_a_tool_that_is_not_there(tools: Path) -> None:
    (tools / "no-gpu").touch()
    missing = "Rekindle cannot run nvidia-smi: No such file or directory"
    assert reset(0) == ResetOutcome(missing, tried=False)


def test_a_tool_that_does_not_end_is_ended(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent ends a reset tool at its time limit; the device counts as faulty."""
    (tools / "no-gpu").touch()
    monkeypatch.setattr(resets, "RESET_TIMEOUT_S", 0.2)
    tool(tools, "nvidia-smi", 'case "$1" in --gpu*) exec sleep 600;; esac')
    done = reset(0)
    assert (done.tried, "took more than 0.2 s" in done.error) == (True, True)


USAGES = """
	HBM Usage Rate(%)              : 3
	Aicore Usage Rate(%)           : 57
	Aicpu Usage Rate(%)            : 0
"""


def utilisations(*devices: int) -> dict[int, int]:
    return asyncio.run(device_tools.utilisations(devices))


def test_nobody_is_asked_where_there_is_no_device(tools: Path) -> None:
    calls = tool(tools, "nvidia-smi", "echo 7")
    assert utilisations(0, 1) == {}
    assert not calls.exists()


def test_how_busy_an_npu_is(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The utilisation of an NPU is that of its AI cores; chips unknown to the tool are left out."""
    (tools / "no-npu").touch()
    (tools / "mapped").write_text(MAPPED)
    (tools / "usages").write_text(USAGES)
    calls = tool(tools, "npu-smi", f'[ "$2" = -m ] && cat {tools}/mapped || cat {tools}/usages')
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "3,9")
    assert utilisations(0, 1) == {0: 57}
    assert "info -t usages -i 5 -c 1" in calls.read_text().splitlines()


def test_how_busy_a_gpu_is(tools: Path) -> None:
    """Devices with an output that is not a number, or with a failed call, are left out."""
    (tools / "no-gpu").touch()
    tool(
        tools, "nvidia-smi", 'case "$4" in 0) echo 97;; 1) echo "[N/A]";; *) echo no; exit 6; esac'
    )
    assert utilisations(0, 1, 2) == {0: 97}


def test_a_tool_that_cannot_be_killed_is_let_be(
    tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a tool that SIGKILL cannot end, the agent does not start that tool again until it ends.

    Such a tool is stuck in the driver, and the next call would be stuck as well.
    """
    killed: list[int] = []
    calls = tool(tools, "nvidia-smi", "exec sleep 60")
    monkeypatch.setattr(device_tools, "ASK_TIMEOUT_S", 0.2)
    monkeypatch.setattr(device_tools, "KILLED_S", 0.1)
    monkeypatch.setattr(device_tools, "_stuck", {})
    monkeypatch.setattr(device_tools, "GPU_MANAGER", tools)
    monkeypatch.setattr(
        asyncio.subprocess.Process, "kill", lambda process: killed.append(process.pid)
    )

    async def ask() -> None:
        assert await device_tools.utilisations([0]) == {}
        assert await device_tools.utilisations([0]) == {}
        os.kill(killed[0], signal.SIGKILL)
        await device_tools._stuck["nvidia-smi"].wait()
        tool(tools, "nvidia-smi", "echo 7")
        monkeypatch.setattr(device_tools, "ASK_TIMEOUT_S", bound_s())
        assert await device_tools.utilisations([0]) == {0: 7}

    asyncio.run(finished(ask()))
    assert len(killed) == 1
    assert len(calls.read_text().splitlines()) == 2
