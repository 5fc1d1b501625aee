"""Keep the log of hosts in a ConfigMap that all jobs of a namespace share."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Iterator

import msgspec

from rekindle import names
from rekindle.engines.kubernetes import labels
from rekindle.engines.kubernetes.client.api import Api, Object
from rekindle.engines.kubernetes.client.api_errors import ConflictError
from rekindle.engines.kubernetes.client.objects import collection, find
from rekindle.errors import JobError
from rekindle.recovery.journal.host_history import (
    AnyHostEvent,
    Host,
    HostChecked,
    HostFault,
    best_checks,
    condensed,
    fold,
    read,
)
from rekindle.waiting import retry

# A ConfigMap holds 1 MiB (1,048,576 bytes of keys and values), and etcd takes requests of 1.5 MiB.
MOST_BYTES = 768 * 1024
_LONGEST_TEXT = 300  # characters of the text of a fault
_MOST_JOBS = 1000  # with a known position in their journals
_NUMBER = re.compile("[0-9]{1,15}")
_TRIES_S, _PAUSE_S = 30.0, 0.5
_POSITIONS = "positions.json"  # last event of each job before a condensation of the log

_Place = tuple[float, int]  # position of an event in its job's journal: its time, and its number
_Positions = dict[str, _Place]
_NEVER: _Place = (-1.0, -1)


class ClusterHostLog:
    """One ConfigMap, a JSON line for each event; any number of processes add to it.

    If it is full, the log drops the events that no longer count.
    """

    def __init__(self, api: Api, namespace: str) -> None:
        self._api = api
        self._namespace = namespace
        self._maps = collection("v1", "configmaps", namespace)

    def append(self, event: AnyHostEvent) -> None:
        """Add an event, unless the log has or had it.

        Raises ApiError: the server does not write it. Raises JobError: the ConfigMap is not a log.
        """
        add = functools.partial(self._append, _bounded(event))
        retry(add, ConflictError, _TRIES_S, _PAUSE_S)  # another process may write at the same time

    def _append(self, event: AnyHostEvent) -> None:
        found = self._read()
        if not self._is_known(found, event):
            self._write(found, [*self._events(found), event])

    def hosts(self) -> dict[str, Host]:
        """Return all hosts that the log names. Raises as append() does."""
        return fold(self.events())

    def events(self) -> list[AnyHostEvent]:
        """Return all events in their order. Raises as append() does."""
        return self._events(self._read())

    def _read(self) -> Object:
        """Return the ConfigMap; it has no version if it does not exist."""
        path = f"{self._maps}/{labels.HOSTS}"
        return find(self._api, path) or {"metadata": {}}

    def _events(self, found: Object) -> list[AnyHostEvent]:
        text: str = (found.get("data") or {}).get(names.HOSTS_FILE, "")
        try:
            return read(text.encode().splitlines())
        except JobError as error:
            raise self._damaged(error) from error

    def _positions(self, found: Object) -> _Positions:
        text: str = (found.get("data") or {}).get(_POSITIONS, "{}")
        try:
            return msgspec.json.decode(text, type=_Positions)
        except msgspec.DecodeError as error:
            raise self._damaged(error) from error

    def _damaged(self, error: Exception) -> JobError:
        what = f"ConfigMap {labels.HOSTS} in namespace {self._namespace}"
        return JobError(f"Rekindle cannot read {what}: {error}; correct or remove it")

    def _is_known(self, found: Object, event: AnyHostEvent) -> bool:
        """Return whether the log has the event, or had it before a condensation."""
        known = any(each == event or each.is_same_source(event) for each in self._events(found))
        job, when = _place(event)
        return known or (bool(job) and when <= self._positions(found).get(job, _NEVER))

    def _write(self, found: Object, events: list[AnyHostEvent]) -> None:
        positions = self._positions(found)
        if _size(events) > MOST_BYTES:
            positions = _positions_until(positions, events)
            events = _shortened(events)
        data = {names.HOSTS_FILE: _lines(events)}
        if positions:
            data[_POSITIONS] = msgspec.json.encode(positions).decode()
        metadata: Object = {"labels": {labels.ROLE: "hosts"}}
        version = found["metadata"].get("resourceVersion")
        if version:
            metadata["resourceVersion"] = version  # without a version the last writer would win
            patch = {"metadata": metadata, "data": data}
            self._api.patch(f"{self._maps}/{labels.HOSTS}", patch)
        else:
            metadata |= {"name": labels.HOSTS, "namespace": self._namespace}
            new = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}
            self._api.create(self._maps, new)


def _bounded(event: AnyHostEvent) -> AnyHostEvent:
    name = "message" if isinstance(event, HostFault) else "reason"
    text: str = getattr(event, name, "")
    if len(text) <= _LONGEST_TEXT:
        return event
    return msgspec.structs.replace(event, **{name: f"{text[: _LONGEST_TEXT - 3]}..."})


def _place(event: AnyHostEvent) -> tuple[str, _Place]:
    """Return an event's job and its position in the journal; "": the event comes from a person."""
    job, _, number = event.source.rpartition("#")
    return job, (event.at, int(number) if _NUMBER.fullmatch(number) else -1)


def _positions_until(before: _Positions, events: list[AnyHostEvent]) -> _Positions:
    """Return the position of each job's last event; keep the latest _MOST_JOBS jobs."""
    until = dict(before)
    for job, place in map(_place, events):
        if job:
            until[job] = max(place, until.get(job, _NEVER))
    return dict(sorted(until.items(), key=lambda each: each[1])[-_MOST_JOBS:])


def _shortened(events: list[AnyHostEvent]) -> list[AnyHostEvent]:
    """Return fewer events, so that the log has room again.

    The order of removal: events that do not count, old checks, the best checks of a host, old
    faults. Raises JobError: isolated hosts alone are too many.
    """
    kept = condensed(events, time.time())
    for each in _dispensable(kept):
        some = sorted(each, key=lambda event: -event.at)
        while _size(kept) > MOST_BYTES // 2 and some:
            oldest = {id(each) for each in some[len(some) // 2 :]}
            some = some[: len(some) // 2]
            kept = [each for each in kept if id(each) not in oldest]
    if _size(kept) > MOST_BYTES:
        raise JobError(
            f"the log of hosts is full, because {len(kept)} hosts are isolated; release some "
            "with rekindle release-node"
        )
    return kept


def _dispensable(kept: list[AnyHostEvent]) -> Iterator[list[AnyHostEvent]]:
    checks: dict[str, list[HostChecked]] = {}
    for event in kept:
        if isinstance(event, HostChecked):
            checks.setdefault(event.host, []).append(event)
    best = {id(each) for own in checks.values() for each in best_checks(own)}
    all_checks = [each for own in checks.values() for each in own]
    yield [each for each in all_checks if id(each) not in best]
    yield [each for each in all_checks if id(each) in best]
    yield [event for event in kept if isinstance(event, HostFault)]


def _lines(events: list[AnyHostEvent]) -> str:
    return "".join(msgspec.json.encode(event).decode() + "\n" for event in events)


def _size(events: list[AnyHostEvent]) -> int:
    return len(_lines(events).encode())
