"""The retrain flow on a real Prefect server: once for each flow run, whatever happens to it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from subprocess import Popen
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowFilter, FlowFilterName
from prefect.exceptions import ObjectNotFound
from prefect.states import Crashed, Scheduled
from prefect_side import FlowRun, ending_jobs, process, until
from stores.servers import ENVIRONMENT, SECRET_KEY, rclone

from rekindle.checkpoints.directory import DirectoryStore
from rekindle.checkpoints.latest import read_latest
from rekindle.checkpoints.publishing import resolve
from rekindle.errors import JobError, RejectedError
from rekindle.recovery.journal import Ended, FirstStep, JobStarted
from rekindle.tasks.retraining import judge, read_metrics

pytestmark = pytest.mark.timeout(400)

SCRIPTS = Path(__file__).with_name("scripts")
_SERVE = """
from prefect import serve
from prefect.flows import EntrypointType
from rekindle.flows.rescue import rescue
from rekindle.flows.retrain import retrain

serve(
    {flow}.to_deployment("{name}", entrypoint_type=EntrypointType.MODULE_PATH, **{options}),
    print_starting_message=False,
    pause_on_shutdown=False,
)
"""


class Nights:
    """Flow runs of the retrain flow, in a home of their own."""

    def __init__(self, client: SyncPrefectClient, home: Path, runner: int) -> None:
        self.client = client
        self.home = home
        self.runner = runner

    def deployment(self, name: str) -> UUID:
        def find() -> UUID | None:
            try:
                return self.client.read_deployment_by_name(name).id
            except ObjectNotFound:
                return None

        return until(find, f"{name} is served")

    def start(self, folder: Path, *, steps: int = 8, store: str = "", **around: Any) -> FlowRun:
        """Train a tiny model in two ranks; evaluation tells an accuracy of 0.9.

        store: the name of a block with where checkpoints go.
        """
        calls = str(folder / "calls")
        job = {
            "name": "night",
            "script": str(SCRIPTS / "steps.py"),
            "arguments": [str(folder / "gate"), str(steps)],
            "processes_per_node": 2,
            "checkpoint": {"every": 5},
            "saved_store": store,
            "working_directory": str(folder),
        }
        prepare = [sys.executable, "-c", "open('prepared', 'a').write('p')"]
        evaluate = [sys.executable, str(SCRIPTS / "evaluate.py"), calls, "0.9"]
        given = {"prepare": prepare, "evaluate": evaluate, "publish_to": "out"} | around
        run = self.client.create_flow_run_from_deployment(
            self.deployment("retrain/tests"), parameters={"job": job, "around": given}
        )
        return FlowRun(self.client, self.home, run.id, "night")


@pytest.fixture(scope="module")
def nights(prefect_api: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nights]:
    """The retrain and rescue flows, served."""
    home = tmp_path_factory.mktemp("nights")
    env = {
        "PREFECT_API_URL": prefect_api,
        "PREFECT_HOME": str(home),
        "PREFECT_RUNNER_POLL_FREQUENCY": "1",
        "REKINDLE_HOME": str(home),
    }

    def served(flow: str, name: str, **options: object) -> AbstractContextManager[Popen[bytes]]:
        script = _SERVE.format(flow=flow, name=name, options=options)
        return process([sys.executable, "-c", script], home / f"{flow}-{name}.log", **env)

    with (
        SyncPrefectClient(prefect_api) as client,
        served("retrain", "tests") as runner,
        served("rescue", "tests"),
        served("retrain", "downstream", enforce_parameter_schema=False),
        ending_jobs(home),
    ):
        yield Nights(client, home, runner.pid)


def latest(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "out" / "latest.json").read_bytes())
    return found


def test_a_night(nights: Nights, tmp_path: Path) -> None:
    """Data, training, evaluation, one published checkpoint, and a link to it in the UI."""
    (tmp_path / "gate").touch()
    run = nights.start(tmp_path, at_least={"accuracy": 0.8})
    state = run.until_final()
    assert state.name == "Completed", state.message
    told = latest(tmp_path)
    assert (told["step"], told["metrics"]) == (8, {"accuracy": 0.9})
    path = Path(told["location"])
    found = DirectoryStore(path.parent).newest().checkpoint
    assert found is not None
    assert found.path == path
    assert told["reference"].startswith(f"{path}#")
    assert str(run.artifact("published").data).endswith(f"({path.as_uri()})")


_SAVE = """
import sys
from rekindle.blocks.saved import SavedStore
from rekindle.blocks.store import CheckpointDirectory
where = CheckpointDirectory(path=sys.argv[1], every=5)
SavedStore(checkpoint=where, access_key_id=sys.argv[2], secret_access_key=sys.argv[3]).save("s3")
"""


def test_a_night_in_an_object_store(
    nights: Nights, tmp_path: Path, prefect_api: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Published there with the job's key, which nobody is shown."""
    with rclone(tmp_path_factory.mktemp("s3")) as server:
        # In a process of its own, as in test_saved.py.
        subprocess.run(
            [sys.executable, "-c", _SAVE, server.location(), *ENVIRONMENT.values()],
            env={**os.environ, "PREFECT_API_URL": prefect_api},
            check=True,
            timeout=60,
        )
        out = server.location("out")
        run = nights.start(tmp_path, store="s3", publish_to=out)
        until(lambda: run.count(FirstStep), "training has begun")
        shown = [line for line in command_lines() if b"rclone" not in line]
        (tmp_path / "gate").touch()
        state = run.until_final()
        assert state.name == "Completed", state.message
        told = read_latest(out, ENVIRONMENT)
        assert told is not None
        assert (told.step, told.metrics) == (8, {"accuracy": 0.9})
        found = resolve(told.reference, ENVIRONMENT)
        assert (found.location, found.manifest.step) == (told.location, 8)
    assert str(run.artifact("published").data).endswith(f"({told.location})")
    shown += [run.logs().encode(), str(run.artifact("published")).encode()]
    shown += [str(nights.client.read_flow_run(run.id)).encode()]
    assert not [each for each in shown if SECRET_KEY.encode() in each]


