"""The train flow on a real Prefect server: adopting, refusing, failing, stopping."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.settings import PREFECT_LOGGING_TO_API_ENABLED, temporary_settings
from prefect.states import Cancelling
from prefect_side import FlowRun, Served, ending_jobs, free_port, process, serve, server, until

from rekindle.flows.train import train
from rekindle.recovery.journal import (
    Checkpointed,
    Ended,
    FirstStep,
    Formed,
    JobStarted,
    LastWords,
    NodeJoined,
    NodeWanted,
    RanksStarted,
)
from rekindle.tasks.hooks import stop_job

pytestmark = pytest.mark.timeout(400)

ENDS = ("Crashed", "Failed", "Cancelled", "Rescheduling")
SCRIPTS = Path(__file__).with_name("scripts")


def start_gated(served: Served, gate: Path, end: str = "exit", **more: Any) -> FlowRun:
    """Start a job of two nodes that waits for the gate; return when its ranks run."""
    script = str(SCRIPTS / "gated.py")
    run = served.start(script=script, arguments=[str(gate), end], nodes=2, **more)
    until(lambda: run.count(RanksStarted) == 2, "the ranks run")
    return run


def flow_command(job: dict[str, Any]) -> list[str]:
    """The command that runs the train flow for a job, without a deployment."""
    call = (
        "import json, sys; from rekindle.flows.train import train; train(json.loads(sys.argv[1]))"
    )
    return [sys.executable, "-c", call, json.dumps(job)]


def test_a_failing_script_fails_the_flow_run(served: Served, tmp_path: Path) -> None:
    """The flow run fails with the reason, and the report shows the first rank's traceback."""
    run = start_gated(served, tmp_path / "gate", "raise", policy={"max_restarts": 0})
    (tmp_path / "gate").touch()
    state = run.until_final()
    assert state.name == "Failed"
    assert "JobFailedError" in (state.message or "")
    assert "raised ValueError: shard 7 is damaged" in (state.message or "")
    report = str(run.artifact("report").data)
    assert "Traceback (most recent call last)" in report
    assert 'raise ValueError("shard 7 is damaged")' in report


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_flow_process_that_is_ended_leaves_the_job_and_its_rerun_adopts_it(
    served: Served, tmp_path: Path, number: signal.Signals
) -> None:
    """Whatever signal ends the flow's process, the same ranks go on, and a rerun reports them."""
    run = start_gated(served, tmp_path / "gate")
    before = until(lambda: run.status().holder and run.status(), "the flow steers the job")
    flow = run.process()
    with served.unaware():
        flow.send_signal(number)
        until(lambda: run.status().holder == "", "the lease is free")
        assert [rank.pid for rank in run.status().ranks] == [rank.pid for rank in before.ranks]
    run.until_rerun(flow.pid)
    assert [rank.pid for rank in run.status().ranks] == [rank.pid for rank in before.ranks]
    (tmp_path / "gate").touch()
    until(lambda: run.state().name == "Completed", "the job has succeeded")
    assert run.count(JobStarted) == 1
    assert [name for name in run.states() if name in ENDS] == ["Crashed", "Rescheduling"]


def test_incidents_with_and_without_a_flow_process_are_told_whole(
    served: Served, tmp_path: Path
) -> None:
    """A rerun brings the node lost while no flow process lived, and tells all incidents."""
    gate = tmp_path / "gate"
    run = served.start(
        script=str(SCRIPTS / "steps.py"),
        arguments=[str(gate), "1200"],
        nodes=2,
        environment={"OMP_NUM_THREADS": "1"},
    )
    until(lambda: run.count(FirstStep) == 1, "training has begun")
    os.kill(run.status().ranks[1].pid, signal.SIGKILL)
    until(lambda: run.count(FirstStep) == 2, "training goes on without the rank that was killed")
    with served.unaware():
        run.process().kill()
        kill_tree(run.status().nodes[1].pid)
        until(lambda: run.count(NodeWanted) == 1, "the coordinator wants a node")
    until(lambda: run.count(FirstStep) == 3, "training goes on with a new node")
    gate.touch()
    until(lambda: run.state().name == "Completed", "the job has succeeded")
    assert run.count(JobStarted) == 1
    steps = ("detected", "decided", "regrouped", "restored", "closed")
    told = [(f"rekindle.incident.{step}", number) for number in (1, 2) for step in steps]
    until(lambda: run.events() == told, "Prefect has all events, each once")
    assert run.states().count("Recovering") == 2
    table = json.loads(run.artifact("incidents").data)
    assert [(row["fault"], row["strategy"]) for row in table] == [
        ("process", "recover-in-place"),
        ("node-lost", "recover"),
    ]
    assert run.artifact("progress").data == 100
    assert sorted(run.task_states("supervise")) == ["Completed", "Crashed"]


