"""AscendJobs, as their operator's sources have them."""

from __future__ import annotations

from typing import Any

import pytest
from cluster.manifests import ascend_job
from cluster.spaces import Space

Object = dict[str, Any]
pytestmark = pytest.mark.simulated


@pytest.fixture
def ascend(space: Space) -> str:
    return space.path("mindxdl.gitee.com/v1", "ascendjobs")


def state(job: Object) -> str:
    """The last condition that is True."""
    conditions = (job.get("status") or {}).get("conditions") or []
    return str(next((e["type"] for e in reversed(conditions) if e["status"] == "True"), ""))


def second(space: Space) -> list[str]:
    """The pods that run for the second time, once there are any."""
    found: list[str] = space.cluster.until(
        space.pods,
        lambda found: [
            name
            for name, pod in found.items()
            if pod["metadata"]["labels"]["version"] == "1" and pod["status"]["phase"] == "Running"
        ],
    )
    return found


def test_pods_have_fixed_names_and_ranks(space: Space, ascend: str) -> None:
    """The master is the first; the state becomes Running."""
    space.cluster.create(ascend, ascend_job("train"))
    pods = space.running()
    ranks = {name: p["metadata"]["annotations"]["hccl/rankIndex"] for name, p in pods.items()}
    assert ranks == {"train-master-0": "0", "train-worker-0": "1", "train-worker-1": "2"}
    assert {pod["metadata"]["labels"]["version"] for pod in pods.values()} == {"0"}
    space.cluster.until(ascend, lambda found: state(found["train"]) == "Running")
    assert space.status(ascend, "train")["replicaStatuses"]["Worker"] == {"active": 2}


def test_a_deleted_pod_comes_again_a_version_later(space: Space, ascend: str) -> None:
    """The same name; the others keep theirs; no back-off."""
    space.cluster.create(ascend, ascend_job("train"))
    first = space.running()
    gone = first["train-worker-0"]["metadata"]["uid"]
    space.cluster.delete(f"{space.pods}/train-worker-0")
    second = space.running(besides=(gone,))
    assert second["train-worker-0"]["metadata"]["labels"]["version"] == "1"
    kept = second["train-worker-1"]["metadata"]
    assert kept["labels"]["version"] == "0"
    assert kept["uid"] == first["train-worker-1"]["metadata"]["uid"]
    space.cluster.until(ascend, lambda found: state(found["train"]) == "Running")


def test_beyond_the_limit_it_fails(space: Space, ascend: str) -> None:
    """backoffLimit 1: the second version is one too many."""
    space.cluster.create(ascend, ascend_job("train", backoffLimit=1))
    gone: tuple[str, ...] = ()
    for version in range(2):
        found = space.running(besides=gone)
        worker = found["train-worker-0"]
        assert worker["metadata"]["labels"]["version"] == str(version)
        gone += (worker["metadata"]["uid"],)
        space.cluster.delete(f"{space.pods}/train-worker-0")
    space.condition(ascend, "train", "Failed")


def test_one_failed_pod_fails_it(space: Space, ascend: str) -> None:
    """Without a retry."""
    space.cluster.create(ascend, ascend_job("train", 'test "$RANK" != 1 || exit 1; exec sleep 60'))
    found = space.condition(ascend, "train", "Succeeded", "Failed")
    assert (found["type"], found["reason"]) == ("Failed", "JobFailed")


def test_fault_retry_times_make_it_anew(space: Space, ascend: str) -> None:
    """All pods, or with pod-rescheduling the failed one alone."""
    wanted = ascend_job("train", 'test "$RANK$V" != 10 || exit 1; exec sleep 60')
    wanted["metadata"]["labels"] |= {"fault-retry-times": "2", "pod-rescheduling": "on"}
    for each in wanted["spec"]["replicaSpecs"].values():
        source = {"fieldRef": {"fieldPath": "metadata.labels['version']"}}
        container = each["template"]["spec"]["containers"][0]
        container["env"] = [{"name": "V", "valueFrom": source}]
    space.cluster.create(ascend, wanted)
    second(space)
    versions = {name: pod["metadata"]["labels"]["version"] for name, pod in space.running().items()}
    assert versions == {"train-master-0": "0", "train-worker-0": "1", "train-worker-1": "0"}
    space.cluster.until(ascend, lambda found: state(found["train"]) == "Running")


def test_exit_codes_from_128_on_are_made_anew(space: Space, ascend: str) -> None:
    """restartPolicy ExitCode."""
    wanted = ascend_job("train")
    for each in wanted["spec"]["replicaSpecs"].values():
        each["restartPolicy"] = "ExitCode"
        each["template"]["spec"]["containers"][0]["command"][2] = (
            'test "$RANK" != 2 || test -e "$HOME/../kill-$MINDX_TASK_ID" || '
            '{ touch "$HOME/../kill-$MINDX_TASK_ID"; kill -9 $$$$; }; exec sleep 60'
        )
    space.cluster.create(ascend, wanted)
    assert second(space) == ["train-worker-1"]
    space.cluster.until(ascend, lambda found: state(found["train"]) == "Running")


def test_the_master_ends_it(space: Space, ascend: str) -> None:
    """Once it has succeeded; with AllWorkers all have to."""
    space.cluster.create(ascend, ascend_job("train", 'test "$RANK" = 0 || exec sleep 60'))
    assert space.condition(ascend, "train", "Succeeded", "Failed")["type"] == "Succeeded"


def test_what_the_operator_refuses(space: Space, ascend: str) -> None:
    """There is no webhook: the reason is in a condition and in an event."""
    wanted = ascend_job("train")
    wanted["metadata"]["labels"] = {}
    space.cluster.create(ascend, wanted)
    found = space.cluster.until(
        ascend, lambda found: (found["train"].get("status") or {}).get("conditions")
    )
    assert found[0]["reason"] == "JobValidFailed"
    assert space.cluster.get(space.pods)["items"] == []


def test_a_changed_spec_is_that_of_new_pods(space: Space, ascend: str) -> None:
    """An affinity patch and a deleted pod: it goes elsewhere."""
    space.cluster.create(ascend, ascend_job("train"))
    first = space.running()
    taken = first["train-worker-0"]["spec"]["nodeName"]
    expression = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": [taken]}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    place = "/spec/replicaSpecs/Worker/template/spec/affinity"
    patch = [{"op": "add", "path": place, "value": affinity}]
    space.cluster.patch(f"{ascend}/train", patch)
    space.cluster.delete(f"{space.pods}/train-worker-0")
    gone = (first["train-worker-0"]["metadata"]["uid"],)
    second = space.running(besides=gone)
    assert second["train-worker-0"]["spec"]["nodeName"] != taken


def test_the_pod_group_goes_with_the_end(space: Space, ascend: str) -> None:
    """<name>-<uid>."""
    made = space.cluster.create(ascend, ascend_job("train", "sleep 1"))
    groups = space.path("scheduling.volcano.sh/v1beta1", "podgroups")
    name = f"train-{made['metadata']['uid']}"
    space.cluster.until(groups, lambda found: name in found)
    space.condition(ascend, "train", "Succeeded")
    space.cluster.until(groups, lambda found: name not in found)
