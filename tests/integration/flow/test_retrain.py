"""The retrain flow on a real Prefect server: each flow run publishes once, after any fault."""

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

import acts
import httpx
import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentUpdate
from prefect.client.schemas.filters import FlowFilter, FlowFilterName
from prefect.exceptions import ObjectNotFound
from prefect.states import Crashed, Scheduled
from prefect_side import FlowRun, ending_jobs, process, until
from reference_tables.files import unlisted
from stores import latest_at
from stores.servers import ENVIRONMENT, SECRET_KEY, rclone
from waiting import bound_s

from rekindle import names
from rekindle.checkpoints.directory import DirectoryStore
from rekindle.checkpoints.publishing import resolve
from rekindle.cli.setup import automations
from rekindle.recovery.journal.journal import Ended, FirstStep, JobStarted

pytestmark = pytest.mark.timeout(900)

SCRIPTS = Path(__file__).with_name("scripts")
FLOWS = ["retrain"]
_SERVE = """
from prefect import serve
from prefect.flows import EntrypointType
from rekindle.flows.rescue import rescue
from rekindle.flows.retrain import retrain

def deployment(flow, name, **options):
    return flow.to_deployment(name, entrypoint_type=EntrypointType.MODULE_PATH, **options)

serve({deployments}, print_starting_message=False, pause_on_shutdown=False)
"""


class Nights:
    """Flow runs of the retrain flow, in a separate home folder."""

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
        """Train a tiny model in two ranks; the evaluation reads its accuracy from a file.

        store: the name of a block with the place of checkpoints.
        """
        calls, accuracy = str(folder / "calls"), folder / "accuracy"
        accuracy.write_text("0.9")
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
        evaluate = [sys.executable, str(SCRIPTS / "evaluate.py"), calls, str(accuracy)]
        given = {"prepare": prepare, "evaluate": evaluate, "publish_to": "out"} | around
        run = self.client.create_flow_run_from_deployment(
            self.deployment("retrain/tests"), parameters={"job": job, "around": given}
        )
        return FlowRun(self.client, self.home, run.id, "night")


@pytest.fixture(scope="module")
def nights(prefect_api: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nights]:
    """Serve the retrain and rescue flows."""
    home = tmp_path_factory.mktemp("nights")
    env = {
        "PREFECT_API_URL": prefect_api,
        "PREFECT_HOME": str(home),
        "PREFECT_RUNNER_POLL_FREQUENCY": "1",
        "REKINDLE_HOME": str(home),
    }

    def served(name: str, deployments: str) -> AbstractContextManager[Popen[bytes]]:
        script = _SERVE.format(deployments=deployments)
        return process([sys.executable, "-c", script], home / f"{name}.log", **env)

    others = 'deployment(rescue, "tests"), '
    others += 'deployment(retrain, "downstream", enforce_parameter_schema=False)'
    with (
        SyncPrefectClient(prefect_api) as client,
        served("nights", 'deployment(retrain, "tests")') as runner,
        served("others", others),
        ending_jobs(home),
    ):
        yield Nights(client, home, runner.pid)


def latest(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "out" / "latest.json").read_bytes())
    return found


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


class Night:
    """One night's flow run, and its folder."""

    def __init__(self, nights: Nights, folder: Path) -> None:
        self.nights, self.folder = nights, folder
        (folder / "gate").touch()
        limit, downstream = {"accuracy": 0.95}, ["retrain/downstream"]
        self.run = nights.start(folder, at_least=limit, downstream=downstream)
        self.first: dict[str, Any] = {}

    @contextlib.contextmanager
    def downstream_refuses(self) -> Iterator[None]:
        """Make the downstream deployment refuse a run without its other parameters."""
        client, id_ = self.nights.client, self.nights.deployment("retrain/downstream")
        client.update_deployment(id_, DeploymentUpdate(enforce_parameter_schema=True))
        yield
        client.update_deployment(id_, DeploymentUpdate(enforce_parameter_schema=False))

    def assets(self, key: str) -> list[dict[str, Any]]:
        """Return the events of an asset."""
        body = {"filter": {"any_resource": {"id": [key]}, "event": {"prefix": ["prefect.asset"]}}}
        url = f"{str(self.nights.client.api_url).rstrip('/')}/events/filter"
        found: list[dict[str, Any]] = httpx.post(url, json=body).json()["events"]
        return found


def what_is_not_good_enough_is_not_published(night: Night) -> None:
    """Below the limit nothing is published; the flow run fails with that reason."""
    state = night.run.until_state("Failed")
    assert state.name == "Failed"
    assert "accuracy is 0.9, but must be at least 0.95" in (state.message or "")
    assert not (night.folder / "out").exists()


