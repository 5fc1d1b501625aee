"""TrainJobs and PyTorchJobs."""

from __future__ import annotations

from typing import Any

import pytest
from cluster.manifests import pytorch_job, train_job, training_runtime
from cluster.spaces import Space, uids

Object = dict[str, Any]
_TRAINER = "trainer.kubeflow.org/v1alpha1"


@pytest.fixture
def trainjobs(space: Space) -> str:
    if not space.has(_TRAINER):
        pytest.skip("this cluster has no TrainJobs")
    return space.path(_TRAINER, "trainjobs")


@pytest.fixture
def torchjobs(space: Space) -> str:
    return space.path("kubeflow.org/v1", "pytorchjobs")


def state(job: Object) -> str:
    conditions = (job.get("status") or {}).get("conditions") or []
    return str(next((e["type"] for e in reversed(conditions) if e["status"] == "True"), ""))


def runtime(space: Space, *arguments: Any, **spec: Any) -> None:
    made = training_runtime("torch", *arguments, **spec)
    space.cluster.create(space.path(_TRAINER, "trainingruntimes"), made)


def test_a_trainjob_is_a_jobset(space: Space, trainjobs: str) -> None:
    """Of its name, with the nodes and the command of the trainer, and torchrun's variables."""
    runtime(space)
    script = (
        'test "$PET_NNODES$PET_NODE_RANK" = 3$JOB_COMPLETION_INDEX && test -n "$PET_MASTER_PORT"'
    )
    trainer = {"numNodes": 3, "command": ["sh", "-c", script]}
    space.cluster.create(trainjobs, train_job("train", "torch", trainer=trainer))
    assert space.condition(trainjobs, "train", "Complete", "Failed")["type"] == "Complete"
    sets = space.path("jobset.x-k8s.io/v1alpha2", "jobsets")
    owner = space.cluster.get(f"{sets}/train")["metadata"]["ownerReferences"][0]
    assert (owner["kind"], owner["name"]) == ("TrainJob", "train")
    assert space.status(trainjobs, "train")["jobsStatus"][0]["succeeded"] == 1


def test_its_failure_policy_is_that_of_the_runtime(space: Space, trainjobs: str) -> None:
    """One restart, then Failed."""
    runtime(space, "exit 1", failurePolicy={"maxRestarts": 1})
    space.cluster.create(trainjobs, train_job("train", "torch"))
    assert space.condition(trainjobs, "train", "Complete", "Failed")["type"] == "Failed"
    sets = space.path("jobset.x-k8s.io/v1alpha2", "jobsets")
    assert space.status(sets, "train")["restarts"] == 1


def test_without_a_runtime_it_fails(space: Space, trainjobs: str) -> None:
    """TrainingRuntimeNotSupported."""
    space.cluster.create(trainjobs, train_job("train", "none"))
    found = space.condition(trainjobs, "train", "Failed")
    assert found["reason"] == "TrainingRuntimeNotSupported"


def test_a_suspended_trainjob_takes_patches(space: Space, trainjobs: str) -> None:
    """Of its runtime; a running one does not."""
    runtime(space)
    space.cluster.create(trainjobs, train_job("train", "torch"))
    first = space.running(2)
    path = f"{trainjobs}/train"
    selector = {"kubernetes.io/os": "linux"}
    pod = {"template": {"spec": {"template": {"spec": {"nodeSelector": selector}}}}}
    jobs = {"replicatedJobs": [{"name": "node", **pod}]}
    patch = {"manager": "test", "trainingRuntimeSpec": {"template": {"spec": jobs}}}
    body = {"spec": {"runtimePatches": [patch]}}
    assert space.cluster.call("PATCH", path, body, "application/merge-patch+json")[0] == 422
    space.cluster.patch(path, {"spec": {"suspend": True}})
    space.condition(trainjobs, "train", "Suspended")
    space.cluster.until(space.pods, lambda found: not found)
    space.cluster.patch(path, body)
    space.cluster.patch(path, {"spec": {"suspend": False}})
    second = space.running(2, besides=uids(first))
    assert all(pod["spec"]["nodeSelector"] == selector for pod in second.values())


@pytest.mark.simulated
def test_pytorchjobs_have_a_master(space: Space, torchjobs: str) -> None:
    """Whose success is theirs."""
    script = 'test "$RANK" = 0 && sleep 1 || exec sleep 60'
    space.cluster.create(torchjobs, pytorch_job("train", script))
    pods = space.running()
    assert set(pods) == {"train-master-0", "train-worker-0", "train-worker-1"}
    labels = pods["train-worker-1"]["metadata"]["labels"]
    assert labels["training.kubeflow.org/job-name"] == "train"
    assert labels["training.kubeflow.org/replica-type"] == "worker"
    assert labels["training.kubeflow.org/replica-index"] == "1"
    assert space.condition(torchjobs, "train", "Succeeded", "Failed")["type"] == "Succeeded"


@pytest.mark.simulated
def test_pytorchjobs_and_exit_codes(space: Space, torchjobs: str) -> None:
    """Below 128 is final, from there on the pod is made anew."""
    space.cluster.create(torchjobs, pytorch_job("train", "sleep 1; exit 3", "ExitCode"))
    assert space.condition(torchjobs, "train", "Succeeded", "Failed")["type"] == "Failed"
    script = 'test "$RANK" != 1 || test -e "$HOME/../n" || { touch "$HOME/../n"; kill -9 $$$$; }'
    space.cluster.create(torchjobs, pytorch_job("other", f"{script}; exec sleep 60", "ExitCode"))
    space.cluster.until(torchjobs, lambda found: state(found["other"]) == "Restarting")
    space.cluster.until(torchjobs, lambda found: state(found["other"]) == "Running")


@pytest.mark.simulated
def test_a_deleted_pod_of_a_pytorchjob_comes_again(space: Space, torchjobs: str) -> None:
    """Under its name, at once."""
    space.cluster.create(torchjobs, pytorch_job("train"))
    first = space.running()
    space.cluster.delete(f"{space.pods}/train-worker-0")
    second = space.running(besides=(first["train-worker-0"]["metadata"]["uid"],))
    assert set(second) == set(first)
