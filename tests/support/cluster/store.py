"""All objects, their versions, and the latest events.

A journal holds the objects, so a killed server continues with them after a restart. The events are
only in memory: after a restart, a watch can start only at the newest version.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from cluster.kinds import Kind
from cluster.refusals import Object

_REMEMBERED = 50_000

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


def fresh(value: Any) -> Any:
    """Return an independent deep copy."""
    return _decode(_encode(value))


class Event(msgspec.Struct, frozen=True):
    """A change of an object. A creation has no `before`, a deletion no `after`."""

    version: int
    kind: Kind
    before: Object | None
    after: Object | None

    @property
    def newest(self) -> Object:
        found = self.after or self.before
        assert found is not None
        return found


class Store:
    """Objects by kind, namespace and name."""

    def __init__(self, kinds: Iterable[Kind], journal: Path) -> None:
        self.version = 1
        self.kinds = tuple(kinds)
        self.subscribers: list[Callable[[Event], None]] = []
        self._objects: dict[Kind, dict[tuple[str, str], Object]] = {each: {} for each in self.kinds}
        self._events: deque[Event] = deque(maxlen=_REMEMBERED)
        self._replay(journal)
        self.oldest = self.version
        self._journal = journal.open("ab", buffering=0)

    def close(self) -> None:
        self._journal.close()

    def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """Return a copy of the object, or None."""
        found = self.look(kind, namespace, name)
        return None if found is None else fresh(found)

    def look(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """Return the object itself, or None. Callers must not change it."""
        return self._objects.get(kind, {}).get((namespace, name))

    def all(self, kind: Kind, namespace: str = "") -> Iterator[Object]:
        """Yield the objects themselves, sorted by name. Callers must not change them."""
        objects = self._objects.get(kind, {})
        for key in sorted(objects):
            if (not namespace or key[0] == namespace) and key in objects:
                yield objects[key]

    def put(self, kind: Kind, thing: Object) -> Object:
        """Write the object with the next version and return a copy."""
        self.version += 1
        thing = fresh(thing)
        metadata = thing["metadata"]
        metadata["resourceVersion"] = str(self.version)
        key = (metadata.get("namespace", ""), metadata["name"])
        before = self._objects[kind].get(key)
        self._objects[kind][key] = thing
        self._write(kind, key, thing)
        self._tell(Event(self.version, kind, before, thing))
        return fresh(thing)

    def remove(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """Remove the object and return its last version, or None if it is missing."""
        before = self._objects[kind].pop((namespace, name), None)
        if before is None:
            return None
        self.version += 1
        self._write(kind, (namespace, name), None)
        last = fresh(before)
        last["metadata"]["resourceVersion"] = str(self.version)
        self._tell(Event(self.version, kind, last, None))
        return last

    def since(self, version: int) -> list[Event]:
        """Return all events after this version, which must not be older than `oldest`."""
        return list(reversed_until(self._events, version))[::-1]

    def compact(self) -> None:
        """Drop all events, so that no watch can start at an older version."""
        self.version += 1
        self.oldest = self.version
        self._events.clear()

    def _tell(self, event: Event) -> None:
        if len(self._events) == self._events.maxlen:
            self.oldest = self._events[0].version
        self._events.append(event)
        for subscriber in list(self.subscribers):
            subscriber(event)

    def _write(self, kind: Kind, key: tuple[str, str], thing: Object | None) -> None:
        self._journal.write(_encode([self.version, kind.resource, key, thing]) + b"\n")

    def _replay(self, journal: Path) -> None:
        if not journal.exists():
            return
        kinds = {each.resource: each for each in self.kinds}
        lines = journal.read_bytes().split(b"\n")
        whole, torn = lines[:-1], lines[-1]
        for line in whole:
            version, resource, (namespace, name), thing = _decode(line)
            self.version = version
            if resource not in kinds:
                continue
            if thing is None:
                self._objects[kinds[resource]].pop((namespace, name), None)
            else:
                self._objects[kinds[resource]][namespace, name] = thing
        if torn:  # the server was killed during this write, so the client got no answer
            journal.write_bytes(b"".join(line + b"\n" for line in whole))


def reversed_until(events: deque[Event], version: int) -> Iterator[Event]:
    """Yield the events that are newer than this version, the newest first."""
    for event in reversed(events):
        if event.version <= version:
            return
        yield event
