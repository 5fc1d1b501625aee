"""Create a job's objects in the cluster once, find them again, and remove them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from rekindle.engines.kubernetes import labels
from rekindle.engines.kubernetes.client.api import Api, Object
from rekindle.engines.kubernetes.client.api_errors import (
    ApiError,
    ConflictError,
    MissingObjectError,
)
from rekindle.errors import UsageError

GONE_S = 120.0  # longer than pods take to end in most jobs
_POLL_S, _LONGEST_POLL_S = 0.1, 0.5
_PLURALS = {
    "ConfigMap": "configmaps",
    "Secret": "secrets",
    "Service": "services",
    "Deployment": "deployments",
    "NetworkPolicy": "networkpolicies",
    "Job": "jobs",
    "JobSet": "jobsets",
    "AscendJob": "ascendjobs",
    "PyTorchJob": "pytorchjobs",
    "TrainJob": "trainjobs",
    "TrainingRuntime": "trainingruntimes",
}


def collection(api_version: str, plural: str, namespace: str) -> str:
    """Return the path of all objects of a kind in a namespace."""
    root = f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"
    return f"{root}/namespaces/{namespace}/{plural}"


def plural_of(obj: Object) -> str:
    """Return the plural of an object's kind, as paths and rights use it."""
    return _PLURALS[obj["kind"]]


def collection_of(obj: Object) -> str:
    """Return the path of the collection that an object belongs to."""
    return collection(obj["apiVersion"], plural_of(obj), obj["metadata"]["namespace"])


def path_of(obj: Object) -> str:
    """Return the path of an object."""
    return f"{collection_of(obj)}/{obj['metadata']['name']}"


def find(api: Api, path: str) -> Object | None:
    """Read an object; None: it does not exist, or is being deleted."""
    try:
        found = api.get(path)
    except MissingObjectError as error:
        if error.reason and error.reason != "NotFound":
            raise
        return None
    return None if found["metadata"].get("deletionTimestamp") else found


def ensure(api: Api, obj: Object) -> Object:
    """Create an object, or return the one that any process created before for the same job.

    The function waits for the end of an object that is being deleted. Raises UsageError: an object
    of another job has the name. Raises ApiError: the deletion takes longer than GONE_S.
    """
    deadline = time.monotonic() + GONE_S
    while True:
        with contextlib.suppress(ConflictError):
            return api.create(collection_of(obj), obj, fieldManager="rekindle")
        found = find(api, path_of(obj))
        if found is not None:
            _must_be_ours(found, obj)
            if _owners(obj) <= _owners(found):
                return found
            # The cluster is about to collect an object of an earlier root.
        if time.monotonic() > deadline:
            name = f"{obj['kind']} {obj['metadata']['name']}"
            raise ApiError(
                f"the cluster has not finished the deletion of {name} after {GONE_S:g} s"
            )
        time.sleep(_POLL_S)


def _owners(obj: Object) -> set[str]:
    return {each["uid"] for each in obj["metadata"].get("ownerReferences") or ()}


def _must_be_ours(found: Object, wanted: Object) -> None:
    theirs = (found["metadata"].get("labels") or {}).get(labels.JOB)
    ours = wanted["metadata"]["labels"][labels.JOB]
    if theirs != ours:
        name = (
            f"{found['kind'] if 'kind' in found else wanted['kind']} {wanted['metadata']['name']}"
        )
        raise UsageError(
            f"{name} in namespace {wanted['metadata']['namespace']} exists already and belongs "
            "to another job; give the job another name, or remove the object"
        )


def wait_gone(api: Api, path: str, *, what: str) -> None:
    """Wait until an object does not exist. Raises ApiError: it still exists after GONE_S."""
    wait_until(lambda: _is_gone(api, path), f"the removal of {what}", GONE_S)


def _is_gone(api: Api, path: str) -> bool:
    try:
        api.get(path)
    except MissingObjectError:
        return True
    return False


def wait_until(done: Callable[[], bool], what: str, limit_s: float) -> None:
    """Poll a condition, with growing pauses. Raises ApiError: it is not true within the limit."""
    deadline, pause_s = time.monotonic() + limit_s, _POLL_S
    while not done():
        if time.monotonic() > deadline:
            raise ApiError(f"Rekindle waited {limit_s:g} s without success for {what}")
        time.sleep(pause_s)
        pause_s = min(1.2 * pause_s, _LONGEST_POLL_S)
