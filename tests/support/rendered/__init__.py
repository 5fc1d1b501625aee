"""Jobs to render, and what is looked for in what was rendered."""

from __future__ import annotations

from typing import Any

import msgspec

from rekindle.engines.kubernetes.manifests.kinds.base import Adapter
from rekindle.engines.kubernetes.manifests.render import Manifests, adapter, render
from rekindle.engines.kubernetes.manifests.settings import KubernetesSettings, WorkloadKind
from rekindle.job.spec import EntryKind, JobSpec

Manifest = dict[str, Any]

SECRET = "of-this-job"


def spec(**changes: Any) -> JobSpec:
    """A job of 2 nodes x 4 ranks, whose environment holds a credential."""
    said = JobSpec(
        job_id="demo",
        entry=EntryKind.SCRIPT,
        target="train.py",
        nodes=2,
        processes_per_node=4,
        environment={"API_KEY": "hush"},
        working_directory="/app",
        directory="/var/lib/rekindle/jobs/demo",
        log_directory="/var/lib/rekindle/jobs/demo/logs",
        checkpoint_store="/checkpoints",
    )
    return msgspec.structs.replace(said, **changes)


def pods(kind: str = "indexed-job", **said: Any) -> KubernetesSettings:
    """Pods as a job file says them."""
    return msgspec.convert(
        {"image": "example.com/train:1", "kind": kind} | said, KubernetesSettings
    )


def rendered(
    kind: str = "indexed-job",
    *,
    job: JobSpec | None = None,
    avoid: tuple[str, ...] = (),
    **said: Any,
) -> Manifests:
    """All objects of a job of this kind."""
    return render(job or spec(), pods(kind, **said), secret=SECRET, avoid=avoid)


def adapter_of(kind: str) -> Adapter:
    """What knows this kind."""
    return adapter(WorkloadKind(kind))


def templates(found: Manifests, kind: str) -> list[Manifest]:
    """The pod templates of a job, wherever its kind keeps them."""
    places = [
        place
        for manifest in (*found.beside, found.workload)
        if manifest["kind"] != "ConfigMap"
        for place in adapter_of(kind).templates(manifest)
    ]
    return [place["template"] for place in places]


def container(found: Manifests, kind: str) -> Manifest:
    """The container in which a node's agent runs."""
    (only,) = templates(found, kind)[0]["spec"]["containers"]
    return only


def of(found: Manifests, kind: str, name: str = "") -> Manifest:
    """The one object of this kind (and name) in API words."""
    (only,) = [
        one
        for one in found.every
        if one["kind"] == kind and (not name or one["metadata"]["name"] == name)
    ]
    return only
