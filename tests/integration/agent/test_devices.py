"""How an agent resets and reads devices: simulated ones, and real ones through their tools."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from host_conditions import set_condition
from waiting import bound_s, finished

from rekindle.agent.devices import tools as device_tools
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


def reset(device: int, host: Path | None = None) -> str:
    return asyncio.run(device_tools.reset_device(device, host))


def test_a_simulated_device_resets_unless_it_is_to_stay_broken(tmp_path: Path) -> None:
    """The reset of a simulated device succeeds unless the test has made its fault permanent."""
    host = tmp_path / "hosts" / "local-0"
    set_condition(host, SimulatedCondition(sick_devices=(1,)))
    assert (reset(0, host), reset(1, host)) == ("", "the device is still faulty after the reset")


def test_a_cpu_has_nothing_to_reset(tools: Path) -> None:
    assert reset(0) == ""


def test_an_npu_is_reset_by_card_and_chip(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent finds a local device's card and chip through the node's visible devices."""
    (tools / "no-npu").touch()
    (tools / "mapped").write_text(MAPPED)
    calls = tool(tools, "npu-smi", f'[ "$1" = info ] && cat {tools}/mapped')
    tool(tools, "npu-smi", f'if [ "$1" = info ]; then cat {tools}/mapped; fi')
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "3,2")
    assert reset(1) == ""
    assert calls.read_text().splitlines() == ["info -m", "set -t reset -i 5 -c 0"]
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "9")
    assert reset(0) == "npu-smi does not list a chip with the logical number 9"


def test_a_gpu_is_reset(tools: Path) -> None:
    (tools / "no-gpu").touch()
    calls = tool(tools, "nvidia-smi", "")
    assert reset(2) == ""
    assert calls.read_text().splitlines() == ["--gpu-reset -i 2"]


def test_what_a_tool_says_when_it_fails_is_the_reason(tools: Path) -> None:
    """The error has the exit status of the tool and its error output."""
    (tools / "no-gpu").touch()
    tool(tools, "nvidia-smi", 'echo "in use by a client" >&2; exit 5')
    error = reset(0)
    assert "ended with status 5" in error
    assert "in use by a client" in error


def test_a_tool_that_is_not_there(tools: Path) -> None:
    (tools / "no-gpu").touch()
    assert reset(0) == "Rekindle cannot run nvidia-smi: No such file or directory"


def test_a_tool_that_does_not_end_is_ended(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent ends a reset tool at its time limit and returns an error."""
    (tools / "no-gpu").touch()
    monkeypatch.setattr(device_tools, "RESET_TIMEOUT_S", 0.2)
    tool(tools, "nvidia-smi", "exec sleep 600")
    assert "took more than 0.2 s" in reset(0)


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