def a_publication_that_nobody_can_use_is_undone(night: Night) -> None:
    """If a downstream deployment refuses the reference, the pointer is as before: not there."""
    (night.folder / "accuracy").write_text("0.96")
    with night.downstream_refuses():
        failed = night.run.states().count("Failed")
        night.run.retry()
        night.run.until_state("Failed", failed + 1)
        night.run.until(lambda: night.run.state().is_final(), "no hook runs it again")
        assert [*(night.folder / "out").glob("*/step-*")]
        assert not (night.folder / "out" / "latest.json").exists()


def a_night_publishes_one_checkpoint(night: Night) -> None:
    """A night prepares, trains, evaluates and publishes one checkpoint, with a link in the UI."""
    night.run.retry()
    state = night.run.until_state("Completed")
    assert state.name == "Completed", state.message
    night.first = latest(night.folder)
    assert (night.first["step"], night.first["metrics"]) == (8, {"accuracy": 0.96})
    path = Path(night.first["location"])
    found = DirectoryStore(path.parent).newest().checkpoint
    assert found is not None
    assert found.path == path
    assert night.first["reference"].startswith(f"{path}#")
    assert str(night.run.artifact("published").data).endswith(f"({path.as_uri()})")


def the_checkpoint_is_an_asset_of_its_run(night: Night) -> None:
    """The key of the asset is the address of the copy, and its newest event names the flow run."""
    succeeded = "prefect.asset.materialization.succeeded"
    events = until(
        lambda: night.assets(Path(night.first["location"]).as_uri()), "Prefect has the asset"
    )
    assert {event["event"] for event in events} == {succeeded}
    event = max(events, key=lambda each: str(each["occurred"]))
    related = {each["prefect.resource.id"] for each in event["related"]}
    assert f"prefect.flow-run.{night.run.id}" in related
    facts = {key: night.first[key] for key in ("reference", "job_id", "step", "metrics")}
    assert event["payload"] == facts


def a_rerun_does_nothing_twice(night: Night) -> None:
    """A rerun keeps the reference and repeats no preparation, training or publishing."""
    night.run.retry()
    night.run.until_state("Completed", 2)
    assert latest(night.folder) == night.first
    assert (night.folder / "prepared").read_text() == "p"
    assert night.run.count(JobStarted) == 1


def a_deployment_that_waits_for_the_checkpoint_is_run_once(night: Night) -> None:
    """The downstream deployment runs once with the checkpoint's reference, even after a rerun."""
    runs = night.nights.client.read_flow_runs(
        flow_filter=FlowFilter(name=FlowFilterName(any_=["retrain"]))
    )
    wanted = night.first["reference"]
    assert [r.parameters for r in runs if r.parameters.get("checkpoint") == wanted] == [
        {"checkpoint": wanted}
    ]


def a_flow_that_crashes_each_time_stays_crashed(night: Night) -> None:
    """The rescue flow ignores a run that did not crash, and obeys its limit of runs."""
    rescue(night.nights, night.run)
    assert night.run.state().name == "Completed"
    night.nights.client.set_flow_run_state(night.run.id, Crashed(), force=True)
    rescue(night.nights, night.run, most=0)
    assert night.run.state().name == "Crashed"


def the_reference_lists_each_file(night: Night) -> None:
    """docs/reference/job-directory.md has a row for each file that the flow runs have left."""
    assert unlisted(night.nights.home) == []
    assert [*night.nights.home.glob("jobs/*/prepared")]


def a_night_whose_record_is_gone_is_refused(night: Night) -> None:
    """Without the job directory, as on another machine, a rerun prepares and trains nothing."""
    night.run.directory.path.rename(night.nights.home / "elsewhere")
    failed = night.run.states().count("Failed")
    night.run.retry()
    state = night.run.until_state("Failed", failed + 1)
    assert "RecordLostError" in (state.message or "")
    assert f"its report is the artifact {night.run.job_id}-report" in (state.message or "")
    assert not night.run.directory.path.exists()
    assert (night.folder / "prepared").read_text() == "p"


ACTS = [
    what_is_not_good_enough_is_not_published,
    a_publication_that_nobody_can_use_is_undone,
    a_night_publishes_one_checkpoint,
    the_checkpoint_is_an_asset_of_its_run,
    a_rerun_does_nothing_twice,
    a_deployment_that_waits_for_the_checkpoint_is_run_once,
    a_flow_that_crashes_each_time_stays_crashed,
    the_reference_lists_each_file,
    a_night_whose_record_is_gone_is_refused,
]


@pytest.fixture(scope="module")
def played(nights: Nights, tmp_path_factory: pytest.TempPathFactory) -> acts.Played:
    """Run one night, five times."""
    return acts.Played(ACTS, Night(nights, tmp_path_factory.mktemp("night")))


