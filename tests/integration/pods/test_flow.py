"""The train flow on a real Prefect server, with its job in the pods of a cluster."""

from __future__ import annotations

import contextlib
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import psutil
import pytest
from cluster.launch import Simulated
from prefect_side import FlowRun, Served, serve, until
from waiting import run_command

from rekindle import names
from rekindle.engines.kubernetes.client.api import load
from rekindle.engines.kubernetes.engine import KubernetesEngine
from rekindle.engines.kubernetes.labels import slug
from rekindle.engines.kubernetes.manifests.settings import KubernetesSettings
from rekindle.errors import JobError
from rekindle.recovery.journal.journal import Ended, JobStarted

pytestmark = pytest.mark.timeout(300)  # a cluster, and a job in its pods

T = TypeVar("T")
SCRIPT = Path(__file__).parents[1] / "flow" / "scripts" / "steps.py"
NAMESPACE = "/api/v1/namespaces/default"
JOBS = "/apis/batch/v1/namespaces/default/jobs"
MOST_OBJECTS = 6  # a Job, two nodes and a coordinator, the root and the secret


@pytest.fixture(scope="module")
def served(
    cluster: Simulated, prefect_api: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """Serve the train flow for all tests of this file."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", str(cluster.kubeconfig))
        with serve(prefect_api, home, "pods") as running:
            yield running


def start(served: Served, gate: Path, image: str = "training", steps: int = 400) -> FlowRun:
    return served.start(
        script=str(SCRIPT),
        working_directory=str(gate.parent),
        arguments=[str(gate), str(steps), "0.2"],
        nodes=2,
        environment={"OMP_NUM_THREADS": "1"},
        kubernetes={"image": image},
    )


def holder(run: FlowRun, cluster: Simulated) -> str:
    """Return the process that steers the job, as its coordinator reports it."""
    endpoint = run.directory.endpoint()
    if endpoint is None:
        return ""
    api = load(str(cluster.kubeconfig))
    try:
        engine = KubernetesEngine(run.directory, KubernetesSettings(image="training"), api)
        return engine.client(endpoint).status().holder
    except JobError:
        return ""
    finally:
        api.close()


def objects(cluster: Simulated, run: FlowRun) -> list[str]:
    label = f"?labelSelector=rekindle.dev/job={slug(run.job_id)}"
    paths = (JOBS, *(f"{NAMESPACE}/{kind}" for kind in ("pods", "configmaps", "secrets")))
    return [e["metadata"]["name"] for path in paths for e in cluster.get(path + label)["items"]]


@dataclass
class Life:
    """The facts of one flow run, up to the point that it reached."""

    logs: str = ""
    jobs: list[int] = field(default_factory=list)  # the number of Jobs at each adoption
    begun: int = 0  # attempts before the cancellation
    cancelled: str = ""
    outcome: str = ""
    left: list[str] = field(default_factory=list)
    ended: str = ""
    attempts: int = 0
    left_in_the_end: list[str] = field(default_factory=list)
    error: Exception | None = None

    def reached(self, it: T) -> T:
        """Return a fact; raise AssertionError with the flow run's error if it is missing."""
        assert it, f"not reached: {self.error}"
        return it


@pytest.fixture(scope="module")
def life(cluster: Simulated, served: Served, tmp_path_factory: pytest.TempPathFactory) -> Life:
    """Return the facts of a run that waits for pods, is killed twice, cancelled and retried."""
    found = Life()
    try:
        live(found, cluster, served, tmp_path_factory.mktemp("life") / "gate")
    except Exception as error:
        found.error = error
    return found


def live(found: Life, cluster: Simulated, served: Served, gate: Path) -> None:
    """Run the flow run through all its events and record the facts."""
    cordon(cluster, True)
    run = start(served, gate)
    until(lambda: "Unschedulable" in run.logs() or run.state().is_final(), "it is told")
    found.logs = run.logs()
    cordon(cluster, False)
    killed: list[int] = []
    for kill in (True, True, False):
        flow = until(
            lambda: (p := served.flow_process()) and p.pid not in killed and p, "the flow runs"
        )
        until(lambda flow=flow: f"process {flow.pid} on" in holder(run, cluster), "it steers")
        found.jobs.append(len(cluster.get(JOBS)["items"]))
        if kill:
            flow.kill()
            killed.append(flow.pid)
    until(lambda: "runs, attempt 1; this flow run adopts it" in run.logs(), "its log is sent")
    found.logs, found.begun = run.logs(), run.count(JobStarted)
    run.cancel()
    found.cancelled = str(run.until_final().name)
    until(lambda: objects(cluster, run) == [], "the job's objects are gone")
    found.outcome, found.left = run.history()[-1].outcome, objects(cluster, run)
    gate.touch()
    run.retry()
    until(lambda: run.state().name == "Completed", "the next attempt has succeeded")
    found.ended, found.attempts = str(run.state().name), run.count(JobStarted)
    found.left_in_the_end = objects(cluster, run)


def cordon(cluster: Simulated, no_more: bool) -> None:
    """Make all hosts unschedulable, or schedulable."""
    for node in cluster.get("/api/v1/nodes")["items"]:
        path = f"/api/v1/nodes/{node['metadata']['name']}"
        cluster.patch(path, {"spec": {"unschedulable": no_more or None}})


def test_what_becomes_of_pods_is_told(life: Life) -> None:
    """While the job waits for its pods, the flow's log has their state."""
    assert "Unschedulable" in life.reached(life.logs)


def test_a_flow_process_that_is_killed(life: Life) -> None:
    """After each of two kills the flow's rerun adopts the job: there is one Job and one attempt."""
    assert life.reached(life.begun) == 1
    assert life.jobs == [1, 1, 1]
    assert "runs, attempt 1; this flow run adopts it" in life.logs


def test_a_cancelled_run_leaves_nothing(life: Life) -> None:
    """A cancellation stops the job and removes all its objects."""
    assert life.reached(life.cancelled) == "Cancelled"
    assert life.reached(life.outcome) == "stopped"
    assert life.left == []


def test_a_cancelled_run_is_retried(life: Life) -> None:
    """The retry of a cancelled run starts a second attempt, which succeeds and leaves no object."""
    assert life.reached(life.ended) == "Completed"
    assert (life.attempts, life.left_in_the_end) == (2, [])


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(2))
def test_a_flow_process_that_is_killed_twenty_times(
    seed: int, cluster: Simulated, served: Served, tmp_path: Path
) -> None:
    """After 20 kills at random moments the job succeeds in one attempt, and no object remains.

    The kills occur at the launch, the adoption, during the training, or before the flow starts.
    """
    gate, chance = tmp_path / "gate", random.Random(seed)
    run = start(served, gate, steps=4000)
    killed: list[int] = []
    while len(killed) < 20:
        flow = until(
            lambda: (p := served.flow_process()) and p.pid not in killed and p,
            f"the flow runs again after {len(killed)} kills",
            180.0,  # Prefect looks for scheduled runs at intervals
        )
        # Half of the kills occur during the start, which takes some seconds, half after it.
        with contextlib.suppress(psutil.TimeoutExpired):
            flow.wait(chance.uniform(0.0, 12.0))
        assert flow.is_running(), run.story()
        flow.kill()
        killed.append(flow.pid)
        assert len(cluster.get(JOBS)["items"]) <= 1
        assert len(objects(cluster, run)) <= MOST_OBJECTS
    gate.touch()
    until(lambda: run.state().name == "Completed", "the job has succeeded", 180.0)
    assert (run.count(JobStarted), run.count(Ended)) == (1, 1), run.story()
    assert objects(cluster, run) == []


