"""Prefect's own Kubernetes worker, installed by deploy/: flow run and job in separate pods.

The cluster's pods are processes of this machine. The tests therefore patch in the parts that an
image or a mount would provide: kubeconfigs with the tokens of the manifests' ServiceAccounts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from cluster.launch import Simulated
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import StateType
from prefect_side import FlowRun, until
from repository import ROOT
from waiting import bound_s

from rekindle.engines.kubernetes.labels import slug

pytest.importorskip("prefect_kubernetes", reason="needs Python 3.11")
pytestmark = pytest.mark.timeout(400)

DEPLOY = ROOT / "deploy"
SPACE = "rekindle"
NAMESPACED = f"/api/v1/namespaces/{SPACE}"
JOBS = f"/apis/batch/v1/namespaces/{SPACE}/jobs"
SCRIPT = ROOT / "tests" / "integration" / "flow" / "scripts" / "steps.py"
PATHS = {
    "Namespace": "/api/v1/namespaces",
    "ServiceAccount": f"{NAMESPACED}/serviceaccounts",
    "ConfigMap": f"{NAMESPACED}/configmaps",
    "Role": f"/apis/rbac.authorization.k8s.io/v1/namespaces/{SPACE}/roles",
    "RoleBinding": f"/apis/rbac.authorization.k8s.io/v1/namespaces/{SPACE}/rolebindings",
    "NetworkPolicy": f"/apis/networking.k8s.io/v1/namespaces/{SPACE}/networkpolicies",
    "Deployment": f"/apis/apps/v1/namespaces/{SPACE}/deployments",
    "Job": JOBS,
}
RUN_ID = "prefect.io/flow-run-id"
Object = dict[str, Any]


def built(folder: str) -> list[Object]:
    """Return the objects that `kubectl kustomize` builds from a folder; images keep their names."""
    place = DEPLOY / folder
    content = yaml.safe_load((place / "kustomization.yaml").read_text())
    found: list[Object] = []
    for name in content["resources"]:
        if name.endswith(".yaml"):
            found += yaml.safe_load_all((place / name).read_text())
        else:
            found += built(str(Path(folder, name)))
    for made in content.get("configMapGenerator", ()):
        data = dict(literal.split("=", 1) for literal in made.get("literals", ()))
        data |= {name: (place / name).read_text() for name in made.get("files", ())}
        found.append({"kind": "ConfigMap", "metadata": {"name": made["name"]}, "data": data})
    return found


class Installed:
    """The manifests of deploy/ in a cluster whose flow runs belong to a Prefect server."""

    def __init__(self, cluster: Simulated, client: SyncPrefectClient, folder: Path) -> None:
        self.cluster = cluster
        self.client = client
        self.folder = folder
        api = str(client.api_url).rstrip("/")
        objects = built("prefect")
        for one in sorted(objects, key=lambda each: list(PATHS).index(each["kind"])):
            patched = self._patched(one, api)
            code, answer = cluster.call("POST", PATHS[one["kind"]], patched)
            assert code == 201, answer

    def kubeconfig(self, account: str) -> str:
        path = self.folder / f"{account}.kubeconfig"
        if not path.exists():
            token = self.cluster.token_for(account, SPACE)
            self.cluster.kubeconfig_for(token, path, SPACE)
        return str(path)

    def _patched(self, one: Object, api: str) -> Object:
        if one["kind"] == "ConfigMap" and "PREFECT_API_URL" in one["data"]:
            one["data"] |= {"PREFECT_API_URL": api, "REKINDLE_IMAGE_ROOT": str(ROOT)}
            one["data"]["PREFECT_HOME"] = str(self.folder / "prefect")
        if one["kind"] in ("Deployment", "Job"):
            [container] = one["spec"]["template"]["spec"]["containers"]
            container["workingDir"] = str(ROOT)
            if account := one["spec"]["template"]["spec"].get("serviceAccountName"):
                container["env"].append({"name": "KUBECONFIG", "value": self.kubeconfig(account)})
        return one

    def start(self, gate: Path) -> FlowRun:
        deployment = self.client.read_deployment_by_name("train/cluster")
        job = deployment.parameters["job"] | {
            "script": str(SCRIPT),
            "working_directory": str(gate.parent),
            "arguments": [str(gate), "400", "0.2"],
            "environment": {"OMP_NUM_THREADS": "1"},
        }
        env = {
            "KUBECONFIG": self.kubeconfig("rekindle-flows"),
            "REKINDLE_HOME": "/var/lib/rekindle",  # in the image; each pod has its own
        }
        run = self.client.create_flow_run_from_deployment(
            deployment.id,
            parameters={"job": job},
            job_variables={"env": (deployment.job_variables["env"] or {}) | env},
        )
        return FlowRun(self.client, self.folder, run.id, job["name"])

    def flow_pod(self, run: FlowRun) -> str:
        """Return the name of the flow run's running pod; wait until there is one."""
        path = f"{NAMESPACED}/pods?labelSelector=rekindle.dev/role=flow,{RUN_ID}={run.id}"

        def look() -> str | None:
            pods = self.cluster.get(path)["items"]
            running = [each for each in pods if each["status"].get("phase") == "Running"]
            return next((str(each["metadata"]["name"]) for each in running), None)

        return str(until(look, "the flow run has a pod"))

    def first_process(self, run: FlowRun) -> psutil.Process:
        """Return the first process of the flow run's pod."""
        for process in psutil.process_iter(["cmdline"]):
            with contextlib.suppress(psutil.Error):
                if (process.info["cmdline"] or [])[-2:] == ["flow-run", "execute"]:
                    if process.environ().get("PREFECT__FLOW_RUN_ID") == str(run.id):
                        return process
        raise AssertionError(run.story())

    def objects(self, run: FlowRun) -> list[Object]:
        """Return all objects of the run's job."""
        label = f"?labelSelector=rekindle.dev/job={slug(run.job_id)}"
        kinds = (JOBS, *(f"{NAMESPACED}/{kind}" for kind in ("pods", "configmaps", "secrets")))
        return [each for path in kinds for each in self.cluster.get(path + label)["items"]]

    def workload(self, run: FlowRun) -> str:
        """Return the uid of the run's job, or an empty string."""
        found = (each for each in self.objects(run) if each["kind"] == "Job")
        return next((str(each["metadata"]["uid"]) for each in found), "")


