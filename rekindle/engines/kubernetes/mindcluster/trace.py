"""MindCluster's data trace: what TaskD's profiling writes down while a job runs, on and off.

The device plugin puts the ConfigMap `data-trace-<job>` into a folder of each host, which the job's
pods mount; TaskD in them reads it there.
"""

from __future__ import annotations

import msgspec

from rekindle.engines.kubernetes.client.api import Api, Object
from rekindle.engines.kubernetes.client.errors import DamagedError
from rekindle.engines.kubernetes.client.objects import collection, find, path_of
from rekindle.engines.kubernetes.labels import Names, Role, labels, selector
from rekindle.engines.kubernetes.manifests.ascend import TRACE_FOLDER
from rekindle.engines.kubernetes.manifests.coordinator import owned
from rekindle.engines.kubernetes.mindcluster.documents import decode, name_of, text_of
from rekindle.errors import UsageError
from rekindle.profiling.switch import FIELDS, Switch, read_switch, values

_PREFIX, _KEY = "data-trace-", "profilingSwitch"


def data_trace(job_id: str, namespace: str, switch: Switch) -> Object:
    """Return the ConfigMap that TaskD is switched by. Pure."""
    said = msgspec.json.encode(dict(zip(FIELDS, values(switch), strict=True))).decode()
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": f"{_PREFIX}{Names.of(job_id).workload}",
            "namespace": namespace,
            "labels": {"reset": "true", **labels(job_id)},
        },
        "data": {_KEY: said},
    }


def read_trace(configmap: Object) -> Switch:
    """Read it, whoever wrote it. Pure. Raises DamagedError."""
    what = f"{name_of(configmap)}: {_KEY}"
    text = text_of(configmap, _KEY)
    if text is None:
        raise DamagedError(f"{what} is missing")
    said = decode(text, dict[str, str], what)
    return read_switch(said)


def traced(api: Api, namespace: str, job_id: str) -> Switch:
    """Return what is on now. Raises ApiError, DamagedError."""
    found = find(api, path_of(data_trace(job_id, namespace, Switch())))
    return read_trace(found) if found else Switch()


def switch_trace(api: Api, namespace: str, job_id: str, switch: Switch) -> None:
    """Write the ConfigMap; it goes when the job does.

    Raises UsageError: there is no such job, or its pods do not look there; ApiError.
    """
    job, pods = Names.of(job_id), collection("v1", "pods", namespace)
    root = find(api, f"{collection('v1', 'configmaps', namespace)}/{job.root}")
    if root is None:
        raise UsageError(f"there is no job {job_id!r} in namespace {namespace}")
    workers = api.get(pods, labelSelector=selector(job_id, Role.WORKER)).get("items") or ()
    if workers and not any(map(_looks, workers)):
        raise UsageError(
            f"the pods of job {job_id} do not mount {TRACE_FOLDER}, where they would read it: "
            "describe them with ascend: {data_trace: true}"
        )
    wanted = owned(data_trace(job_id, namespace, switch), root["metadata"]["uid"])
    api.apply(path_of(wanted), wanted)


def _looks(pod: Object) -> bool:
    containers = pod["spec"]["containers"]
    mounts = [mount for one in containers for mount in one.get("volumeMounts") or ()]
    return any(mount["mountPath"].rstrip("/") == TRACE_FOLDER for mount in mounts)