def start_steps(served: Served, gate: Path, steps: int = 600, **more: Any) -> FlowRun:
    """Start a job of one rank with a Session that writes checkpoints, until there is one."""
    run = served.start(
        script=str(SCRIPTS / "steps.py"),
        arguments=[str(gate), str(steps)],
        environment={"OMP_NUM_THREADS": "1"},
        checkpoint={"every": 5},
        **more,
    )
    until(lambda: run.count(Checkpointed) >= 1, "there is a checkpoint")
    return run


def test_a_coordinator_that_dies_is_an_incident(served: Served, tmp_path: Path) -> None:
    """The flow brings another coordinator, and the job goes on in the same attempt."""
    run = start_steps(served, tmp_path / "gate")
    coordinator = next(event.pid for event in run.history() if isinstance(event, JobStarted))
    os.kill(coordinator, signal.SIGKILL)
    until(lambda: run.count(FirstStep) == 2, "training goes on")
    (tmp_path / "gate").touch()
    assert run.until_final().name == "Completed"
    assert run.count(JobStarted) == 1
    [row] = json.loads(run.artifact("incidents").data)
    assert (row["fault"], row["steps lost"]) == ("coordinator-lost", 0)


def test_a_job_of_which_nothing_is_left_resumes_from_its_checkpoint(
    served: Served, tmp_path: Path
) -> None:
    """After the end of flow, coordinator, agent and rank a rerun goes on from the checkpoint."""
    run = start_steps(served, tmp_path / "gate")
    with served.unaware():
        run.process().kill()
        kill_tree(next(event.pid for event in run.history() if isinstance(event, JobStarted)))
        kill_tree(next(event.pid for event in run.history() if isinstance(event, NodeJoined)))
        (tmp_path / "gate").touch()
    until(lambda: run.state().name == "Completed", "the job has succeeded")
    formed = [event for event in run.history() if isinstance(event, Formed)]
    assert formed[-1].step >= 5


def kill_tree(pid: int) -> None:
    """SIGKILL a process and all below it, as the end of a node does."""
    top = psutil.Process(pid)
    for one in (top, *top.children(recursive=True)):
        one.kill()


def test_a_succeeded_job_is_not_run_again(served: Served, tmp_path: Path) -> None:
    """A rerun of a completed flow run reports the job as it ended, and starts nothing."""
    run = start_gated(served, tmp_path / "gate")
    (tmp_path / "gate").touch()
    assert run.until_final().name == "Completed"
    before = run.history()
    run.retry()
    until(lambda: run.state().name != "AwaitingRetry" and run.state().is_final(), "the rerun ended")
    assert run.state().name == "Completed"
    assert run.history() == before


def test_a_second_process_of_the_same_flow_run_is_refused(
    served: Served, prefect_api: str, tmp_path: Path
) -> None:
    """While one process steers the job another says so, and leaves job and flow run as they are."""
    run = start_gated(served, tmp_path / "gate")
    before = until(lambda: run.status().holder and run.status(), "the flow steers the job")
    first = run.process()
    with serve(prefect_api, served.home, "tests"):
        run.retry()
        until(lambda: "Failed" in run.task_states("supervise"), "the second process was refused")
        until(lambda: f"process {first.pid} on" in run.logs(), "its log names the first one")
        until(lambda: "This process leaves it alone" in run.logs(), "it says that it leaves")
    assert run.status() == before
    assert run.state().name == "Running"
    assert sorted(run.task_states("supervise")) == ["Failed", "Running"]
    (tmp_path / "gate").touch()
    until(lambda: run.state().name == "Completed", "the first process completes the flow run")