def command_lines() -> list[bytes]:
    """What `ps` shows of all processes."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            lines.append(path.read_bytes())
    return lines


def test_a_rerun_does_nothing_twice(nights: Nights, tmp_path: Path) -> None:
    """The reference stays; nothing is prepared, trained or published again."""
    (tmp_path / "gate").touch()
    run = nights.start(tmp_path)
    assert run.until_final().name == "Completed"
    first = latest(tmp_path)
    run.retry()
    until(lambda: run.states().count("Completed") == 2, "the rerun has ended")
    assert latest(tmp_path) == first
    assert (tmp_path / "prepared").read_text() == "p"
    assert run.count(JobStarted) == 1


@pytest.fixture
def automated(nights: Nights, prefect_api: str) -> Iterator[None]:
    """The automations, for the retrain flow alone."""
    nights.deployment("rescue/tests")
    command = [sys.executable, "-m", "rekindle.flows.automations", "--rescue", "rescue/tests"]
    for _ in range(2):  # the second time they take the place of the first
        subprocess.run(
            [*command, "--flows", "retrain"],
            env={**os.environ, "PREFECT_API_URL": prefect_api},
            check=True,
            timeout=60,
        )
    try:
        yield
    finally:
        for automation in nights.client.read_automations():
            nights.client.delete_automation(automation.id)


@pytest.mark.usefixtures("automated")
def test_a_killed_flow_is_rescued_and_goes_on(nights: Nights, tmp_path: Path) -> None:
    """Its runner sees nothing: an automation has it run again, and it adopts the job."""
    assert len(nights.client.read_automations()) == 2
    run = nights.start(tmp_path, steps=60)
    until(lambda: run.count(FirstStep), "training has begun")
    os.kill(nights.runner, signal.SIGSTOP)
    try:
        run.process().send_signal(signal.SIGKILL)
        crashed = Crashed(message="no heartbeat")  # as the other automation has it
        nights.client.set_flow_run_state(run.id, crashed, force=True)
        until(lambda: run.state().name == "Rescheduling", "the rescue is on its way")
    finally:
        os.kill(nights.runner, signal.SIGCONT)
    (tmp_path / "gate").touch()
    # Its runner, once awake, may tell of the same death late, and is then answered once more.
    until(lambda: run.state().name == "Completed", "the night is over")
    assert (tmp_path / "prepared").read_text() == "p"
    assert run.count(JobStarted) == 1
    assert latest(tmp_path)["step"] == 60


@pytest.mark.usefixtures("automated")
def test_the_job_of_a_run_that_is_cancelled_while_it_waits_is_stopped(
    nights: Nights, tmp_path: Path
) -> None:
    """It has no process that could, and Prefect runs none of its hooks."""
    run = nights.start(tmp_path, steps=2000)
    until(lambda: run.count(FirstStep), "training has begun")
    os.kill(nights.runner, signal.SIGSTOP)
    try:
        run.process().send_signal(signal.SIGKILL)
        until(lambda: run.status().holder == "", "the lease is free")
        waits = Scheduled(
            name="Rescheduling", scheduled_time=datetime.now(timezone.utc) + timedelta(hours=1)
        )
        nights.client.set_flow_run_state(run.id, waits, force=True)
        run.cancel()
        until(lambda: run.count(Ended), "the job has ended")
        until(lambda: run.state().name == "Cancelled", "so has the flow run")
    finally:
        os.kill(nights.runner, signal.SIGCONT)
    assert run.history()[-1].outcome == "stopped"


def rescue(nights: Nights, run: FlowRun, most: int = 5) -> None:
    """Run the rescue flow for a flow run, as the automation does."""
    started = nights.client.create_flow_run_from_deployment(
        nights.deployment("rescue/tests"),
        parameters={"flow_run_id": str(run.id), "most": most},
    )
    until(lambda: final(nights, started.id), "the rescue has ended")


def final(nights: Nights, id_: UUID) -> bool:
    state = nights.client.read_flow_run(id_).state
    return state is not None and state.is_final()


def test_a_flow_that_crashes_each_time_stays_crashed(nights: Nights, tmp_path: Path) -> None:
    """The cap is on runs; what is not crashed is left alone."""
    (tmp_path / "gate").touch()
    run = nights.start(tmp_path)
    assert run.until_final().name == "Completed"
    rescue(nights, run)
    assert run.state().name == "Completed"
    nights.client.set_flow_run_state(run.id, Crashed(), force=True)
    rescue(nights, run, most=0)
    assert run.state().name == "Crashed"


def test_what_is_not_good_enough_is_not_published(nights: Nights, tmp_path: Path) -> None:
    """The flow run fails and says why."""
    (tmp_path / "gate").touch()
    run = nights.start(tmp_path, at_least={"accuracy": 0.95})
    state = run.until_final()
    assert state.name == "Failed"
    assert "accuracy is 0.9, and must be 0.95 at least" in (state.message or "")
    assert not (tmp_path / "out").exists()


def test_whoever_waits_for_the_checkpoint_is_run_once(nights: Nights, tmp_path: Path) -> None:
    """With its reference, also when the night is run again."""
    (tmp_path / "gate").touch()
    run = nights.start(tmp_path, downstream=["retrain/downstream"])
    assert run.until_final().name == "Completed"
    run.retry()
    until(lambda: run.states().count("Completed") == 2, "the rerun has ended")
    wanted = latest(tmp_path)["reference"]
    runs = nights.client.read_flow_runs(
        flow_filter=FlowFilter(name=FlowFilterName(any_=["retrain"]))
    )
    assert [r.parameters for r in runs if r.parameters.get("checkpoint") == wanted] == [
        {"checkpoint": wanted}
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("done", "no JSON object"),
        ("[1]", "no JSON object"),
        ('{"loss": "low"}', "no number"),
        ('{"loss": true}', "no number"),
    ],
)
def test_what_an_evaluation_may_say(line: str, words: str) -> None:
    """One JSON object of numbers."""
    with pytest.raises(JobError, match=words):
        read_metrics(line)


def test_metrics_are_held_against_their_limits() -> None:
    """Both ways; a metric that is missing or no number passes no limit."""
    judge({"a": 1.0, "b": 2.0}, at_least={"a": 1.0}, at_most={"b": 2.0})
    for metrics, words in (
        ({"a": 0.5}, "a is 0.5"),
        ({}, "no metric a"),
        ({"a": float("nan")}, "nan"),
    ):
        with pytest.raises(RejectedError, match=words):
            judge(metrics, at_least={"a": 1.0}, at_most={})
    with contextlib.suppress(RejectedError):
        judge({"b": 3.0}, at_least={}, at_most={"b": 2.0})
        pytest.fail("3 passes a limit of 2")
