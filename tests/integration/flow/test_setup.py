"""`rekindle setup` and a real Prefect server: what it creates, keeps, replaces and refuses."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import BlockDocumentUpdate, DeploymentUpdate
from prefect.events.actions import RunDeployment
from prefect.exceptions import ObjectNotFound
from prefect_side import free_port, server
from waiting import run_command

from rekindle.cli.setup.deployments_file import SHIPPED

KINDS = {"work pool": 1, "queue": 1, "block type": 3, "block": 3, "deployment": 5, "automation": 4}
WRONG = {
    "no folder": (["--root", "nowhere"], "--root nowhere: there is no such folder"),
    "another type": (["--type", "docker"], "work pool 'local' has the type process"),
    "no block": (["--notify", "slack-webhook/none"], "--notify slack-webhook/none: there is no"),
    "no slug": (["--notify", "ops"], "--notify ops: write SLUG/NAME"),
    "no file": (["--file", "none.yaml"], "none.yaml"),
    "no template": (["--base-job-template", "none.json"], "--base-job-template none.json"),
    "a limit of 0": (["--queue-limit", "0"], "--queue-limit 0: give at least 1"),
    "a short heartbeat": (["--heartbeat", "nan"], "--heartbeat nan: give at least 10 seconds"),
}
FILES = {
    "no such flow": (
        "deployments: [{name: a, entrypoint: rekindle.flows.none.none, work_pool: {name: p}}]",
        "there is no flow rekindle.flows.none.none",
    ),
    "no rescue": ("deployments: []", "0 deployments of the flow rescue"),
    "no cron": (
        "deployments: [{name: a, entrypoint: rekindle.flows.rescue.rescue, work_pool: {name: p}, "
        "schedules: [{cron: 0 2 * *}]}]",
        "0 2 * *",
    ),
    "no flow in the entrypoint": (
        "deployments: [{name: a, entrypoint: train, work_pool: {name: p}}]",
        "there is no flow train",
    ),
    "two names": (
        "deployments: [{name: a, entrypoint: rekindle.flows.rescue.rescue, work_pool: {name: p}}, "
        "{name: a, entrypoint: rekindle.flows.rescue:rescue, work_pool: {name: p}}]",
        "the deployment rescue/a twice",
    ),
}
# Prints the statuses of several command lines, which one process runs.
RUN = """
import json, sys
from rekindle.cli.main import main
found = []
for arguments in json.loads(sys.argv[1]):
    try:
        main(["setup", *arguments])
    except SystemExit as end:
        found.append(end.code)
