"""MindCluster's data trace: what TaskD's profiling writes down while a job runs, on and off.

The device plugin puts the ConfigMap `data-trace-<job>` into a folder of each host, which the job's
pods mount; TaskD in them reads it there.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from rekindle.engines.kubernetes.api import Api, Object
from rekindle.engines.kubernetes.ascend import TRACE_FOLDER
from rekindle.engines.kubernetes.coordinator import owned
from rekindle.engines.kubernetes.errors import DamagedError
from rekindle.engines.kubernetes.labels import Names, Role, labels, selector
from rekindle.engines.kubernetes.mindcluster.documents import decode, name_of, text_of
from rekindle.engines.kubernetes.objects import collection, find, path_of
from rekindle.errors import UsageError

_PREFIX, _KEY = "data-trace-", "profilingSwitch"
_ON, _OFF = "on", "off"


class Switch(msgspec.Struct, frozen=True, kw_only=True):
    """Which times are written down. All but those of communication go together.

    communication: of collectives, which slows training down.
    """

    communication: bool = False
    step: bool = False
    save_checkpoint: bool = False
    forward: bool = False
    data_loader: bool = False

    @property
    def words(self) -> tuple[str, ...]:
        """What is on, as people write it."""
        return tuple(word for word in WORDS if getattr(self, word.replace("-", "_")))


WORDS = tuple(name.replace("_", "-") for name in Switch.__struct_fields__)
FIELDS = ("CommunicationOperator", "Step", "SaveCheckpoint", "FP", "DataLoader")  # in that order


def switch_of(words: Iterable[str]) -> Switch:
    """Return the switch that has these on; none: all are off.

    All but communication are on as soon as anything is: MindCluster knows no other way. Raises
    UsageError: a word is none of WORDS.
    """
    asked = set(words)
    if strange := sorted(asked - set(WORDS)):
        raise UsageError(f"{', '.join(strange)}: no such trace; give some of {', '.join(WORDS)}")
    others = bool(asked)
    return Switch(
        communication="communication" in asked,
        step=others,
        save_checkpoint=others,
        forward=others,
        data_loader=others,
    )


def values(switch: Switch) -> list[str]:
    """Return what MindCluster calls on and off, in the order of FIELDS."""
    return [_ON if on else _OFF for on in msgspec.structs.astuple(switch)]


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
    on = (said.get(field) == _ON for field in FIELDS)
    return Switch(**dict(zip(Switch.__struct_fields__, on, strict=True)))


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