def test_cancelling_the_flow_run_stops_the_job(served: Served, tmp_path: Path) -> None:
    """A cancelled job ends as stopped, and a retry's attempt goes on from its checkpoint."""
    run = start_steps(served, tmp_path / "gate")
    run.process()  # it steers the job
    run.cancel()
    assert run.until_final().name == "Cancelled"
    until(lambda: run.count(Ended) == 1, "the job has ended")
    ended = run.history()[-1]
    assert ended.outcome == "stopped"
    assert ended.reason.startswith("stopped by the cancellation of flow run")
    (tmp_path / "gate").touch()
    run.retry()
    until(lambda: run.state().name == "Completed", "the next attempt has succeeded")
    assert [e.attempt for e in run.history() if isinstance(e, JobStarted)] == [1, 2]
    formed = [event for event in run.history() if isinstance(event, Formed)]
    assert formed[-1].step >= 5
    assert run.task_states("restore") == ["Completed"]


def test_a_retry_waits_for_the_last_words_of_a_cancelled_job(
    served: Served, tmp_path: Path
) -> None:
    """A job that is ending is not adopted: its next attempt goes on from what it leaves."""
    run = start_steps(served, tmp_path / "gate", snapshot_every=2)
    run.process()
    store = run.directory.path / "checkpoints"
    with (store / ".lock").open("w") as lock:  # writes wait, as for a slow store
        fcntl.flock(lock, fcntl.LOCK_EX)
        written = max(e.step for e in run.history() if isinstance(e, Checkpointed))
        until(lambda: run.status().finished >= written + 9, "snapshots are newer than that")
        run.cancel()
        until(lambda: run.count(LastWords) == 1, "last words begin")
        run.until_final()
        (tmp_path / "gate").touch()
        run.retry()
        until(lambda: "Running" in run.task_states("launch"), "the retry looks for the job")
        assert run.count(JobStarted) == 1
    until(lambda: run.state().name == "Completed", "the next attempt has succeeded")
    assert [e.attempt for e in run.history() if isinstance(e, JobStarted)] == [1, 2]
    left = next(e for e in run.history() if isinstance(e, LastWords) and e.path)
    formed = [event for event in run.history() if isinstance(event, Formed)]
    assert formed[-1].step == left.step > written


