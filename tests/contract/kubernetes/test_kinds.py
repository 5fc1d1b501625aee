"""Test the behaviour of each kind of workload on which the engine relies, in one table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from cluster import manifests
from cluster.spaces import Space, uids

Object = dict[str, Any]
_MERGE = "application/merge-patch+json"
_SELECTOR = {"kubernetes.io/os": "linux"}
_FAILS = 'test "$(hostname)" = none || exit 1'


def _conditions(job: Object) -> str:
    """Return the type of the last condition that is true."""
    found = (job.get("status") or {}).get("conditions") or []
    return str(next((each["type"] for each in reversed(found) if each["status"] == "True"), ""))


def _phase(job: Object) -> str:
    """Return the phase of a Volcano Job."""
    return str(((job.get("status") or {}).get("state") or {}).get("phase", ""))


@dataclass(frozen=True)
class Kind:
    """One row of the table.

    `names`: the names of the job's three pods, without generated suffixes.
    `selects`: the label that selects its pods.
    `suspends`: the path of the field in its spec that suspends it.
    `fixed`: the path in its spec to the pod spec, if the server refuses changes of the pod spec.
    `follows`: the path in its spec to the pod spec, if new pods use a changed pod spec.
    """

    name: str
    group: str
    plural: str
    make: Callable[..., Object]
    names: frozenset[str]
    selects: str
    state: Callable[[Object], str] = _conditions
    succeeded: str = "Succeeded"
    failed: str = "Failed"
    suspends: tuple[str, ...] = ()
    fixed: tuple[Any, ...] = ()
    follows: tuple[Any, ...] = ()
    measured: bool = False  # whether the row also holds in a real cluster

    def __str__(self) -> str:
        return self.name


def _limit(script: str) -> int:
    """Return the backoffLimit of a Job with this script: 0 if the script must fail."""
    return 0 if script == _FAILS else 6


def _jobset(name: str, script: str = "exec sleep 60") -> Object:
    made = manifests.jobset(name, script)
    (inside,) = made["spec"]["replicatedJobs"]
    inside["replicas"], inside["template"]["spec"] = 1, _job("x", script)["spec"]
    return made


def _train_job(name: str, script: str = "exec sleep 60") -> Object:
    trainer = {"numNodes": 3, "command": ["sh", "-c", script]}
    return manifests.train_job(name, "torch", trainer=trainer)


def _job(name: str, script: str = "exec sleep 60") -> Object:
    return manifests.job(name, script, backoffLimit=_limit(script))


def _names(pattern: str) -> frozenset[str]:
    return frozenset(pattern.format(number) for number in range(3))


_REPLICAS = frozenset({"train-master-0", "train-worker-0", "train-worker-1"})
_JOBSET_POD = ("replicatedJobs", 0, "template", "spec", "template", "spec")
KINDS = (
    Kind(
        "job",
        "batch/v1",
        "jobs",
        _job,
        _names("train-{}-"),
        "batch.kubernetes.io/job-name",
        succeeded="Complete",
        suspends=("suspend",),
        fixed=("template", "spec"),
        measured=True,
    ),
    Kind(
        "jobset",
        "jobset.x-k8s.io/v1alpha2",
        "jobsets",
        _jobset,
        _names("train-w-0-{}-"),
        "jobset.sigs.k8s.io/jobset-name",
        succeeded="Completed",
        suspends=("suspend",),
        fixed=_JOBSET_POD,
        measured=True,
    ),
    Kind(
        "ascendjob",
        "mindxdl.gitee.com/v1",
        "ascendjobs",
        manifests.ascend_job,
        _REPLICAS,
        "job-name",
        follows=("replicaSpecs", "Worker", "template", "spec"),
    ),
    Kind(
        "volcano",
        "batch.volcano.sh/v1alpha1",
        "jobs",
        manifests.volcano_job,
        _names("train-w-{}"),
        "volcano.sh/job-name",
        state=_phase,
        succeeded="Completed",
        fixed=("tasks", 0, "template", "spec"),
    ),
    Kind(
        "trainjob",
        "trainer.kubeflow.org/v1alpha1",
        "trainjobs",
        _train_job,
        _names("train-node-0-{}-"),
        "jobset.sigs.k8s.io/jobset-name",
        succeeded="Complete",
        suspends=("suspend",),
        measured=True,
    ),
    Kind(
        "pytorchjob",
        "kubeflow.org/v1",
        "pytorchjobs",
        manifests.pytorch_job,
        _REPLICAS,
        "training.kubeflow.org/job-name",
        suspends=("runPolicy", "suspend"),
        follows=("pytorchReplicaSpecs", "Worker", "template", "spec"),
    ),
)


class Made:
    """A job of one kind in a namespace."""

    def __init__(self, space: Space, kind: Kind, script: str) -> None:
        self.space = space
        self.kind = kind
        self.path = space.path(kind.group, kind.plural)
        if kind.name == "trainjob":
            runtimes = space.path(kind.group, "trainingruntimes")
            runtime = manifests.training_runtime("torch")
            (inside,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
            inside["template"]["spec"]["backoffLimit"] = _limit(script)
            space.cluster.create(runtimes, runtime)
        made = kind.make("train", script)
        self.uid = space.cluster.create(self.path, made)["metadata"]["uid"]

    def reaches(self, *states: str) -> str:
        """Return the first of these states that the job reaches."""

        def holds(found: dict[str, Object]) -> str:
            state = self.kind.state(found["train"])
            return state if state in states else ""

        return str(self.space.cluster.until(self.path, holds))

    def suspend(self, suspended: bool) -> None:
        """Suspend or resume the job."""
        body: Any = suspended
        for name in reversed(self.kind.suspends):
            body = {name: body}
        self.space.cluster.patch(f"{self.path}/train", {"spec": body})

    def changed(self, place: tuple[Any, ...], **fields: object) -> tuple[int, Any]:
        """Change fields of a pod spec and return the status code and the answer.

        The patch contains complete lists of the job's spec.
        """
        spec = self.space.cluster.get(f"{self.path}/train")["spec"]
        inside: Any = spec
        for part in place:
            inside = inside[part]
        inside |= fields
        body = {"spec": {place[0]: spec[place[0]]}}
        return self.space.cluster.call("PATCH", f"{self.path}/train", body, _MERGE)


@pytest.fixture
def make(space: Space) -> Callable[..., Made]:
    """Return a function that creates the job `train` of a kind."""

    def made(kind: Kind, script: str = "exec sleep 60") -> Made:
        if not space.has(kind.group) or not (kind.measured or space.cluster.simulated):
            pytest.skip(f"this cluster has no {kind}")
        return Made(space, kind, script)

    return made


def kinds(*, of: str = "") -> pytest.MarkDecorator:
    """Parametrize a test with all kinds, or with the kinds that have the field `of`."""
    return pytest.mark.parametrize("kind", [k for k in KINDS if not of or getattr(k, of)], ids=str)


@kinds()
def test_its_pods(kind: Kind, make: Callable[..., Made], space: Space) -> None:
    """The pods of a job have the expected names, the label that selects them, and an owner."""
    make(kind)
    pods = space.running()
    for name, pod in pods.items():
        assert any(name.startswith(each) for each in kind.names), name
        assert pod["metadata"]["labels"][kind.selects] == "train"
        assert pod["metadata"]["ownerReferences"]


@kinds()
def test_a_deleted_pod_alone_comes_again(
    kind: Kind, make: Callable[..., Made], space: Space
) -> None:
    """If one pod is deleted, the job replaces it, keeps the other pods, and does not end."""
    made = make(kind)
    first = space.running()
    doomed = max(first)
    space.cluster.delete(f"{space.pods}/{doomed}")
    second = space.running(besides=(first[doomed]["metadata"]["uid"],))
    kept = set(uids(first)) & set(uids(second))
    assert len(kept) == 2
    state = kind.state(space.cluster.get(f"{made.path}/train"))
    assert state not in (kind.succeeded, kind.failed)


@kinds()
def test_it_succeeds(kind: Kind, make: Callable[..., Made]) -> None:
    """A job succeeds once all its pods have succeeded."""
    assert make(kind, "sleep 0.5").reaches(kind.succeeded, kind.failed) == kind.succeeded


@kinds()
def test_it_fails(kind: Kind, make: Callable[..., Made]) -> None:
    """A job fails if its pods fail and its limit of restarts is zero."""
    assert make(kind, _FAILS).reaches(kind.succeeded, kind.failed) == kind.failed


@kinds(of="suspends")
def test_suspended_and_resumed(kind: Kind, make: Callable[..., Made], space: Space) -> None:
    """A suspended job has no pods. The resumed job has new pods and the same uid."""
    made = make(kind)
    first = space.running()
    made.suspend(True)
    made.reaches("Suspended")
    space.cluster.until(space.pods, lambda found: not found)
    made.suspend(False)
    space.running(besides=uids(first))
    assert space.cluster.get(f"{made.path}/train")["metadata"]["uid"] == made.uid


@kinds(of="fixed")
def test_what_cannot_be_changed(kind: Kind, make: Callable[..., Made], space: Space) -> None:
    """The server refuses with 422 a change of the pod template of a running job."""
    made = make(kind)
    space.running()
    code, answer = made.changed(kind.fixed, nodeSelector=_SELECTOR)
    assert (code, answer["reason"]) == (422, "Invalid")


@kinds(of="follows")
def test_a_changed_spec_is_that_of_new_pods(
    kind: Kind, make: Callable[..., Made], space: Space
) -> None:
    """New pods use the changed pod spec: a changed affinity moves a deleted pod to another node."""
    made = make(kind)
    first = space.running()
    taken = first["train-worker-0"]["spec"]["nodeName"]
    expression = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": [taken]}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    assert made.changed(kind.follows, affinity=affinity)[0] == 200
    space.cluster.delete(f"{space.pods}/train-worker-0")
    second = space.running(besides=(first["train-worker-0"]["metadata"]["uid"],))
    assert second["train-worker-0"]["spec"]["nodeName"] != taken


@kinds()
def test_deleted_it_takes_all_with_it(kind: Kind, make: Callable[..., Made], space: Space) -> None:
    """With the Background policy, the server deletes the job, its pods and all objects between."""
    made = make(kind)
    space.running()
    space.cluster.delete(f"{made.path}/train", propagationPolicy="Background")
    space.cluster.until(made.path, lambda found: not found)
    space.cluster.until(space.pods, lambda found: not found)
    for group, plural in (("batch/v1", "jobs"), ("jobset.x-k8s.io/v1alpha2", "jobsets")):
        if space.has(group):
            space.cluster.until(space.path(group, plural), lambda found: not found)


# ---- behaviour of single kinds

ASCENDJOB = next(kind for kind in KINDS if kind.name == "ascendjob")
TRAINJOB = next(kind for kind in KINDS if kind.name == "trainjob")


@pytest.mark.simulated
def test_an_ascendjob_has_ranks_and_a_pod_group(make: Callable[..., Made], space: Space) -> None:
    """An AscendJob gives its leader rank 0 and has a PodGroup, which is deleted with the job.

    A replaced pod has a version that is higher by one.
    """
    made = make(ASCENDJOB)
    groups = space.path("scheduling.volcano.sh/v1beta1", "podgroups")
    space.cluster.until(groups, lambda found: f"train-{made.uid}" in found)
    first = space.running()
    ranks = {name: p["metadata"]["annotations"]["hccl/rankIndex"] for name, p in first.items()}
    assert ranks == {"train-master-0": "0", "train-worker-0": "1", "train-worker-1": "2"}
    space.cluster.delete(f"{space.pods}/train-worker-0")
    second = space.running(besides=(first["train-worker-0"]["metadata"]["uid"],))
    versions = {name: pod["metadata"]["labels"]["version"] for name, pod in second.items()}
    assert versions == {"train-master-0": "0", "train-worker-0": "1", "train-worker-1": "0"}
    space.cluster.delete(f"{made.path}/train")
    space.cluster.until(groups, lambda found: not found)


@pytest.mark.simulated
def test_an_ascendjob_has_a_limit(space: Space) -> None:
    """With a backoffLimit of 1, the second replacement of a pod fails the AscendJob."""
    path = space.path(ASCENDJOB.group, ASCENDJOB.plural)
    space.cluster.create(path, manifests.ascend_job("train", backoffLimit=1))
    gone: tuple[str, ...] = ()
    for _ in range(2):
        found = space.running(besides=gone)
        gone += (found["train-worker-0"]["metadata"]["uid"],)
        space.cluster.delete(f"{space.pods}/train-worker-0")
    space.condition(path, "train", "Failed")


@pytest.mark.simulated
def test_what_the_ascend_operator_refuses(space: Space) -> None:
    """The operator reports an invalid AscendJob in a condition, and creates no pod.

    The Ascend operator has no webhook that could refuse the object.
    """
    path = space.path(ASCENDJOB.group, ASCENDJOB.plural)
    wanted = manifests.ascend_job("train")
    wanted["metadata"]["labels"] = {}
    space.cluster.create(path, wanted)
    found = space.cluster.until(
        path, lambda found: (found["train"].get("status") or {}).get("conditions")
    )
    assert found[0]["reason"] == "JobValidFailed"
    assert space.cluster.get(space.pods)["items"] == []


def test_a_trainjob_without_a_runtime_fails(space: Space) -> None:
    """A TrainJob without a runtime fails with the reason TrainingRuntimeNotSupported."""
    if not space.has(TRAINJOB.group):
        pytest.skip("this cluster has no TrainJobs")
    path = space.path(TRAINJOB.group, TRAINJOB.plural)
    space.cluster.create(path, manifests.train_job("train", "none"))
    assert space.condition(path, "train", "Failed")["reason"] == "TrainingRuntimeNotSupported"
