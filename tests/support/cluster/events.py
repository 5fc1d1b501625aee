"""Events with which controllers report about objects."""

from __future__ import annotations

import uuid

from cluster import clock
from cluster.kinds import Kind
from cluster.refusals import Object


def make(about: Kind, thing: Object, kind: str, reason: str, message: str) -> Object:
    """Return an Event about an object. `kind` is Normal or Warning."""
    metadata = thing["metadata"]
    namespace = metadata.get("namespace", "default")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": f"{metadata['name']}.{uuid.uuid4().hex[:16]}",
            "namespace": namespace,
            "uid": str(uuid.uuid4()),
            "creationTimestamp": clock.stamp(),
        },
        "involvedObject": {
            "kind": about.kind,
            "apiVersion": about.api_version,
            "name": metadata["name"],
            "namespace": namespace,
            "uid": metadata["uid"],
        },
        "type": kind,
        "reason": reason,
        "message": message,
        "count": 1,
        "firstTimestamp": clock.stamp(),
        "lastTimestamp": clock.stamp(),
    }
