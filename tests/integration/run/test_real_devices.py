"""The devices of a job of one node: `rekindle run`, its agent, the driver's tools, the decision."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import msgspec
import pytest
from jobs import Place

from rekindle.agent.devices.dcmi import DeviceReadings
from rekindle.protocol.monitoring import Condition
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import Strategy

RESET = "80E18005"  # RestartNPU

# Python imports this at its start. An agent then finds the doubles instead of a driver.
DOUBLES = """
import os
from pathlib import Path

folder = Path(os.environ["DRIVER_DOUBLE"])
if b"rekindle.agent.process" in Path("/proc/self/cmdline").read_bytes().split(b"\\0"):
    from rekindle.job import ascend

    ascend.NPU_MANAGER = folder / "davinci_manager"
    from rekindle.agent.devices import tools

    tools.ASK_DCMI = (str(folder / "dcmi"),)
"""

# The first process trains until the job ends it.
TRAINS = """
import os, time

while os.environ["MA_PROC_START_CNT"] == "1":
    time.sleep(0.05)
"""


def driver(folder: Path, reset: str) -> dict[str, str]:
    """Make doubles of DCMI and npu-smi with one chip, which has a fault until its reset.

    reset: what npu-smi does. Return the variables of processes that find them.
    """
    folder.mkdir()
    (folder / "davinci_manager").touch()
    (folder / "sitecustomize.py").write_text(DOUBLES)
    sick, well = (
        msgspec.json.encode(DeviceReadings(devices={0: condition})).decode()
        for condition in (Condition(2, (RESET,)), Condition(0, ()))
    )
    programs = {
        "dcmi": f"[ -e {folder}/done ] && echo '{well}' || echo '{sick}'",
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


@pytest.mark.parametrize(
    ("reset", "skipped"),
    [
        ("touch {0}/done", ""),
        # pods forbid privilege escalation, and so may a user of a machine
        ("echo Insufficient Permissions; exit 1", "Insufficient Permissions"),
    ],
)
def test_a_fault_code_of_the_machine_is_read_and_healed(
    reset: str, skipped: str, place: Place
) -> None:
    """The agent reads DCMI and resets the chip; a reset that is refused is a plain restart."""
    folder = place.folder / "driver"
    doubles = driver(folder, reset.format(folder))
    (place.folder / "policy.yaml").write_text("{max_restarts: 0, device_resets: true}")
    script = place.script(TRAINS)
    env = place.environment(doubles)
    run = place.start_quick(script, "--policy", "policy.yaml", env=env)
    run.end(0)
    (decided,) = run.events_of(journal.Decided)
    assert decided.strategy is Strategy.RESTART
    assert RESET in decided.reason
    assert [event.host for event in run.events_of(journal.NodeJoined)] == [socket.gethostname()]
    assert run.events_of(journal.Isolated) == []
    reasons = [event.reason for event in run.events_of(journal.ResetSkipped)]
    assert (len(reasons), all(skipped in reason for reason in reasons)) == (bool(skipped), True)
    assert "set -t reset -i 0 -c 0" in (folder / "calls").read_text().splitlines()