print(json.dumps(found))
"""


class Machine:
    """A folder in which a person runs `rekindle setup`, with a server of its own."""

    def __init__(self, api: str, folder: Path, client: SyncPrefectClient) -> None:
        self.api, self.folder, self.client = api, folder, client

    def setup(self, *arguments: str) -> list[str]:
        """Run the command once. Return its lines."""
        done = self._run("-m", "rekindle.cli.main", "setup", *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    def refused(self, arguments: list[list[str]]) -> list[str]:
        """Run the command several times. Return its errors, a line for each."""
        done = self._run("-c", RUN, json.dumps(arguments))
        assert json.loads(done.stdout) == [2] * len(arguments), done.stderr
        return done.stderr.splitlines()

    def _run(self, *arguments: str) -> CompletedProcess[str]:
        return run_command(
            [sys.executable, *arguments],
            env={**os.environ, "PREFECT_API_URL": self.api},
            cwd=self.folder,
        )

    def deployment(self, name: str) -> Any:
        return self.client.read_deployment_by_name(name)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """Start a server for this file: the tests count its objects."""
    with (
        server(tmp_path_factory.mktemp("prefect"), free_port()) as api,
        SyncPrefectClient(api) as client,
    ):
        yield Machine(api, tmp_path_factory.mktemp("machine"), client)


@pytest.fixture(scope="module")
def first(machine: Machine) -> tuple[list[str], list[str]]:
    """Return the lines of a dry run, and of the first run after it."""
    planned = machine.setup("--dry-run")
    with pytest.raises(ObjectNotFound):
        machine.client.read_work_pool("local")
    assert not machine.client.read_deployments()
    assert not machine.client.read_automations()
    return planned, machine.setup()


def of(lines: list[str], word: str) -> dict[str, int]:
    """Return how many objects of each kind have lines that begin with a word."""
    return {kind: sum(line.startswith(f"{word}: {kind} ") for line in lines) for kind in KINDS}


def changed(lines: list[str]) -> list[str]:
    return [line for line in lines if not line.startswith("unchanged: ")]


def test_a_dry_run_only_prints(first: tuple[list[str], list[str]]) -> None:
    """A dry run prints what the next run does, and changes nothing."""
    planned, done = first
    assert [line.replace("would create: ", "created: ") for line in planned] == done
    created = of(done, "created")
    created["block type"] += of(done, "unchanged")["block type"]  # a server may know the types
    created["block"] -= of(done, "created")["block type"]
    assert created == KINDS


@pytest.mark.usefixtures("first")
def test_the_server_has_what_the_flows_need(machine: Machine) -> None:
    """Setup fills in the folder, limits the queue, and tags each deployment."""
    queue = machine.client.read_work_queue_by_name("nightly", work_pool_name="local")
    assert queue.concurrency_limit == 1
    assert machine.client.read_work_pool("local").base_job_template["variables"]
    step = {"prefect.deployments.steps.set_working_directory": {"directory": str(machine.folder)}}
    for each in machine.client.read_deployments():
        assert each.pull_steps == [step]
        assert "rekindle" in each.tags
        assert not any(schedule.active for schedule in each.schedules)
    rescue = machine.deployment("rescue/rescue").id
    [again] = machine.client.read_automations_by_name("Rekindle: rescue flow runs")
    [action] = again.actions
    assert isinstance(action, RunDeployment)
    assert action.deployment_id == rescue
    cluster = machine.client.read_block_document_by_name("example", "rekindle-cluster")
    assert cluster.data["nodes"] == 2


@pytest.mark.usefixtures("first")
def test_what_a_person_changed_stays(machine: Machine) -> None:
    """A second run changes only a form of an earlier version, which no person edits.

    A changed object stays until --overwrite replaces it.
    """
    old = DeploymentUpdate(
        parameter_openapi_schema={"type": "object", "properties": {}}, concurrency_limit=4
    )
    machine.client.update_deployment(machine.deployment("rescue/rescue").id, old)
    assert changed(machine.setup()) == ["updated: deployment rescue/rescue (form)"]
    limit = machine.deployment("rescue/rescue").global_concurrency_limit
    assert limit is not None
    assert limit.limit == 4
    cluster = machine.client.read_block_document_by_name("example", "rekindle-cluster")
    assert cluster.id is not None
    machine.client.update_block_document(cluster.id, BlockDocumentUpdate(data={"nodes": 7}))
    train = machine.deployment("train/local")
    machine.client.update_deployment(train.id, DeploymentUpdate(description="ours"))
    queue = machine.client.read_work_queue_by_name("nightly", work_pool_name="local")
    machine.client.update_work_queue(queue.id, concurrency_limit=3)
    [silent] = machine.client.read_automations_by_name("Rekindle: crash silent flow runs")
    machine.client.pause_automation(silent.id)
    differing = ["queue local/nightly", "deployment train/local"]
    differing.append("automation 'Rekindle: crash silent flow runs'")
    fields = ["limit", "description", "enabled"]
    pairs = list(zip(differing, fields, strict=True))
    assert changed(machine.setup()) == [
        f"kept: {what}; it differs in {field}; --overwrite replaces it" for what, field in pairs
    ]
    assert machine.deployment("train/local").description == "ours"
    assert changed(machine.setup("--overwrite")) == [
        f"replaced: {what} ({field})" for what, field in pairs
    ]
    assert machine.deployment("train/local").id == train.id
    cluster = machine.client.read_block_document_by_name("example", "rekindle-cluster")
    assert cluster.data["nodes"] == 7
    assert len(machine.client.read_automations()) == KINDS["automation"]
    assert not changed(machine.setup())


@pytest.fixture(scope="module")
def refused(machine: Machine, first: object) -> dict[str, str]:
    """Return the error of each wrong option and file."""
    arguments = {case: found for case, (found, _) in WRONG.items()}
    for number, (case, (text, _)) in enumerate(FILES.items()):
        path = machine.folder / f"{number}.yaml"
        path.write_text(text)
        arguments[case] = ["--file", str(path)]
    lines = machine.refused(list(arguments.values()))
    return dict(zip(arguments, lines, strict=True))


@pytest.mark.parametrize("case", [*WRONG, *FILES])
def test_a_mistake_is_refused(refused: dict[str, str], case: str) -> None:
    """A wrong option or file ends the command with status 2 and one line that names it."""
    assert {**WRONG, **FILES}[case][1] in refused[case]


def test_the_file_is_shipped() -> None:
    """The file of deployments is in the package, so an installed Rekindle has it."""
    assert SHIPPED.is_file()
