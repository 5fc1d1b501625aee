"""Resets a device that no process uses, or states why that cannot be tried here.

A reset of an NPU ends all chips of its group, so the agent tries it only if the node of the job has
the whole group, and no process uses a chip of it. The size of a group follows MindCluster's device
plugin (github.com/Ascend/mind-cluster): a ring of 4 chips of an Ascend 910A and of 8 of a 910B,
otherwise all chips of the machine. There was no device for a test of the commands.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from rekindle import names
from rekindle.agent.devices import tools
from rekindle.agent.devices.tools import Chip
from rekindle.agent.node_state import NodeState
from rekindle.agent.threads import in_thread
from rekindle.job.spec import JobSpec
from rekindle.protocol.agent import DeviceResetFailed, Message

# MindCluster's device plugin waits as long for a reset (WaitDeviceResetTime).
RESET_TIMEOUT_S = 150.0
_RINGS = (("910A", 4), ("910B", 8))  # by a part of the chip's name
_PROCESS = re.compile(r"process\s*id\s*:\s*(\d+)", re.IGNORECASE)
# The tool may not reset devices here, or a process uses the device: nothing is known about it.
_REFUSED = re.compile(
    r"insufficient permission|permission denied|not permitted|not supported|in use|being used",
    re.IGNORECASE,
)


class ResetOutcome(msgspec.Struct, frozen=True):
    """The result of a reset. error: why the device is not reset, or "". tried: the tool did it."""

    error: str = ""
    tried: bool = True


class ResetTerms(msgspec.Struct, frozen=True):
    """The conditions of a reset on this node.

    devices: the local numbers of all devices of the node's ranks. allowed: whether the agent may
    reset a real device. host: the file of the simulated host; None: the devices are real.
    """

    devices: tuple[int, ...]
    allowed: bool = True
    host: Path | None = None


class DeviceResets:
    """Resets the devices of the node's ranks, and reports each device that it does not reset."""

    def __init__(self, spec: JobSpec, state: NodeState, send: Callable[[Message], None]) -> None:
        self._state, self._send = state, send
        self._terms = ResetTerms(
            devices=tuple(range(spec.processes_per_node)),
            allowed=spec.policy.device_resets or names.ENV_HOST_NAME in os.environ,
            host=state.host,
        )

    async def reset(self, ranks: Iterable[int]) -> set[int]:
        """Reset the devices of these ranks; return the ranks whose device is not usable."""
        broken: set[int] = set()
        for rank in ranks:
            done = await reset_device(rank - self._state.ranks.start, self._terms)
            if done.error:
                self._send(DeviceResetFailed(rank=rank, error=done.error, tried=done.tried))
                broken |= {rank} if done.tried else set()
        return broken


async def reset_device(device: int, terms: ResetTerms) -> ResetOutcome:
    """Reset a device of this node, by its local number."""
    if terms.host is not None:
        sick = device in (await in_thread(tools.read_condition, terms.host)).sick_devices
        return ResetOutcome("the device is still faulty after the reset" if sick else "")
    if not tools.are_there():
        return ResetOutcome()  # a CPU has nothing to reset
    if not terms.allowed:
        return _untried("the policy does not allow it outside of Kubernetes (device_resets)")
    if tools.has_npus():
        return await _reset_npu(device, terms.devices)
    gpu = tools.visible(device)
    query = ("--query-compute-apps=pid", "--format=csv,noheader", "-i", gpu)
    users = await tools.run(tools.ASK_TIMEOUT_S, "nvidia-smi", *query)
    if users.error:
        return _untried(users.error)
    if pids := users.output.split():
        return _untried(f"process {pids[0]} uses device {device}")
    return await _run("nvidia-smi", "--gpu-reset", "-i", gpu)


async def _reset_npu(device: int, own: Iterable[int]) -> ResetOutcome:
    chips, error = await tools.chips()
    wanted = tools.visible(device)
    if wanted not in chips:
        return _untried(error or f"npu-smi does not list a chip with the logical number {wanted}")
    group, missing = reset_group(int(wanted), chips)
    if missing:
        return _untried(
            f"a reset ends {missing} chips of its group, and npu-smi lists only {len(group)}"
        )
    strange = sorted(group - {int(each) for each in map(tools.visible, own) if each.isdigit()})
    if strange:
        return _untried(f"a reset would also end chip {strange[0]}, which no rank of this node has")
    for number in sorted(group):
        chip = chips[str(number)]
        asked = await tools.run(
            tools.ASK_TIMEOUT_S, "npu-smi", "info", "-t", "proc-mem", *chip.place
        )
        if asked.error:
            return _untried(asked.error)
        if pids := _PROCESS.findall(asked.output):
            return _untried(f"process {pids[0]} uses chip {number}, which the reset would end")
    return await _run("npu-smi", "set", "-t", "reset", *chips[wanted].place)


def reset_group(number: int, chips: Mapping[str, Chip]) -> tuple[frozenset[int], int]:
    """Return the chips that a reset of this chip ends, and their number if some are not listed.

    Otherwise the second value is 0. chips: by their logical number. Pure.
    """
    every = frozenset(map(int, chips))
    name = chips[str(number)].name.replace(" ", "").upper()
    size = next((count for part, count in _RINGS if part in name), 0)
    if not size:
        return every, 0
    first = number // size * size
    group = every & frozenset(range(first, first + size))
    return group, size if len(group) < size else 0


async def _run(*command: str) -> ResetOutcome:
    done = await tools.run(RESET_TIMEOUT_S, *command)
    refused = not done.started or _REFUSED.search(done.error) is not None
    return ResetOutcome(done.error, tried=not (done.error and refused))


def _untried(why: str) -> ResetOutcome:
    return ResetOutcome(why, tried=False)
