"""Locks on devices: one job at a time holds a device, and any number of its processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import bound_s

from rekindle.engines.devices import JobDevices, visible_devices
from rekindle.errors import DevicesHeldError

FACTS = "GPU UUID: \t GPU-2f1c9a7e-0000\nDevice Minor: \t 1\n"


def machine(folder: Path, *files: str) -> tuple[Path, Path]:
    """Make the files of a machine's devices, and the facts about the second NVIDIA device."""
    dev, facts = folder / "dev", folder / "facts"
    (facts / "0000:01:00.0").mkdir(parents=True)
    (facts / "0000:01:00.0" / "information").write_text(FACTS)
    dev.mkdir()
    for each in (*files, "null", "nvidiactl"):
        (dev / each).touch()
    return dev, facts


@pytest.mark.parametrize(
    ("files", "environment", "names"),
    [
        ([], {}, []),
        ([], {"CUDA_VISIBLE_DEVICES": "0,1"}, []),
        (["nvidia0", "nvidia1", "nvidia10", "nvidia2"], {}, None),
        (["nvidia0", "nvidia1"], {"CUDA_VISIBLE_DEVICES": "1"}, ["nvidia1"]),
        (["nvidia0", "nvidia1"], {"CUDA_VISIBLE_DEVICES": "GPU-2f1c"}, ["nvidia1"]),
        (["nvidia0", "nvidia1"], {"CUDA_VISIBLE_DEVICES": "MIG-77/3"}, ["MIG-77-3"]),
        (["nvidia0", "nvidia1"], {"CUDA_VISIBLE_DEVICES": ""}, []),
        (["nvidia0", "nvidia1"], {"CUDA_VISIBLE_DEVICES": "0,-1,1"}, ["nvidia0"]),
        (["nvidia6"], {"CUDA_VISIBLE_DEVICES": "0"}, ["nvidia6"]),
        (["davinci0", "davinci1"], {"ASCEND_RT_VISIBLE_DEVICES": "0"}, ["davinci0"]),
        (["davinci0", "nvidia0"], {"CUDA_VISIBLE_DEVICES": ""}, ["davinci0"]),
    ],
)
def test_a_job_has_the_accelerators_that_its_ranks_see(
    files: list[str], environment: dict[str, str], names: list[str] | None, tmp_path: Path
) -> None:
    """The variables of the drivers select some of the present devices. None: all."""
    dev, facts = machine(tmp_path, *files)
    found = visible_devices(environment, files=dev, facts=facts)
    assert found == (sorted(files) if names is None else names)


def test_another_job_waits_and_holds_nothing(tmp_path: Path) -> None:
    """A job needs two devices and another job holds one: it gets none, and the error names both."""
    one, two = JobDevices(tmp_path, "one", ["a"]), JobDevices(tmp_path, "two", ["b", "a"])
    third = JobDevices(tmp_path, "third", ["b"])
    with one.held():
        waits = "job two waits for the device a, which job one holds"
        with pytest.raises(DevicesHeldError, match=waits), two.held():
            pass
        with third.held() as handles:
            assert len(handles) == 1
    with two.held() as handles:
        assert len(handles) == 2


def test_a_job_without_devices_does_not_wait(tmp_path: Path) -> None:
    """Two jobs of a machine without accelerators run beside each other."""
    with JobDevices(tmp_path, "one", []).held(), JobDevices(tmp_path, "two", []).held():
        pass


@pytest.mark.process
def test_the_last_process_of_a_job_frees_its_devices(tmp_path: Path) -> None:
    """A process that inherits the files holds the devices after the one that started it."""
    one, two = JobDevices(tmp_path, "one", ["a"]), JobDevices(tmp_path, "two", ["a"])
    with one.held() as handles:
        wait = [sys.executable, "-c", "import sys; sys.stdin.read()"]
        agent = subprocess.Popen(wait, stdin=subprocess.PIPE, pass_fds=handles)
    with one.held():  # an agent that replaces another one
        pass
    with pytest.raises(DevicesHeldError), two.held():
        pass
    agent.communicate(timeout=bound_s())
    with two.held() as handles:
        assert os.fstat(handles[0])
