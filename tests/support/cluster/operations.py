"""The operations on objects, for requests and for controllers."""

from __future__ import annotations

import datetime
import random
import uuid
from collections.abc import Callable
from typing import Any

import msgspec

from cluster import (
    admission,
    clock,
    defaults,
    events,
    kinds,
    patches,
    refusals,
    schema,
    validation,
)
from cluster.kinds import Kind
from cluster.refusals import Object
from cluster.store import Store, fresh

_ALPHABET = "bcdfghjklmnpqrstvwxz2456789"
_SYSTEM = (
    "uid",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "generateName",
    "managedFields",
)


class Options(msgspec.Struct, frozen=True):
    """The options of a request. Controllers use the defaults."""

    dry_run: bool = False
    manager: str = ""  # the field manager of an apply
    strict: bool = False
    subresource: str = ""


PLAIN = Options()


def suffix() -> str:
    """Return the random end of a generated name."""
    return "".join(random.choices(_ALPHABET, k=5))


class Operations:
    """Create, change and delete objects in a store, or refuse to."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def get(self, kind: Kind, namespace: str, name: str) -> Object:
        found = self.store.get(kind, namespace, name)
        if found is None:
            raise refusals.not_found(kind, name)
        return found

    def create(
        self, kind: Kind, namespace: str, wanted: Object, options: Options = PLAIN
    ) -> Object:
        thing = fresh(wanted)
        self._check_place(kind, namespace, thing)
        admission.check_namespace(self.store, kind, thing)
        if options.strict:
            schema.check(kind, thing)
        metadata = thing["metadata"]
        if not metadata.get("name") and metadata.get("generateName"):
            metadata["name"] = metadata["generateName"] + suffix()
        validation.name_of(kind, metadata)
        name = metadata["name"]
        if self.store.look(kind, namespace, name) is not None:
            raise refusals.exists(kind, name)
        if metadata.get("resourceVersion"):
            raise refusals.bad_request("resourceVersion should not be set on objects to be created")
        for field in ("uid", "deletionTimestamp", "deletionGracePeriodSeconds", "selfLink"):
            metadata.pop(field, None)
        metadata["uid"] = str(uuid.uuid4())
        metadata["creationTimestamp"] = clock.stamp()
        if kind.counts_generations:
            metadata["generation"] = 1
        if kind.has_status and kind is not kinds.NODES:
            thing.pop("status", None)
        defaults.fill(kind, thing)
        validation.created(kind, thing)
        if kind is kinds.PODS:
            admission.check(self.store, thing)
        return thing if options.dry_run else self.store.put(kind, thing)

    def replace(
        self, kind: Kind, namespace: str, wanted: Object, options: Options = PLAIN
    ) -> Object:
        """Replace an object (PUT).

        Raises Refused: the object is missing, invalid, or has another version.
        """
        thing = fresh(wanted)
        self._check_place(kind, namespace, thing)
        if options.strict:
            schema.check(kind, thing)
        name = thing["metadata"].get("name", "")
        before = self.get(kind, namespace, name)
        uid, version = (thing["metadata"].get(field) for field in ("uid", "resourceVersion"))
        now = before["metadata"]
        if not version and (kind.custom or kind is kinds.LEASES):
            cause = ("metadata.resourceVersion", "Invalid", "0: must be specified for an update")
            raise refusals.invalid(kind, name, cause)
        if uid and uid != now["uid"]:
            why = (
                f"Precondition failed: UID in precondition: {uid}, UID in object meta: {now['uid']}"
            )
            raise refusals.conflict(kind, name, why)
        return self._write(kind, before, thing, options)

    def change(
        self,
        kind: Kind,
        namespace: str,
        name: str,
        how: Callable[[Object], Object],
        options: Options = PLAIN,
    ) -> Object:
        """Apply `how` to the current object and write the result (PATCH).

        Raises Refused: the object is missing, or the result is invalid.
        """
        before = self.get(kind, namespace, name)
        after = how(fresh(before))
        if not isinstance(after, dict) or not isinstance(after.get("metadata"), dict):
            raise refusals.bad_request("a patch must leave an object")
        if options.strict:
            schema.check(kind, after)
        for field in ("name", "namespace", "uid"):
            old, new = before["metadata"].get(field), after["metadata"].get(field)
            if old != new:
                cause = (f"metadata.{field}", "Invalid", f'"{new}": field is immutable')
                raise refusals.invalid(kind, name, cause)
        return self._write(kind, before, after, options)

    def apply(
        self, kind: Kind, namespace: str, name: str, wanted: Object, options: Options
    ) -> Object:
        """Create or change an object with server-side apply.

        Raises Refused: the field manager is missing, or the version or the uid differs.
        """
        if not options.manager:
            raise refusals.bad_request(
                "PatchOptions.meta.k8s.io is invalid: fieldManager: Required"
            )
        wanted = fresh(wanted)
        wanted.setdefault("metadata", {}).setdefault("name", name)
        self._check_place(kind, namespace, wanted)
        if options.strict:
            schema.check(kind, wanted)
        live = self.store.get(kind, namespace, name)
        expected = wanted["metadata"].get("resourceVersion")
        if live and expected and expected != live["metadata"]["resourceVersion"]:
            raise refusals.conflict(kind, name)
        if live is None and wanted["metadata"].get("uid"):
            why = "uid mismatch: the provided object specified uid"
            raise refusals.conflict(
                kind, name, f"{why} {wanted['metadata']['uid']}, and no existing object was found"
            )
        managed = [each for each in _managed(live) if each["manager"] != options.manager]
        own = [each for each in _managed(live) if each["manager"] == options.manager]
        last = own[0]["fieldsV1"] if own else {}
        managed.append({"manager": options.manager, "operation": "Apply", "fieldsV1": wanted})
        if live is None:
            wanted = fresh(wanted)
            wanted["metadata"]["managedFields"] = managed
            return self.create(kind, namespace, wanted, options)
        return self._write(kind, live, patches.apply(live, last, wanted), options, managed)

    def set_status(self, kind: Kind, thing: Object, **status: Any) -> Object | None:
        """Merge fields into the status of an object, for a controller.

        Return the object, or None if it is gone. A field with the value None is removed.
        """
        metadata = thing["metadata"]
        found = self.store.get(kind, metadata.get("namespace", ""), metadata["name"])
        if found is None or found["metadata"]["uid"] != metadata["uid"]:
            return None
        before = found.get("status") or {}
        after = {**before, **status}
        after = {name: value for name, value in after.items() if value is not None}
        if after == before:
            return found
        return self.store.put(kind, {**found, "status": after})

    def edit(self, kind: Kind, thing: Object, how: Callable[[Object], None]) -> Object | None:
        """Change an object in place, for a controller. Return the object, or None if it is gone."""
        metadata = thing["metadata"]
        found = self.store.get(kind, metadata.get("namespace", ""), metadata["name"])
        if found is None or found["metadata"]["uid"] != metadata["uid"]:
            return None
        after = fresh(found)
        how(after)
        if after == found:
            return found
        if kind.counts_generations and after.get("spec") != found.get("spec"):
            after["metadata"]["generation"] += 1
        return self.settle(kind, after)

    def settle(self, kind: Kind, thing: Object) -> Object:
        """Write the object.

        Remove it if it is deleted and no finalizer or grace period holds it.
        """
        metadata = thing["metadata"]
        done = "deletionTimestamp" in metadata and not metadata.get("finalizers")
        if kind is kinds.PODS and metadata.get("deletionGracePeriodSeconds"):
            done = False
        if kind is kinds.NAMESPACES and thing["spec"].get("finalizers"):
            done = False
        if not done:
            return self.store.put(kind, thing)
        self.store.put(kind, thing)
        return self.store.remove(kind, metadata.get("namespace", ""), metadata["name"]) or thing

    def event(self, about: Kind, thing: Object, kind: str, reason: str, message: str) -> None:
        """Record an event about an object, which `kubectl describe` shows."""
        self.store.put(kinds.EVENTS, events.make(about, thing, kind, reason, message))

    def _write(
        self,
        kind: Kind,
        before: Object,
        after: Object,
        options: Options,
        managed: list[Object] | None = None,
    ) -> Object:
        now, metadata = before["metadata"], after["metadata"]
        version = metadata.get("resourceVersion")
        if version and version != now["resourceVersion"]:
            raise refusals.conflict(kind, now["name"])
        _keep(now, metadata)
        if options.subresource == "status":
            after = {**before, "status": after.get("status") or {}}
        else:
            if kind.has_status:
                after.pop("status", None)
                if "status" in before:
                    after["status"] = before["status"]
            validation.name_of(kind, metadata)
            defaults.fill(kind, after)
            validation.changed(kind, before, after)
        after["apiVersion"], after["kind"] = kind.api_version, kind.kind
        if after == before and managed in (None, now.get("managedFields")):
            return before
        if kind.counts_generations and after.get("spec") != before.get("spec"):
            after["metadata"]["generation"] = now.get("generation", 0) + 1
        if managed is not None:
            after["metadata"]["managedFields"] = managed
        return fresh(after) if options.dry_run else self.settle(kind, after)

    def _check_place(self, kind: Kind, namespace: str, thing: Object) -> None:
        for field, expected in (("apiVersion", kind.api_version), ("kind", kind.kind)):
            given = thing.setdefault(field, expected)
            if given != expected:
                what = "API version" if field == "apiVersion" else "kind"
                raise refusals.bad_request(
                    f"the {what} in the data ({given}) does not match the expected {what}"
                    f" ({expected})"
                )
        metadata = thing.setdefault("metadata", {})
        if not kind.namespaced:
            return
        if metadata.setdefault("namespace", namespace) != namespace:
            raise refusals.bad_request(
                "the namespace of the provided object does not match the namespace sent on the"
                " request"
            )
        found = self.store.look(kinds.NAMESPACES, "", namespace)
        if found is None:
            raise refusals.not_found(kinds.NAMESPACES, namespace)


def _managed(thing: Object | None) -> list[Object]:
    """Return the fields that each manager applied last. The server stores them unchanged."""
    found: list[Object] = (thing or {"metadata": {}})["metadata"].get("managedFields") or []
    return found


def _keep(now: Object, metadata: Object) -> None:
    """Restore the fields of the metadata that only the server sets."""
    for field in (*_SYSTEM, "generation", "resourceVersion"):
        metadata.pop(field, None)
        if field in now:
            metadata[field] = now[field]


def ends(seconds: float) -> str:
    """Return the time stamp that is this many seconds from now."""
    return clock.stamp(clock.now() + datetime.timedelta(seconds=seconds))
