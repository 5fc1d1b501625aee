"""The documented commands: they set up a real server, and a worker runs the deployments."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import acts
import psutil
import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import WorkQueue
from prefect.client.schemas.schedules import CronSchedule
from prefect.utilities.schema_tools import validate
from prefect_side import FlowRun, process, until
from repository import ROOT
from waiting import bound_s

from rekindle.blocks.job import TrainingJob
from rekindle.recovery.journal.journal import Ended, FirstStep, JobStarted, RanksStarted

pytestmark = pytest.mark.timeout(900)

SCRIPTS = Path(__file__).with_name("scripts")
# by name: entrypoint, work pool, its queue
WANTED = {
    "train/local": ("rekindle.flows.train.train", "local", "default"),
    "retrain/nightly": ("rekindle.flows.retrain.retrain", "local", "nightly"),
    "check-nodes/check-nodes": ("rekindle.flows.check_nodes.check_nodes", "local", "default"),
    "profile/profile": ("rekindle.flows.profile.profile", "local", "default"),
    "rescue/rescue": ("rekindle.flows.rescue.rescue", "local", "default"),
}
HEARTBEAT = {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30"}


def documented() -> list[list[str]]:
    """Return the first commands of the documentation; the last one starts a worker."""
    text = (ROOT / "docs" / "deploy" / "deploying.md").read_text().partition("\n## ")[0]
    lines: list[tuple[str, str]] = re.findall(r"^    (rekindle|prefect) (.+)$", text, re.MULTILINE)
    programs = {
        "rekindle": ["-m", "rekindle.cli.main"],
        "prefect": ["-m", "prefect", "--no-prompt"],
    }
    return [[sys.executable, *programs[name], *shlex.split(rest)] for name, rest in lines]


def to_its_end(command: list[str], api: str) -> None:
    env = {**os.environ, "PREFECT_API_URL": api}
    subprocess.run(command, env=env, cwd=ROOT, check=True, timeout=bound_s())


def in_a_terminal(command: list[str], api: str) -> str:
    """Run a command in a terminal, where Prefect may ask a question. Return its output."""
    env = {**os.environ, "PREFECT_API_URL": api}
    ours, theirs = pty.openpty()
    ends: dict[str, Any] = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    with subprocess.Popen(command, env=env, cwd=ROOT, **ends) as running:
        os.close(theirs)
        output = b""
        with contextlib.suppress(OSError):  # the command has closed its end
            while select.select([ours], [], [], bound_s())[0]:
                output += os.read(ours, 65_536)
        os.close(ours)
        if not output:
            running.kill()
        assert running.wait(bound_s()) == 0, output.decode()
    return output.decode()


class Deployed:
    """The deployments of `rekindle setup` on a server, in their first state."""

    def __init__(self, api: str, client: SyncPrefectClient) -> None:
        self.api = api
        self.client = client
        self.found = {name: client.read_deployment_by_name(name) for name in WANTED}

    def start(self, name: str, home: Path, **parameters: Any) -> FlowRun:
        """Schedule a flow run of a deployment for now."""
        id_ = self.found[name].id
        run = self.client.create_flow_run_from_deployment(id_, parameters=parameters)
        return FlowRun(self.client, home, run.id, parameters["job"]["name"])

    def nightly_queue(self) -> WorkQueue:
        return self.client.read_work_queue_by_name("nightly", work_pool_name="local")

    def until_asked(self) -> None:
        """Wait until a worker polls the nightly queue."""
        asked = self.nightly_queue().last_polled
        until(lambda: self.nightly_queue().last_polled != asked, "the worker asks for nights")


@pytest.fixture(scope="module")
def deployed(prefect_api: str) -> Iterator[Deployed]:
    """Return the deployments after the documented commands, except the one that starts a worker."""
    [setup] = documented()[:-1]
    to_its_end(setup, prefect_api)
    with SyncPrefectClient(prefect_api) as client:
        remove_automations(client)
        yield Deployed(prefect_api, client)


def remove_automations(client: SyncPrefectClient) -> None:
    for automation in client.read_automations():
        client.delete_automation(automation.id)


@contextlib.contextmanager
def automated(deployed: Deployed) -> Iterator[None]:
    """Run the set-up again, which creates the automations."""
    to_its_end(documented()[0], deployed.api)
    try:
        yield
    finally:
        remove_automations(deployed.client)


@contextlib.contextmanager
def worker(deployed: Deployed, home: Path) -> Iterator[None]:
    """Start a worker as documented; at the end check that SIGTERM ends it and all its processes."""
    env = {"PREFECT_API_URL": deployed.api, "PREFECT_WORKER_QUERY_SECONDS": "1"}
    env |= {"PREFECT_HOME": str(home), "REKINDLE_HOME": str(home)}
    # Prefect's worker stops by SIGINT, which a shell ignores in background processes.
    command = ["env", "--default-signal=INT", *documented()[-1]]
    try:
        with process(command, home / "worker.log", **env) as running:
            yield
            running.send_signal(signal.SIGTERM)
            assert running.wait(bound_s()) == 0, (home / "worker.log").read_text()
            until(lambda: not left_behind(home), "no process is left")
    finally:
        for each in left_behind(home):
            each.kill()


def left_behind(home: Path) -> list[psutil.Process]:
    """Return the processes that the worker or its children have started."""
    each = psutil.process_iter(["environ"])
    return [one for one in each if (one.info["environ"] or {}).get("REKINDLE_HOME") == str(home)]


@pytest.mark.parametrize("name", WANTED)
def test_a_deployment_is_what_the_file_says(
    deployed: Deployed, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A deployment has valid parameters, a valid job, and variables of its pool."""
    wanted = WANTED[name]
    found = deployed.found[name]
    assert (found.entrypoint, found.work_pool_name, found.work_queue_name) == wanted
    step = {"prefect.deployments.steps.set_working_directory": {"directory": str(ROOT)}}
    assert found.pull_steps == [step]
    schema = found.parameter_openapi_schema or {}
    if name in ("rescue/rescue", "profile/profile"):
        assert schema["required"] == ["flow_run_id"]  # the automation or a user sets it
    else:
        validate(found.parameters, schema, raise_on_error=True)
    if "job" in found.parameters:
        monkeypatch.chdir(ROOT)
        spec = TrainingJob(**found.parameters["job"]).to_spec("job")
        assert (spec.nodes, spec.processes_per_node, spec.checkpoint_every) == (2, 2, 100)
    assert found.job_variables == {"env": HEARTBEAT}
    variables = deployed.client.read_work_pool(wanted[1]).base_job_template["variables"]
    assert set(found.job_variables) <= set(variables["properties"])
    validate(found.job_variables, variables, raise_on_error=True)


