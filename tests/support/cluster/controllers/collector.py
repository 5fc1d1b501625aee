"""Delete objects without an owner, and handle the dependents of an owner before its deletion."""

from __future__ import annotations

from collections.abc import Iterable

from cluster import kinds
from cluster.controllers.loop import Controller, Key
from cluster.deleting import DeleteOptions, delete
from cluster.kinds import Kind
from cluster.refusals import Object
from cluster.store import Event

_ALL: Key = ("", "")


class Collector(Controller):
    """Check all objects after each deletion."""

    kind = kinds.PODS

    def keys_of(self, event: Event) -> Iterable[Key]:
        gone = event.after is None or "deletionTimestamp" in event.after["metadata"]
        if gone or (event.before is None and event.newest["metadata"].get("ownerReferences")):
            yield _ALL

    async def run(self) -> None:
        self.enqueue(_ALL)
        await super().run()

    def sync(self, namespace: str, name: str) -> None:
        everything = [(kind, thing) for kind in self.store.kinds for thing in self.store.all(kind)]
        by_uid = {thing["metadata"]["uid"]: thing for _, thing in everything}
        dependents: dict[str, list[tuple[Kind, Object]]] = {}
        for kind, thing in everything:
            references = thing["metadata"].get("ownerReferences") or []
            for reference in references:
                dependents.setdefault(reference["uid"], []).append((kind, thing))
            if references and not any(_owns(by_uid, each, thing) for each in references):
                self._delete(kind, thing, "")
        for kind, thing in everything:
            held = thing["metadata"].get("finalizers") or []
            if "deletionTimestamp" in thing["metadata"] and held:
                self._release(kind, thing, held, dependents.get(thing["metadata"]["uid"], []))

    def _release(
        self, kind: Kind, owner: Object, held: list[str], dependents: list[tuple[Kind, Object]]
    ) -> None:
        if "orphan" in held:
            for other, thing in dependents:
                self.operations.edit(other, thing, lambda it: _disown(it, owner["metadata"]["uid"]))
            self.operations.edit(kind, owner, lambda it: _drop(it, "orphan"))
        elif "foregroundDeletion" in held:
            for other, thing in dependents:
                self._delete(other, thing, "Foreground" if other is kinds.JOBS else "Background")
            if not any(self._is_there(other, thing) for other, thing in dependents):
                self.operations.edit(kind, owner, lambda it: _drop(it, "foregroundDeletion"))

    def _delete(self, kind: Kind, thing: Object, policy: str) -> None:
        metadata = thing["metadata"]
        if "deletionTimestamp" in metadata or not self._is_there(kind, thing):
            return
        # By default, the deletion of a Job orphans its pods. The real collector never leaves
        # orphans.
        options = DeleteOptions(policy=policy or "Background", uid=metadata["uid"])
        delete(self.operations, kind, metadata.get("namespace", ""), metadata["name"], options)

    def _is_there(self, kind: Kind, thing: Object) -> bool:
        metadata = thing["metadata"]
        found = self.store.look(kind, metadata.get("namespace", ""), metadata["name"])
        return found is not None and found["metadata"]["uid"] == metadata["uid"]


def _owns(by_uid: dict[str, Object], reference: Object, thing: Object) -> bool:
    """Return whether the reference names an existing owner in the same namespace or without one."""
    owner = by_uid.get(reference["uid"])
    if owner is None or owner["metadata"]["name"] != reference["name"]:
        return False
    place = owner["metadata"].get("namespace")
    return place is None or place == thing["metadata"].get("namespace")


def _disown(thing: Object, uid: str) -> None:
    kept = [each for each in thing["metadata"]["ownerReferences"] if each["uid"] != uid]
    thing["metadata"].pop("ownerReferences")
    if kept:
        thing["metadata"]["ownerReferences"] = kept


def _drop(thing: Object, finalizer: str) -> None:
    kept = [each for each in thing["metadata"].get("finalizers") or [] if each != finalizer]
    thing["metadata"].pop("finalizers", None)
    if kept:
        thing["metadata"]["finalizers"] = kept