def test_cancelled_while_the_image_is_fetched(
    cluster: Simulated, served: Served, tmp_path: Path
) -> None:
    """A cancellation before the coordinator's first start removes all objects.

    There is no journal yet.
    """
    run = start(served, tmp_path / "gate", image="missing")
    coordinators = f"{NAMESPACE}/pods?labelSelector=rekindle.dev/role=coordinator"
    until(lambda: "ImagePull" in str(cluster.get(coordinators)["items"]), "it waits")
    run.cancel()
    assert run.until_final().name == "Cancelled"
    until(lambda: objects(cluster, run) == [], "the job's objects are gone")


HOOK = """
import sys
from prefect.client.orchestration import get_client
from prefect.states import Cancelling
from rekindle.flows.train import train
from rekindle.tasks.hooks.cancellation import stop_job
with get_client(sync_client=True) as client:
    run = client.read_flow_run(sys.argv[1])
stop_job(train, run, Cancelling())
"""


def test_cancelled_where_the_job_is_unknown(
    cluster: Simulated, served: Served, tmp_path: Path
) -> None:
    """A cancellation works on a machine without the job's files: the cluster has all facts."""
    run = start(served, tmp_path / "gate")
    until(lambda: " on " in holder(run, cluster), "it steers")
    elsewhere = {
        names.ENV_HOME: str(tmp_path / "elsewhere"),
        "PREFECT_API_URL": str(served.client.api_url),
        "PREFECT_HOME": str(tmp_path / "elsewhere"),
    }
    command = [sys.executable, "-c", HOOK, str(run.id)]
    done = run_command(command, env={**os.environ, **elsewhere})
    assert done.returncode == 0, done.stderr
    until(lambda: run.count(Ended) == 1, "the job has ended")
    assert run.history()[-1].outcome == "stopped"
    until(lambda: objects(cluster, run) == [], "the job's objects are gone")
