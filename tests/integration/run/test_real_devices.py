"""The devices of a job of one node: `rekindle run`, its agent, the driver's tools, the decision."""

from __future__ import annotations

import socket

import pytest
from driver_doubles import driver
from jobs import Place

from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import Strategy

RESET = "80E18005"  # RestartNPU

# The first process trains until the job ends it.
TRAINS = """
import os, time

while os.environ["MA_PROC_START_CNT"] == "1":
    time.sleep(0.05)
"""


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
    sick = f"[ ! -e {folder}/done ]"
    doubles = driver(folder, RESET, sick=sick, reset=reset.format(folder))
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
