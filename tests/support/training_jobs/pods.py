"""A training job in the pods of a simulated cluster."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cluster.launch import Simulated
from waiting import wait_until

from rekindle import names
from rekindle.engines.client import JobClient
from rekindle.engines.kubernetes.client.api import load
from rekindle.engines.kubernetes.engine import KubernetesEngine
from rekindle.engines.kubernetes.labels import selector
from rekindle.engines.kubernetes.manifests.render import adapter
from rekindle.engines.kubernetes.manifests.settings import KubernetesSettings, Volume
from rekindle.errors import JobError
from rekindle.job.spec import JobDirectory
from rekindle.recovery.journal import journal
from rekindle.recovery.node_check.evidence import NodeCheckLimits
from training_jobs.injection import Fault
from training_jobs.job import LIMIT_S, Job

Object = dict[str, Any]

_OPERATORS = (
    "jobset.x-k8s.io/v1alpha2/jobsets",
    "mindxdl.gitee.com/v1/ascendjobs",
    "batch.volcano.sh/v1alpha1/jobs",
    "scheduling.volcano.sh/v1beta1/podgroups",
    "trainer.kubeflow.org/v1alpha1/trainjobs",
    "trainer.kubeflow.org/v1alpha1/trainingruntimes",
    "kubeflow.org/v1/pytorchjobs",
)
_IN_THE_POD = "/var/lib/rekindle/jobs/job"


class PodJob(Job):
    """A job whose nodes are pods. The test controls it as a flow does.

    `namespace`: the namespace of all its objects.
    `pods`: additional fields of the pods' settings.
    `kubeconfig`: the kubeconfig of an account other than the cluster's admin.
    """

    def __init__(
        self,
        folder: Path,
        cluster: Simulated,
        *faults: Fault,
        namespace: str = "default",
        nodes: int = 2,
        pods: dict[str, Any] | None = None,
        kubeconfig: Path | None = None,
        checked: NodeCheckLimits | None = None,
        **settings: Any,
    ) -> None:
        settings.setdefault("checkpoint_store", str(folder / "checkpoints"))
        super().__init__(folder, *faults, nodes=nodes, **settings)
        self.cluster = cluster
        self.namespace = namespace
        self.objects_path = f"/api/v1/namespaces/{namespace}"
        self.messages: list[str] = []
        self.spec = msgspec.structs.replace(
            self.spec,
            directory=_IN_THE_POD,
            log_directory=f"{_IN_THE_POD}/logs",
            network_check=checked is not None,
            node_check=checked or self.spec.node_check,
        )
        work = Volume(name="work", mount_path=str(folder), host_path=str(folder))
        home = str(folder / "home")
        own = {"image": "training", "namespace": namespace, "volumes": (work,), "home": home}
        self.pods = KubernetesSettings(**(own | (pods or {})))
        self.api = load(str(kubeconfig or cluster.kubeconfig))
        self._watching = contextlib.ExitStack()
        self._learned = 0

    @property
    def journal_of_ranks(self) -> None:
        """None: the coordinator writes its journal in its own pod."""
        return None

    # ---- start and end

    def start(self, **changes: object) -> PodJob:
        """Launch the job, or its next attempt."""
        self._attempt += 1
        self.spec = msgspec.structs.replace(self.spec, **changes)
        self.steer()
        self.endpoint = self.engine.launch(attempt=self._attempt)
        return self

    def steer(self, directory: Path | None = None) -> None:
        """Take control of the job, as the process of a flow does.

        `directory`: the job directory of a process that does not know the job yet.
        """
        self._watching.close()
        if directory is not None:
            self.directory = JobDirectory(directory)
        self.directory.create(self.spec, logs=False)
        self.directory.pods.write_bytes(msgspec.json.encode(self.pods))
        self.engine = KubernetesEngine(self.directory, self.pods, self.api)
        self._learned = 0
        self._watching.enter_context(self.engine.watch(self._report, self.messages.append))

    def _report(self, event: Any) -> None:
        self.engine.client(self.endpoint).report(event)

    def end(self, limit_s: float = LIMIT_S) -> journal.Ended:
        """Wait for the end of the attempt and return it."""

        def ended() -> journal.Ended | None:
            last = self.events()[-1:]
            return last[0] if last and isinstance(last[0], journal.Ended) else None

        return self.wait(ended, "the end of the attempt", limit_s)

    def look_away(self) -> dict[str, str]:
        """Stop watching, and return the output of the pods so far, by file names."""
        self._watching.close()
        folder = self.directory.path / "logs"
        return {path.name: path.read_text() for path in folder.glob("*.log")}

    def close(self) -> None:
        """Stop watching and close the client."""
        self._watching.close()
        self.api.close()

    def remove(self) -> None:
        """Remove the objects of the job, and check that none is left."""
        self.engine.release()
        assert self.objects() == []
        wait_until(lambda: not self.leftovers(), "the end of all processes")

    # ---- state

    @property
    def coordinator(self) -> PodJob:
        """Return an object with poll(), like the process of the local engine."""
        return self

    def poll(self) -> int | None:
        """Return None while the attempt runs."""
        last = self.events()[-1:]
        return 0 if last and isinstance(last[0], journal.Ended) else None

    def events(self) -> list[journal.AnyEvent]:
        """Return the events that the engine knows."""
        return self.engine.history()

    def client(self) -> JobClient:
        """Return a client of the coordinator, through the API server."""
        return self.engine.client(self.endpoint)

    def worker_pods(self) -> dict[str, Object]:
        """Return the pods of nodes and spares by name."""
        return {p["metadata"]["name"]: p for p in self._items("pods", "worker")}

    def pod_of(self, node: int) -> Object:
        """Return the current pod of a node."""
        joined = self.events_of(journal.NodeJoined, node=node)[-1]
        by_address = {p["status"].get("podIP"): p for p in self.worker_pods().values()}
        return by_address[joined.address]

    def workload(self) -> Object:
        """Return the workload: the Job, JobSet or other kind."""
        gvk = adapter(self.pods.kind).gvk
        return self.cluster.get(f"{self._path(gvk.api_version, gvk.plural)}/job")

    def _path(self, group: str, plural: str) -> str:
        return f"/apis/{group}/namespaces/{self.namespace}/{plural}"

    def coordinator_pods(self) -> list[Object]:
        """Return the pods of the coordinator."""
        return self._items("pods", "coordinator")

    def objects(self) -> list[str]:
        """Return the names of all objects of the job."""
        found = []
        for plural in ("pods", "configmaps", "secrets", "services"):
            found += self._named(f"{self.objects_path}/{plural}")
        for group in ("batch/v1", "apps/v1", "networking.k8s.io/v1"):
            plural = {"b": "jobs", "a": "deployments", "n": "networkpolicies"}[group[0]]
            found += self._named(self._path(group, plural))
        # Objects of the cluster's controllers do not have Rekindle's label, so all objects of these
        # kinds count.
        for place in _OPERATORS:
            group, _, plural = place.rpartition("/")
            items = self.cluster.get(self._path(group, plural))["items"]
            found += [f"{plural}/{each['metadata']['name']}" for each in items]
        return found

    def _named(self, path: str) -> list[str]:
        items = self.cluster.get(f"{path}?labelSelector={selector('job')}")["items"]
        return [f"{path.rpartition('/')[2]}/{each['metadata']['name']}" for each in items]

    def _items(self, plural: str, role: str) -> list[Object]:
        asked = f"labelSelector={selector('job')},rekindle.dev/role={role}"
        return list(self.cluster.get(f"{self.objects_path}/{plural}?{asked}")["items"])

    def story(self) -> str:
        """Return the history of the job and its pods, for the message of a failed test."""
        texts = [super().story(), "\n---- messages", *self.messages]
        for pod in (*self.worker_pods().values(), *self.coordinator_pods()):
            name = pod["metadata"]["name"]
            log = self.cluster.call("GET", f"{self.objects_path}/pods/{name}/log?tailLines=15")[1]
            texts += [f"\n---- {name}: {pod['status'].get('phase')}", str(log)]
        return "\n".join(texts)

    # ---- actions of a flow

    def _tend(self) -> None:
        try:
            events = self.events()
        except JobError:
            return  # the API server or the coordinator does not answer
        new, self._learned = events[self._learned :], len(events)
        for event in new:
            self.engine.learn(event)
            if isinstance(event, journal.NodeWanted) and self.replaces:
                self.engine.replace(event.node)


@contextlib.contextmanager
def new_namespace(cluster: Simulated) -> Iterator[str]:
    """Create a namespace, and remove it with its objects at the end of the context."""
    name = f"test-{secrets.token_hex(4)}"
    cluster.create("/api/v1/namespaces", {"metadata": {"name": name}})
    try:
        yield name
    finally:
        cluster.delete(f"/api/v1/namespaces/{name}")
        cluster.until("/api/v1/namespaces", lambda found: name not in found)


@contextlib.contextmanager
def pod_job(
    folder: Path, cluster: Simulated, *faults: Fault, namespace: str, **settings: Any
) -> Iterator[PodJob]:
    """Start a job in a namespace. The data about hosts is below `folder`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(names.ENV_HOME, str(folder / "machine"))
        job = PodJob(folder, cluster, *faults, namespace=namespace, **settings)
        try:
            yield job.start()
        finally:
            job.close()
