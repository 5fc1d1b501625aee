"""PodGroups, which Volcano's scheduler processes. Here each PodGroup is Running immediately."""

from __future__ import annotations

import contextlib

from cluster import kinds
from cluster.controllers.loop import owner_reference
from cluster.deleting import delete
from cluster.kinds import Kind
from cluster.operations import Operations
from cluster.refusals import Object, Refused


def name_of(job: Object) -> str:
    return f"{job['metadata']['name']}-{job['metadata']['uid']}"


def ensure(operations: Operations, kind: Kind, job: Object, least: int, queue: str) -> None:
    namespace = job["metadata"]["namespace"]
    if kinds.PODGROUPS not in operations.store.kinds:
        return
    if operations.store.look(kinds.PODGROUPS, namespace, name_of(job)) is not None:
        return
    made = operations.create(
        kinds.PODGROUPS,
        namespace,
        {
            "metadata": {"name": name_of(job), "ownerReferences": [owner_reference(kind, job)]},
            "spec": {"minMember": least, "queue": queue},
        },
    )
    operations.set_status(kinds.PODGROUPS, made, phase="Running")


def remove(operations: Operations, job: Object) -> None:
    with contextlib.suppress(Refused):
        delete(operations, kinds.PODGROUPS, job["metadata"]["namespace"], name_of(job))
