"""Watches: the changes of a kind's objects, as lines of JSON."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import msgspec
from aiohttp import web

from cluster import refusals
from cluster.kinds import Kind
from cluster.refusals import Object
from cluster.selectors import Test
from cluster.store import Event, Store

_BOOKMARKS_S = 60.0


class Wanted(msgspec.Struct, frozen=True):
    """The objects and the first version of a watch."""

    kind: Kind
    namespace: str
    matches: Test
    version: str
    timeout: float
    bookmarks: bool
    initial: bool  # first the existing objects, then a bookmark that ends them


def changes(store: Store, wanted: Wanted, scale: float = 1.0) -> AsyncGenerator[Object, None]:
    """Return the events of a watch until its timeout.

    Raises Refused: the version is older than the events of the store (410).
    """
    queue: deque[Event] = deque()
    replay: list[Object] = []
    if wanted.version in ("", "0") or wanted.initial:
        found = store.all(wanted.kind, wanted.namespace)
        replay = [thing for thing in found if wanted.matches(thing)]
        seen = store.version
    else:
        seen = int(wanted.version)
        if seen < store.oldest:
            raise refusals.expired(seen, store.oldest)
        queue.extend(event for event in store.since(seen) if event.kind is wanted.kind)
    return _follow(store, wanted, scale, queue, replay)


async def _follow(
    store: Store, wanted: Wanted, scale: float, queue: deque[Event], replay: list[Object]
) -> AsyncGenerator[Object, None]:
    woken = asyncio.Event()

    def hear(event: Event) -> None:
        if event.kind is wanted.kind:
            queue.append(event)
            woken.set()

    store.subscribers.append(hear)
    deadline = time.monotonic() + wanted.timeout
    between = max(0.2, _BOOKMARKS_S * scale)
    next_bookmark = time.monotonic() + between
    try:
        for thing in replay:
            yield {"type": "ADDED", "object": thing}
        if wanted.initial:
            yield _bookmark(store, wanted.kind, initial=True)
        while True:
            while queue:
                for shown in _shown(queue.popleft(), wanted):
                    yield shown
            now = time.monotonic()
            if wanted.bookmarks and now >= min(next_bookmark, deadline - 0.05):
                next_bookmark = now + between
                yield _bookmark(store, wanted.kind)
            if now >= deadline:
                return
            woken.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                until = min(next_bookmark if wanted.bookmarks else deadline, deadline) - now
                await asyncio.wait_for(woken.wait(), max(0.01, min(until, 1.0)))
            yield {}  # lets the writer check whether the client is still connected
    finally:
        store.subscribers.remove(hear)


def _shown(event: Event, wanted: Wanted) -> Iterator[Object]:
    """Yield an event.

    An object that starts to match is ADDED; one that stops to match is DELETED.
    """
    if wanted.namespace and event.newest["metadata"].get("namespace") != wanted.namespace:
        return
    was = event.before is not None and wanted.matches(event.before)
    now = event.after is not None and wanted.matches(event.after)
    if now:
        yield {"type": "MODIFIED" if was else "ADDED", "object": event.after}
    elif was:
        assert event.before is not None
        last = {**event.before, "metadata": {**event.before["metadata"]}}
        last["metadata"]["resourceVersion"] = str(event.version)
        yield {"type": "DELETED", "object": last}


def _bookmark(store: Store, kind: Kind, initial: bool = False) -> Object:
    metadata: Object = {"resourceVersion": str(store.version), "creationTimestamp": None}
    if initial:
        metadata["annotations"] = {"k8s.io/initial-events-end": "true"}
    thing = {"kind": kind.kind, "apiVersion": kind.api_version, "metadata": metadata}
    return {"type": "BOOKMARK", "object": thing}


class Line:
    """A streamed answer that tests can cut."""

    def __init__(self, request: web.Request, cut_after: int | None) -> None:
        self.request = request
        self._left = cut_after
        self.resource = str(request.get("resource", ""))
        self.response = web.StreamResponse()

    async def open(self, content_type: str) -> None:
        self.response.content_type = content_type
        self.response.enable_chunked_encoding()
        await self.response.prepare(self.request)

    @property
    def is_lost(self) -> bool:
        transport = self.request.transport
        return transport is None or transport.is_closing()

    def cut(self) -> None:
        if self.request.transport is not None:
            self.request.transport.abort()

    async def send(self, data: bytes) -> bool:
        """Send data and return whether the client is still connected."""
        if self._left == 0:
            self.cut()
        if self._left is not None:
            self._left -= 1
        if self.is_lost:
            return False
        try:
            await self.response.write(data)
        except (ConnectionError, RuntimeError):
            return False
        return True


async def send_all(line: Line, events: AsyncGenerator[Any, None]) -> None:
    """Write events as lines until they end or the client disconnects."""
    encode = msgspec.json.encode
    async with contextlib.aclosing(events) as them:
        async for event in them:
            if not event:
                if line.is_lost:
                    return
            elif not await line.send(encode(event) + b"\n"):
                return