@pytest.mark.parametrize("act", acts.names(ACTS))
def test_a_night(played: acts.Played, act: str) -> None:
    """Each act has the result that its function states."""
    played.check(act)


_SAVE = """
import sys
from rekindle.blocks.saved import SavedStore
from rekindle.blocks.job_fields import CheckpointDirectory
where = CheckpointDirectory(path=sys.argv[1], every=5)
SavedStore(checkpoint=where, access_key_id=sys.argv[2], secret_access_key=sys.argv[3]).save("s3")
"""


def command_lines() -> list[bytes]:
    """Return the command lines of all processes, as `ps` shows them."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # the process has ended
            lines.append(path.read_bytes())
    return lines


@pytest.fixture
def automated(nights: Nights) -> Iterator[None]:
    """Install the automations for the retrain flow only."""
    rescue = nights.deployment("rescue/tests")
    for each in (
        automations.crash_silent_runs(FLOWS, 180.0),
        automations.crash_pending_runs(FLOWS, 600.0),
        automations.rescue_runs(rescue, FLOWS),
        automations.rescue_runs_again(rescue, FLOWS, 180.0),
    ):
        nights.client.create_automation(each)
    try:
        yield
    finally:
        for automation in nights.client.read_automations():
            nights.client.delete_automation(automation.id)


@pytest.mark.usefixtures("automated")
def test_a_night_in_an_object_store_whose_flow_is_killed(
    nights: Nights, tmp_path: Path, prefect_api: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """After SIGKILL of the flow the automation reruns it, and it adopts the job.

    The runner is stopped and does not see the end. No output shows the store's key.
    """
    with rclone(tmp_path_factory.mktemp("s3")) as server:
        # In a separate process, as in test_saved.py.
        subprocess.run(
            [sys.executable, "-c", _SAVE, server.location(), *ENVIRONMENT.values()],
            env={**os.environ, "PREFECT_API_URL": prefect_api},
            check=True,
            timeout=bound_s(),
        )
        out = server.location("out")
        run = nights.start(tmp_path, steps=60, store="s3", publish_to=out)
        run.until(lambda: run.count(FirstStep), "training has begun")
        shown = [line for line in command_lines() if b"rclone" not in line]
        os.kill(nights.runner, signal.SIGSTOP)
        try:
            run.process().send_signal(signal.SIGKILL)
            crashed = Crashed(message="no heartbeat")  # as the other automation sets it
            nights.client.set_flow_run_state(run.id, crashed, force=True)
            run.until_state("Rescheduling")
        finally:
            os.kill(nights.runner, signal.SIGCONT)
        (tmp_path / "gate").touch()
        # After SIGCONT the runner may report the same end late; the hook then acts again.
        run.until_state("Completed")
        assert (tmp_path / "prepared").read_text() == "p"
        assert run.count(JobStarted) == 1
        published = latest_at(out, ENVIRONMENT)
        assert published is not None
        assert (published.step, published.metrics) == (60, {"accuracy": 0.9})
        found = resolve(published.reference, ENVIRONMENT)
        assert (found.location, found.manifest.step) == (published.location, 60)
    assert SECRET_KEY not in (run.directory.path / names.SPEC_FILE).read_text()
    assert str(run.artifact("published").data).endswith(f"({published.location})")
    shown += [run.logs().encode(), str(run.artifact("published")).encode()]
    shown += [str(nights.client.read_flow_run(run.id)).encode()]
    assert not [each for each in shown if SECRET_KEY.encode() in each]


@pytest.mark.usefixtures("automated")
def test_the_job_of_a_run_that_is_cancelled_while_it_waits_is_stopped(
    nights: Nights, tmp_path: Path
) -> None:
    """An automation stops the job of a scheduled run that is cancelled.

    Such a run has no process, and Prefect runs none of its hooks.
    """
    run = nights.start(tmp_path, steps=2000)
    run.until(lambda: run.count(FirstStep), "training has begun")
    os.kill(nights.runner, signal.SIGSTOP)
    try:
        run.process().send_signal(signal.SIGKILL)
        run.until_left()
        waits = Scheduled(
            name="Rescheduling", scheduled_time=datetime.now(timezone.utc) + timedelta(hours=1)
        )
        nights.client.set_flow_run_state(run.id, waits, force=True)
        run.cancel()
        run.until(lambda: run.count(Ended), "the job has ended")
        run.until(lambda: run.state().name == "Cancelled", "so has the flow run")
    finally:
        os.kill(nights.runner, signal.SIGCONT)
    assert run.history()[-1].outcome == "stopped"