def test_a_runner_that_shuts_down_keeps_the_job(
    served: Served, prefect_api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM to the serving process ends the flow run, and the job goes on."""
    with serve(prefect_api, served.home, "shut-down") as other:
        run = start_gated(other, tmp_path / "gate")
        before = until(lambda: run.status().holder and run.status(), "the flow steers the job")
        os.kill(other.pid, signal.SIGTERM)
        until(lambda: set(ENDS) & set(run.states()), "the flow run's process has ended")
    until(lambda: run.status().holder == "", "the lease is free")
    # Some runners crash their flow runs when they shut down, some cancel them with these words.
    monkeypatch.setenv("REKINDLE_HOME", str(served.home))
    with temporary_settings({PREFECT_LOGGING_TO_API_ENABLED: False}):
        flow_run = served.client.read_flow_run(run.id)
        stop_job(train, flow_run, Cancelling(message="Runner is shutting down."))
    assert run.status().ranks == before.ranks
    (tmp_path / "gate").touch()
    until(lambda: run.count(Ended) == 1, "the job has ended")
    assert run.history()[-1].outcome == "succeeded"


def lose_worker(served: Served, api: str, start: Callable[[Served], FlowRun]) -> FlowRun:
    """Start a flow run, and kill its runner and its process, in this order; its job goes on."""
    with serve(api, served.home, "lost") as other:
        run = start(other)
        flow = run.process()
        psutil.Process(other.pid).kill()
        flow.kill()
    run.client = served.client
    until(lambda: run.status().holder == "", "the lease is free")
    return run


def test_a_lost_worker_keeps_the_job(served: Served, prefect_api: str, tmp_path: Path) -> None:
    """Where runner and flow die at once nobody tells Prefect; whoever reruns the run adopts."""
    run = lose_worker(served, prefect_api, lambda other: start_gated(other, tmp_path / "gate"))
    assert run.state().name == "Running"
    before = run.status()
    with serve(prefect_api, served.home, "lost"):
        run.retry()
        until(lambda: run.status().holder, "the job is adopted")
        assert run.status().ranks == before.ranks
        (tmp_path / "gate").touch()
        until(lambda: run.count(Ended) == 1, "the job has ended")
        until(lambda: run.state().name == "Completed", "the flow run has completed")
    assert run.count(JobStarted) == 1


_CANCELLED = """
import sys
from prefect.client.orchestration import get_client
from prefect.states import Cancelling
from rekindle.flows.train import train
from rekindle.tasks.hooks import stop_job
with get_client(sync_client=True) as client:
    stop_job(train, client.read_flow_run(sys.argv[1]), Cancelling())
"""


def test_cancelling_ends_a_job_that_has_lost_its_coordinator_too(
    served: Served, prefect_api: str, tmp_path: Path
) -> None:
    """Ranks that train on without flow and coordinator are stopped as well, by another one."""
    gate = tmp_path / "gate"
    run = lose_worker(served, prefect_api, lambda other: start_steps(other, gate, steps=6000))
    rank = run.status().ranks[0].pid
    os.kill(next(e.pid for e in run.history() if isinstance(e, JobStarted)), signal.SIGKILL)
    env = {"PREFECT_API_URL": prefect_api, "PREFECT_HOME": str(served.home)}
    env["REKINDLE_HOME"] = str(served.home)
    command = [sys.executable, "-c", _CANCELLED, str(run.id)]
    with process(command, tmp_path / "hook.log", **env) as hook:
        until(lambda: hook.poll() is not None, "the hook has run")
        assert hook.returncode == 0, (tmp_path / "hook.log").read_text()
        until(lambda: run.count(Ended) == 1, "the job has ended")
    assert run.history()[-1].outcome == "stopped"
    until(lambda: not psutil.pid_exists(rank), "its rank has ended")


def test_a_server_that_is_down_does_not_disturb_the_job(tmp_path: Path) -> None:
    """A rank lost while Prefect's server is down is recovered, and told when the server is back."""
    home, port, gate = tmp_path / "prefect", free_port(), tmp_path / "gate"
    home.mkdir()
    job = {"script": str(SCRIPTS / "gated.py"), "arguments": [str(gate), "exit"], "nodes": 2}
    env = {"PREFECT_API_URL": f"http://127.0.0.1:{port}/api", "PREFECT_HOME": str(home)}
    env["REKINDLE_HOME"] = str(tmp_path)
    with ending_jobs(tmp_path), contextlib.ExitStack() as stack:
        with server(home, port) as api:
            stack.enter_context(process(flow_command(job), tmp_path / "flow.log", **env))
            client = stack.enter_context(SyncPrefectClient(api))
            flow_run = until(client.read_flow_runs, "the flow run is known")[0]
            run = FlowRun(client, tmp_path, flow_run.id, "train")
            until(lambda: run.count(RanksStarted) == 2, "the ranks run")
            before = until(lambda: run.status().holder and run.status(), "the flow steers the job")
        os.kill(before.ranks[0].pid, signal.SIGKILL)
        until(lambda: run.count(RanksStarted) == 4, "all ranks are started anew")
        assert run.status().holder == before.holder
        with server(home, port):
            closed = ("rekindle.incident.closed", 1)
            until(lambda: closed in run.events(), "Prefect is told of the incident")
            gate.touch()
            assert run.until_final().name == "Completed"
            assert "signal 9 (SIGKILL)" in str(run.artifact("incidents").data)
