"""The common part of all controllers: a queue of names, and one reconciliation at a time."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Iterable

import msgspec

from cluster.kinds import Kind
from cluster.operations import Operations
from cluster.refusals import Object, Refused
from cluster.store import Event

Key = tuple[str, str]


class Settings(msgspec.Struct, frozen=True):
    """The speed of time, and the limit of a node's silence.

    `time_scale`: seconds here for each second of a real cluster.
    `node_grace`: seconds without a lease renewal after which a node is lost.
    """

    time_scale: float = 1.0
    node_grace: float = 40.0


class Controller:
    """Reconcile the objects of one kind after each relevant change."""

    kind: Kind
    owned: tuple[Kind, ...] = ()  # kinds that objects of `kind` control

    def __init__(self, operations: Operations, settings: Settings) -> None:
        self.operations = operations
        self.store = operations.store
        self.settings = settings
        self._queue: asyncio.Queue[Key] = asyncio.Queue()
        self._queued: set[Key] = set()
        self._timers: dict[Key, asyncio.TimerHandle] = {}

    def sync(self, namespace: str, name: str) -> None:
        """Reconcile one object, which may be gone."""
        raise NotImplementedError

    def keys_of(self, event: Event) -> Iterable[Key]:
        """Yield the keys of the objects to reconcile after an event."""
        if event.kind is self.kind:
            yield key_of(event.newest)
        elif event.kind in self.owned:
            for thing in (event.before, event.after):
                if thing and (owner := controller_of(thing)):
                    if (
                        owner["kind"] == self.kind.kind
                        and owner["apiVersion"] == self.kind.api_version
                    ):
                        yield thing["metadata"].get("namespace", ""), owner["name"]

    def scaled(self, seconds: float) -> float:
        return seconds * self.settings.time_scale

    def hear(self, event: Event) -> None:
        for key in self.keys_of(event):
            self.enqueue(key)

    def enqueue(self, key: Key) -> None:
        if key not in self._queued:
            self._queued.add(key)
            self._queue.put_nowait(key)

    def again(self, key: Key, seconds: float) -> None:
        """Reconcile the object after this time, unless an earlier time is planned."""
        loop = asyncio.get_running_loop()
        if old := self._timers.get(key):
            if not old.cancelled() and loop.time() < old.when() <= loop.time() + seconds:
                return
            old.cancel()
        self._timers[key] = loop.call_later(max(0.0, seconds), self.enqueue, key)

    async def run(self) -> None:
        self.store.subscribers.append(self.hear)
        for kind in (self.kind, *self.owned):
            for thing in list(self.store.all(kind)):
                self.hear(Event(0, kind, None, thing))
        while True:
            key = await self._queue.get()
            self._queued.discard(key)
            try:
                self.sync(*key)
            except Refused:
                self.again(key, 0.1)
            except Exception:  # one invalid object must not end the controller
                traceback.print_exc()
                self.again(key, 0.5)
            await asyncio.sleep(0)


def key_of(thing: Object) -> Key:
    return thing["metadata"].get("namespace", ""), thing["metadata"]["name"]


def controller_of(thing: Object) -> Object | None:
    """Return the owner reference of the controlling owner, or None."""
    for reference in thing["metadata"].get("ownerReferences") or []:
        if reference.get("controller"):
            return dict(reference)
    return None


def owner_reference(kind: Kind, thing: Object) -> Object:
    return {
        "apiVersion": kind.api_version,
        "kind": kind.kind,
        "name": thing["metadata"]["name"],
        "uid": thing["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def is_deleted(thing: Object) -> bool:
    return "deletionTimestamp" in thing["metadata"]


def condition(thing: Object, name: str) -> Object | None:
    """Return the condition of this type if it is True, otherwise None."""
    for each in (thing.get("status") or {}).get("conditions") or []:
        if each["type"] == name and each["status"] == "True":
            return dict(each)
    return None
