"""Deployments and their ReplicaSets. The old pods end before the new pods start."""

from __future__ import annotations

import hashlib

import msgspec

from cluster import clock, kinds
from cluster.controllers import pods
from cluster.controllers.loop import Controller, is_deleted, owner_reference
from cluster.operations import suffix
from cluster.proxying import is_ready
from cluster.refusals import Object
from cluster.store import fresh
from cluster.subresources import set_condition

_HASH = "pod-template-hash"
_FAILURE = "ReplicaFailure"


class Deployments(Controller):
    """Keep one ReplicaSet for each template."""

    kind = kinds.DEPLOYMENTS
    owned = (kinds.REPLICASETS,)

    def sync(self, namespace: str, name: str) -> None:
        deployment = self.store.get(kinds.DEPLOYMENTS, namespace, name)
        if deployment is None or is_deleted(deployment):
            return
        spec, uid = deployment["spec"], deployment["metadata"]["uid"]
        template_hash = hashlib.sha256(
            msgspec.json.encode(spec["template"], order="sorted")
        ).hexdigest()[:10]
        sets = [
            each
            for each in self.store.all(kinds.REPLICASETS, namespace)
            if any(owner["uid"] == uid for owner in each["metadata"].get("ownerReferences") or [])
        ]
        current = next(
            (s for s in sets if s["metadata"]["labels"].get(_HASH) == template_hash), None
        )
        old = [each for each in sets if each is not current]
        for each in old:
            self._scale(each, 0)
        running = (
            pod
            for each in old
            for pod in pods.owned(self.store, each["metadata"]["uid"], namespace)
            if pods.phase(pod) in ("Pending", "Running")
        )
        left = sum(1 for _ in running)
        wanted = spec["replicas"] if not left else 0
        if current is None:
            self._create(deployment, template_hash, wanted)
        else:
            self._scale(current, wanted)
        if left:
            self.again((namespace, name), 0.05)
        self._tell(deployment, current)

    def _create(self, deployment: Object, template_hash: str, replicas: int) -> None:
        metadata, spec = deployment["metadata"], deployment["spec"]
        template = fresh(spec["template"])
        template.setdefault("metadata", {}).setdefault("labels", {})[_HASH] = template_hash
        labels = template["metadata"]["labels"]
        selector = {**spec["selector"]}
        selector["matchLabels"] = {**(selector.get("matchLabels") or {}), _HASH: template_hash}
        made = {
            "metadata": {
                "name": f"{metadata['name']}-{template_hash}",
                "labels": labels,
                "ownerReferences": [owner_reference(kinds.DEPLOYMENTS, deployment)],
            },
            "spec": {"replicas": replicas, "selector": selector, "template": template},
        }
        self.operations.create(kinds.REPLICASETS, metadata["namespace"], made)

    def _scale(self, each: Object, replicas: int) -> None:
        if each["spec"]["replicas"] != replicas:
            self.operations.edit(
                kinds.REPLICASETS, each, lambda it: it["spec"].update(replicas=replicas)
            )

    def _tell(self, deployment: Object, current: Object | None) -> None:
        status = (current or {}).get("status") or {}
        ready = status.get("readyReplicas", 0)
        wanted = deployment["spec"]["replicas"]
        before = fresh((deployment.get("status") or {}).get("conditions") or [])
        kept = [each for each in before if each["type"] != _FAILURE]
        holder = {"status": {"conditions": kept + (status.get("conditions") or [])}}
        enough = ready >= wanted
        reason = "MinimumReplicasAvailable" if enough else "MinimumReplicasUnavailable"
        set_condition(holder, {"type": "Available", "status": str(enough), "reason": reason})
        reason = "NewReplicaSetAvailable" if enough else "ReplicaSetUpdated"
        set_condition(holder, {"type": "Progressing", "status": "True", "reason": reason})
        self.operations.set_status(
            kinds.DEPLOYMENTS,
            deployment,
            observedGeneration=deployment["metadata"]["generation"],
            replicas=status.get("replicas") or None,
            updatedReplicas=status.get("replicas") or None,
            readyReplicas=ready or None,
            availableReplicas=ready or None,
            unavailableReplicas=max(0, wanted - ready) or None,
            conditions=holder["status"]["conditions"],
        )


class ReplicaSets(Controller):
    """Keep as many active pods as requested, and replace pods that failed."""

    kind = kinds.REPLICASETS
    owned = (kinds.PODS,)

    def sync(self, namespace: str, name: str) -> None:
        found = self.store.get(kinds.REPLICASETS, namespace, name)
        if found is None or is_deleted(found):
            return
        spec = found["spec"]
        mine = pods.owned(self.store, found["metadata"]["uid"], namespace)
        active = sorted(
            filter(pods.is_active, mine),
            key=lambda pod: (is_ready(pod), clock.read(pod["metadata"]["creationTimestamp"])),
        )
        for pod in active[: max(0, len(active) - spec["replicas"])]:
            pods.remove(self.operations, pod)
        refused = ""
        for _ in range(spec["replicas"] - len(active)):
            pod = pods.make(kinds.REPLICASETS, found, spec["template"], f"{name}-{suffix()}")
            if refused := pods.create(self.operations, kinds.REPLICASETS, found, pod):
                self.again((namespace, name), max(0.2, self.scaled(1.0)))
                break
        mine = pods.owned(self.store, found["metadata"]["uid"], namespace)
        counted = pods.count(mine)
        self.operations.set_status(
            kinds.REPLICASETS,
            found,
            replicas=counted["active"],
            readyReplicas=counted["ready"] or None,
            availableReplicas=counted["ready"] or None,
            observedGeneration=found["metadata"]["generation"],
            conditions=[_failure(refused)] if refused else None,
        )


def _failure(message: str) -> Object:
    """Return the condition of a ReplicaSet whose pod is refused.

    Its Deployment copies the condition.
    """
    return {
        "type": _FAILURE,
        "status": "True",
        "reason": "FailedCreate",
        "message": message,
        "lastTransitionTime": clock.stamp(),
    }
