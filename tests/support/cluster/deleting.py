"""Deletion: preconditions, grace periods of pods, and the propagation to dependents."""

from __future__ import annotations

from typing import Any

import msgspec

from cluster import kinds, refusals
from cluster.kinds import Kind
from cluster.operations import Operations, ends
from cluster.refusals import Object
from cluster.store import fresh

_HOLDERS = {"Orphan": "orphan", "Foreground": "foregroundDeletion"}


class DeleteOptions(msgspec.Struct, frozen=True):
    """The options of a deletion, from its body or its query."""

    grace: int | None = None
    policy: str = ""
    uid: str = ""
    version: str = ""
    dry_run: bool = False

    @classmethod
    def read(cls, body: Object, query: Any) -> DeleteOptions:
        """Return the options in the body, or, without a body, the options in the query."""
        if body:
            conditions = body.get("preconditions") or {}
            return cls(
                grace=body.get("gracePeriodSeconds"),
                policy=_policy(body.get("propagationPolicy"), body.get("orphanDependents")),
                uid=conditions.get("uid") or "",
                version=conditions.get("resourceVersion") or "",
                dry_run=bool(body.get("dryRun")),
            )
        grace, orphan = query.get("gracePeriodSeconds"), query.get("orphanDependents")
        return cls(
            grace=None if grace is None else int(grace),
            policy=_policy(
                query.get("propagationPolicy"), None if orphan is None else orphan == "true"
            ),
            dry_run="dryRun" in query,
        )


BACKGROUND = DeleteOptions(policy="Background")


def delete(
    operations: Operations,
    kind: Kind,
    namespace: str,
    name: str,
    options: DeleteOptions = BACKGROUND,
) -> Object:
    """Delete an object.

    Return the object while a finalizer or grace period holds it, otherwise a success status. Return
    the last state of a pod.

    Raises Refused: the object is missing (404), or a precondition fails (409).
    """
    thing = operations.get(kind, namespace, name)
    metadata = thing["metadata"]
    if options.uid and options.uid != metadata["uid"]:
        raise refusals.conflict(
            kind,
            name,
            f"the UID in the precondition ({options.uid}) does not match the UID in record"
            f" ({metadata['uid']}). The object might have been deleted and then recreated",
        )
    if options.version and options.version != metadata["resourceVersion"]:
        raise refusals.conflict(
            kind,
            name,
            f"the ResourceVersion in the precondition ({options.version}) does not match the"
            f" ResourceVersion in record ({metadata['resourceVersion']}). The object might have"
            " been modified",
        )
    if options.dry_run:
        return _done(kind, thing)
    before = fresh(thing)
    _hold(kind, metadata, options.policy)
    if kind is kinds.PODS:
        _grace(thing, options.grace)
    elif kind is kinds.NAMESPACES:
        thing["status"] = {"phase": "Terminating"}
        metadata.setdefault("deletionTimestamp", ends(0))
    else:
        metadata.setdefault("deletionTimestamp", ends(0))
        metadata.setdefault("deletionGracePeriodSeconds", 0)
    held = metadata.get("finalizers") or metadata.get("deletionGracePeriodSeconds")
    if kind is kinds.NAMESPACES:
        held = held or thing["spec"].get("finalizers")
    if held:
        if thing == before:
            return thing
        if kind.counts_generations and "deletionTimestamp" not in before["metadata"]:
            metadata["generation"] = metadata.get("generation", 0) + 1
        return operations.store.put(kind, thing)
    last = operations.store.remove(kind, namespace, name)
    assert last is not None
    return last if kind is kinds.PODS else _done(kind, thing)


def _hold(kind: Kind, metadata: Object, policy: str) -> None:
    """Set the finalizers that make the collector process the dependents first."""
    if not policy:
        policy = "Orphan" if kind is kinds.JOBS else "Background"
        finalizers = metadata.get("finalizers") or []
        if any(each in finalizers for each in _HOLDERS.values()):
            return
    finalizers = [
        each for each in metadata.get("finalizers") or [] if each not in _HOLDERS.values()
    ]
    if policy in _HOLDERS:
        finalizers.append(_HOLDERS[policy])
    if finalizers:
        metadata["finalizers"] = finalizers
    else:
        metadata.pop("finalizers", None)


def _grace(pod: Object, asked: int | None) -> None:
    metadata, spec = pod["metadata"], pod["spec"]
    grace = spec.get("terminationGracePeriodSeconds", 30) if asked is None else asked
    idle = not spec.get("nodeName") or pod["status"].get("phase") in ("Succeeded", "Failed")
    if idle:
        grace = 0
    if "deletionTimestamp" in metadata:
        if grace >= metadata.get("deletionGracePeriodSeconds", 0):
            return
    metadata["deletionTimestamp"] = ends(grace)
    metadata["deletionGracePeriodSeconds"] = max(0, grace)


def _done(kind: Kind, thing: Object) -> Object:
    details = {"name": thing["metadata"]["name"], "kind": kind.plural}
    if kind.group:
        details["group"] = kind.group
    details["uid"] = thing["metadata"]["uid"]
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Success",
        "details": details,
    }


def _policy(policy: str | None, orphan: bool | None) -> str:
    if policy is None:
        return "" if orphan is None else "Orphan" if orphan else "Background"
    if policy not in ("Orphan", "Background", "Foreground"):
        raise refusals.bad_request(
            f'invalid DeleteOptions: propagationPolicy: Unsupported value: "{policy}"'
        )
    return policy
