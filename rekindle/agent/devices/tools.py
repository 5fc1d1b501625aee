"""Runs the tools of a node's devices (npu-smi, DCMI, nvidia-smi), and watches fault codes.

The devices of a simulated host have no tool: a file next to the host's file lists their faults.

The commands and their output follow the manuals of Huawei and NVIDIA. The utilization of a GPU was
read on an H100. There was no device for a test of the other commands.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from rekindle import names
from rekindle.agent.devices.dcmi import DeviceReadings
from rekindle.agent.threads import Problems
from rekindle.errors import JobError
from rekindle.job.ascend import NPU_MANAGER
from rekindle.protocol.agent import Conditions, Message
from rekindle.protocol.monitoring import Condition

ASK_TIMEOUT_S = 5.0
KILLED_S = 1.0  # for the end of a killed tool, which may hang in the driver

ASK_DCMI = (sys.executable, "-m", "rekindle.agent.devices.dcmi")
GPU_MANAGER = Path("/dev/nvidiactl")
# card, chip, logical number, name
_MAPPED = re.compile(r"^\s*(\d+)\s+(\d+)\s+(\d+)\s+(\S.*?)\s*$", re.MULTILINE)
_stuck: dict[str, asyncio.subprocess.Process] = {}  # by tool: killed, but not ended in time
_NPU_USE = re.compile(r"^\s*Aicore Usage Rate\(%\)\s*:\s*(\d+)\s*$", re.MULTILINE)
LOOK_S = 5.0


class Ran(NamedTuple):
    """A tool's output, its error or "", and whether it has started."""

    output: str = ""
    error: str = ""
    started: bool = True


class Chip(NamedTuple):
    """An NPU. place: the arguments of npu-smi that name it."""

    place: tuple[str, ...]
    name: str


class SimulatedCondition(msgspec.Struct, frozen=True, kw_only=True):
    """The faults of a simulated host.

    broken: everything on the host fails. sick_devices: devices that no reset repairs.
    """

    broken: bool = False
    sick_devices: tuple[int, ...] = ()


def condition_file(host: Path) -> Path:
    """Return the file that lists the faults of a host. host: the file of the host."""
    return host.with_name(f"{host.name}{names.CONDITION_SUFFIX}")


def read_condition(host: Path) -> SimulatedCondition:
    """Read the faults of a host. Without a file it has none.

    Raises JobError: the file is not valid.
    """
    path = condition_file(host)
    try:
        return msgspec.json.decode(path.read_bytes(), type=SimulatedCondition)
    except FileNotFoundError:
        return SimulatedCondition()
    except msgspec.DecodeError as error:
        raise JobError(f"{path}: {error}") from error


def has_npus() -> bool:
    """Return whether this machine has Ascend NPUs."""
    return NPU_MANAGER.exists()


def has_gpus() -> bool:
    """Return whether this machine has NVIDIA GPUs."""
    return GPU_MANAGER.exists()


def are_there() -> bool:
    """Return whether this machine has devices with a known tool."""
    return has_npus() or has_gpus()


async def utilisations(devices: Iterable[int]) -> dict[int, int]:
    """Return the utilization of devices in percent, without those whose tool does not report it."""
    asked = list(devices)
    if not are_there():
        return {}
    found = await asyncio.gather(*map(_utilisation, asked))
    return {device: int(use) for device, use in zip(asked, found, strict=True) if use.isdigit()}


async def conditions(devices: Iterable[int]) -> DeviceReadings:
    """Return DCMI's report about NPUs; it omits devices that DCMI does not name."""
    output, error, _ = await run(ASK_TIMEOUT_S, *ASK_DCMI)
    if error:
        return DeviceReadings(problems=(error,))
    try:  # the last line, because the driver may have printed something before
        found = msgspec.json.decode(output.rpartition("\n")[2], type=DeviceReadings)
    except msgspec.DecodeError as wrong:
        return DeviceReadings(problems=(f"{' '.join(ASK_DCMI)} said {output[-300:]!r}: {wrong}",))
    places = {device: visible(device) for device in devices}
    named = {device: int(place) for device, place in places.items() if place.isdigit()}
    own = {device: found.devices[at] for device, at in named.items() if at in found.devices}
    return msgspec.structs.replace(found, devices=own)


