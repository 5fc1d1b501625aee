"""The file system of the log directory hangs in calls of a real agent: the node is not lost."""

from __future__ import annotations

from hanging import FOREVER_S, LONG_S, HangingLogs
from jobs import Place
from jobs.scripts import TRAINS

from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import Strategy

PRINTS = "import os\nprint('runs on node', os.environ['GROUP_RANK'])\n"


def test_logs_that_open_late(place: Place) -> None:
    """Agents that wait longer than a lost agent is silent stay connected, and the job runs.

    One agent waits in `mkdir`, the other one in `open`.
    """
    hanging = HangingLogs(place, {0: {"os.mkdir 0": LONG_S}, 1: {"open stdout.log": LONG_S}})
    hanging.begin()
    options = ("--nnodes", "2", "--log-dir", str(hanging.logs), "--max-restarts", "0")
    run = place.start_quick(place.script(PRINTS), *options, env=hanging.environment).end(0)
    assert hanging.calls() == ["node 0 hangs: os.mkdir 0", "node 1 hangs: open stdout.log"]
    assert "lost its connection" not in run.stderr
    assert run.incidents() == []
    for rank in range(2):
        log = hanging.logs / f"attempt_0/{rank}/stdout.log"
        assert log.read_text() == f"runs on node {rank}\n"


def test_logs_that_do_not_open(place: Place) -> None:
    """If a log never opens, the start of the rank fails, and the job recovers from that, too.

    The agent reports both files that hang.
    """
    hangs = {"open error.json": FOREVER_S, "open stdout.log": FOREVER_S}
    hanging = HangingLogs(place, {0: hangs}, logs_s=LONG_S)
    options = ("--nproc-per-node", "2", "--log-dir", str(hanging.logs))
    run = place.start(*options, place.script(TRAINS), env=hanging.environment)
    run.wait_event(journal.FirstStep)
    hanging.begin()
    run.kill(1)
    run.wait_until(lambda: len(hanging.calls()) == 2, "calls that hang")
    (place.folder / "go").touch()
    run.end(0)
    assert hanging.calls() == ["node 0 hangs: open error.json", "node 0 hangs: open stdout.log"]
    cannot_read = (
        " WARNING agent node=0: the agent cannot read the error file of rank 1: TimeoutError()\n"
    )
    assert cannot_read in run.stderr
    (incident,) = run.incidents()
    assert (incident.strategy, incident.closed) == (Strategy.RECOVER_IN_PLACE, True)
    why = f"log directory {hanging.logs}/attempt_0/1: the file system did not answer within"
    assert why in incident.faults[-1].message  # the first ones are the kill, and what its peer saw
    assert run.events_of(journal.NodeWanted) == []
    assert len(run.events_of(journal.NodeJoined)) == 1