def test_pool_queue_and_schedule(deployed: Deployed) -> None:
    """The queue runs one night at a time, at two o'clock, after a node check."""
    assert deployed.client.read_work_pool("local").type == "process"
    assert deployed.nightly_queue().concurrency_limit == 1
    planned = {name: found.schedules for name, found in deployed.found.items()}
    (night,) = planned.pop("retrain/nightly")
    assert night.schedule == CronSchedule(cron="0 2 * * *", timezone="UTC")
    assert not night.active
    (check,) = planned.pop("check-nodes/check-nodes")
    assert check.schedule == CronSchedule(cron="30 1 * * *", timezone="UTC")
    assert not check.active
    assert not any(planned.values())
    assert deployed.found["retrain/nightly"].global_concurrency_limit is None


class Working:
    """A worker, and the folder of its flow runs' jobs."""

    def __init__(self, deployed: Deployed, folder: Path) -> None:
        self.deployed, self.folder = deployed, folder


def a_worker_runs_a_job_whose_flow_is_killed(working: Working) -> None:
    """The worker of a killed flow sets Crashed again; the automation reruns the flow run."""
    deployed, gate = working.deployed, working.folder / "gate"
    script = str((SCRIPTS / "gated.py").relative_to(ROOT))
    job = {"name": "tiny", "script": script, "arguments": [str(gate), "exit"]}
    with automated(deployed):
        run = deployed.start("train/local", working.folder, job=job)
        run.until(lambda: run.count(RanksStarted), "the rank runs")
        flow = run.process()
        assert HEARTBEAT.items() <= flow.environ().items()
        flow.kill()
        run.until_rerun(flow.pid)
        gate.touch()
        run.until_state("Completed")
    assert run.count(JobStarted) == 1


def nights_wait_for_each_other(working: Working) -> None:
    """The worker starts the second night after the first is cancelled and has ended."""
    deployed, folder = working.deployed, working.folder
    gate = folder / "night"
    job: dict[str, Any] = {"name": "night", "script": str(SCRIPTS / "steps.py")}
    job |= {"arguments": [str(gate), "2000"], "checkpoint": {"every": 1000}}
    job["working_directory"] = str(folder)
    first = deployed.start("retrain/nightly", folder, job=job, around={"publish_to": "out"})
    first.until(lambda: first.count(FirstStep), "the first night trains")
    second = deployed.start("retrain/nightly", folder, job=job, around={"publish_to": "out"})
    for _ in range(3):
        deployed.until_asked()
    assert second.state().is_scheduled()
    first.cancel()
    first.until(lambda: first.count(Ended), "its job is stopped")
    gate.touch()
    assert first.until_final().name == "Cancelled"
    second.until_state("Completed")
    assert (folder / "out" / "latest.json").exists()


ACTS = [a_worker_runs_a_job_whose_flow_is_killed, nights_wait_for_each_other]


@pytest.fixture(scope="module")
def played(deployed: Deployed, tmp_path_factory: pytest.TempPathFactory) -> acts.Played:
    """Run all acts with one worker, then end it."""
    folder = tmp_path_factory.mktemp("working")
    with worker(deployed, folder):
        return acts.Played(ACTS, Working(deployed, folder))


@pytest.mark.parametrize("act", acts.names(ACTS))
def test_a_worker(played: acts.Played, act: str) -> None:
    """Each act has the result that its function states."""
    played.check(act)


def test_prefect_can_deploy_the_file(deployed: Deployed) -> None:
    """`prefect deploy --all` asks nothing in a terminal, and makes the same deployments."""
    command = [sys.executable, "-m", "prefect", "deploy", "--all"]
    assert "Would you like" not in in_a_terminal(command, deployed.api)
    again = Deployed(deployed.api, deployed.client).found
    for name, found in deployed.found.items():
        now = again[name]
        assert (now.id, now.parameters, now.tags) == (found.id, found.parameters, found.tags)
        assert (now.entrypoint, now.pull_steps) == (found.entrypoint, found.pull_steps)