async def _utilisation(device: int) -> str:
    if has_npus():
        chip = (await chips())[0].get(visible(device))
        if chip is None:
            return ""
        command = ("npu-smi", "info", "-t", "usages", *chip.place)
        values = _NPU_USE.findall((await run(ASK_TIMEOUT_S, *command)).output)
        return values[0] if values else ""
    query = ("--query-gpu=utilization.gpu", "--format=csv,noheader,nounits")
    return (await run(ASK_TIMEOUT_S, "nvidia-smi", *query, "-i", visible(device))).output


def visible(device: int) -> str:
    """Return the machine's number for a device with this local number."""
    name = "ASCEND_RT_VISIBLE_DEVICES" if has_npus() else "CUDA_VISIBLE_DEVICES"
    listed = [each.strip() for each in os.environ.get(name, "").split(",") if each.strip()]
    return listed[device] if device < len(listed) else str(device)


async def chips() -> tuple[dict[str, Chip], str]:
    """Return the NPUs that npu-smi lists, by logical number, and its error or ""."""
    output, error, _ = await run(ASK_TIMEOUT_S, "npu-smi", "info", "-m")
    found = _MAPPED.findall(output)
    return {at: Chip(("-i", card, "-c", chip), name) for card, chip, at, name in found}, error


async def run(limit_s: float, *command: str) -> Ran:
    """Run a tool; return its output, and an error if it failed.

    A tool that hangs in the driver does not run again until it has ended. Otherwise the number of
    such processes would grow.
    """
    stuck = _stuck.get(command[0])
    if stuck is not None and stuck.returncode is None:
        return Ran(error=f"{command[0]} did not end after SIGKILL", started=False)
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
    except OSError as error:
        return Ran(error=f"Rekindle cannot run {command[0]}: {error.strerror}", started=False)
    try:
        output, _ = await asyncio.wait_for(process.communicate(), limit_s)
    except asyncio.TimeoutError:
        process.kill()
        try:
            await asyncio.wait_for(process.wait(), KILLED_S)
        except asyncio.TimeoutError:
            _stuck[command[0]] = process
        return Ran(error=f"{' '.join(command)} took more than {limit_s:g} s")
    text = output.decode(errors="replace").strip()
    if process.returncode:
        status = f"ended with status {process.returncode}"
        return Ran(text, f"{' '.join(command)} {status}: {text[-300:]}")
    return Ran(text)


class DeviceMonitor:
    """Reports the conditions of devices. devices: returns the process on each; 0: it has ended."""

    def __init__(
        self, devices: Callable[[], dict[int, int]], send: Callable[[Message], None]
    ) -> None:
        self._devices, self._send = devices, send
        self._last: dict[int, Condition] = {}
        self._problems = Problems()

    async def run(self) -> None:
        """Look at intervals, as long as there may be faults to see."""
        goes_on = has_npus()
        while goes_on:
            await asyncio.sleep(LOOK_S)
            try:
                goes_on = await self.check()
            except Exception as error:  # a bug of ours, which ends only this check
                text = f"the agent could not read the fault codes of devices: {error!r}"
                self._problems.report(text, text)

    async def check(self) -> bool:
        """Report the conditions of devices after a change or with a fault; False: DCMI is absent.

        The agent drops a reading if the process on the device changed during it, because of a
        possible reset. It repeats fault codes: after a reset they are new to the coordinator.
        """
        asked = self._devices()
        if not asked:
            return True
        found = await conditions(asked)
        for problem in (found.absent, *found.problems):
            if problem:
                self._problems.report(
                    problem, f"the agent does not read the fault codes of devices: {problem}"
                )
        now = self._devices()
        known = {at: each for at, each in found.devices.items() if now.get(at) == asked[at]}
        if any(each.codes or self._last.get(at) != each for at, each in known.items()):
            self._send(Conditions(devices=known))
        self._last |= known
        return not found.absent
