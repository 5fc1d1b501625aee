"""Jobs whose Kubernetes objects tests render, and queries on the rendered objects."""

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
    """Return a job of 2 nodes x 4 ranks whose environment contains a credential."""
    given = JobSpec(
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
    return msgspec.structs.replace(given, **changes)


def pods(kind: str = "indexed-job", **settings: Any) -> KubernetesSettings:
    """Return the settings of pods, with the fields of a job file."""
    return msgspec.convert(
        {"image": "example.com/train:1", "kind": kind} | settings, KubernetesSettings
    )


def rendered(
    kind: str = "indexed-job",
    *,
    job: JobSpec | None = None,
    avoid: tuple[str, ...] = (),
    **settings: Any,
) -> Manifests:
    """Return all objects of a job of this kind."""
    return render(job or spec(), pods(kind, **settings), secret=SECRET, avoid=avoid)


def adapter_of(kind: str) -> Adapter:
    """Return the adapter of this kind."""
    return adapter(WorkloadKind(kind))


def templates(found: Manifests, kind: str) -> list[Manifest]:
    """Return the pod templates of a job of any kind."""
    places = [
        place
        for manifest in (*found.beside, found.workload)
        if manifest["kind"] != "ConfigMap"
        for place in adapter_of(kind).templates(manifest)
    ]
    return [place["template"] for place in places]


def container(found: Manifests, kind: str) -> Manifest:
    """Return the container in which the agent of a node runs."""
    (only,) = templates(found, kind)[0]["spec"]["containers"]
    return only


def of(found: Manifests, kind: str, name: str = "") -> Manifest:
    """Return the only object of this API kind (and name)."""
    (only,) = [
        one
        for one in found.every
        if one["kind"] == kind and (not name or one["metadata"]["name"] == name)
    ]
    return only
