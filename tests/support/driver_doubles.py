"""Doubles of DCMI and npu-smi, which the agents of a job find instead of a driver."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from rekindle.agent.devices.dcmi import DeviceReadings
from rekindle.protocol.monitoring import Condition

# Python imports this at its start. The coordinator and the agents look without long pauses, and the
# agents of simulated hosts ask the doubles too.
DOUBLES = """
import os
from pathlib import Path

folder = Path(os.environ["DRIVER_DOUBLE"])
words = Path("/proc/self/cmdline").read_bytes().split(b"\\0")
if b"rekindle.agent.process" in words:
    from rekindle.job import ascend

    ascend.NPU_MANAGER = folder / "davinci_manager"
    from rekindle.agent.devices import tools

    tools.ASK_DCMI, tools.LOOK_S = (str(folder / "dcmi"),), 0.2
    from rekindle.agent.ranks import RankSupervisor

    def devices(ranks, real=RankSupervisor.devices):
        host, ranks._state.host = ranks._state.host, None
        try:
            return real(ranks)
        finally:
            ranks._state.host = host

    RankSupervisor.devices = devices
if b"rekindle.coordinator.process" in words:
    from rekindle.coordinator.machine import health_events

    health_events.LOOK_S, health_events.HEALED_S = 0.2, 1.0
"""


def driver(folder: Path, code: str, *, sick: str, reset: str = "exit 1") -> dict[str, str]:
    """Make the doubles, and return the variables of processes that find them.

    The first chip of each node has the code while the shell command `sick` succeeds. reset: what
    npu-smi does.
    """
    folder.mkdir()
    (folder / "davinci_manager").touch()
    (folder / "sitecustomize.py").write_text(DOUBLES)
    faulty, well = (
        msgspec.json.encode(DeviceReadings(devices={0: condition})).decode()
        for condition in (Condition(2, (code,)), Condition(0, ()))
    )
    programs = {
        "dcmi": f"if {sick}; then echo '{faulty}'; else echo '{well}'; fi",
        "npu-smi": f"""echo "$@" >> {folder}/calls
        case "$*" in
        "info -m") echo " 0 0 0 Ascend";;
        set*) {reset};;
        esac""",
    }
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    path = os.pathsep.join([str(folder), os.environ["PATH"]])
    return {"DRIVER_DOUBLE": str(folder), "PYTHONPATH": str(folder), "PATH": path}


def on_the_first_node(folder: Path) -> str:
    """Return a command that succeeds for the agent that asks first, as long as it lives."""
    return f"(set -C; echo $PPID > {folder}/first) 2> /dev/null; grep -qx $PPID {folder}/first"