@pytest.fixture(scope="module")
def installed(
    cluster: Simulated, prefect_api: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Installed]:
    """Install the manifests; wait until the Job that sets up Prefect has succeeded."""
    with SyncPrefectClient(prefect_api) as client:
        found = Installed(cluster, client, tmp_path_factory.mktemp("installed"))
        cluster.until(
            JOBS, lambda jobs: jobs["rekindle-setup"].get("status", {}).get("succeeded"), 200
        )
        yield found


@pytest.mark.parametrize("loss", ["evicted", "killed"])
def test_a_flow_run_that_loses_its_pod(loss: str, installed: Installed, tmp_path: Path) -> None:
    """A flow run's next pod adopts the job without files of the first pod.

    An evicted flow run schedules itself again. The worker reports a killed one as crashed, and the
    automation schedules it again.
    """
    cluster = installed.cluster
    gate = tmp_path / "gate"
    run = installed.start(gate)
    first = installed.flow_pod(run)
    until(lambda: "finished step 1" in run.logs(), "it trains")
    uid = installed.workload(run)
    if loss == "evicted":
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": first}}
        cluster.create(f"{NAMESPACED}/pods/{first}/eviction", eviction)
    else:
        installed.first_process(run).kill()
    adopts = "attempt 1; this flow run adopts it"
    until(lambda: adopts in run.logs(), "its next pod adopts the job", bound_s(150.0))
    assert installed.flow_pod(run) != first
    assert ("Crashed" in run.states()) == (loss == "killed")
    assert installed.workload(run) == uid
    gate.touch()
    until(lambda: run.state().type == StateType.COMPLETED, "the job has succeeded")
    assert installed.objects(run) == []
