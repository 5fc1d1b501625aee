"""Follow objects and their changes: one list, and one watch that survives broken connections.

`beside` runs the threads that follow objects.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from rekindle.engines.kubernetes.client.api import Api, Object
from rekindle.engines.kubernetes.client.api_errors import ApiError, ExpiredError, MissingObjectError
from rekindle.engines.kubernetes.client.streams import Stream
from rekindle.waiting import join_all

WATCH_S = 290  # the server ends a watch after this time; the next watch continues from its version
SILENCE_S = 320.0  # longer than a watch: after it the server, or the connection, is down
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0


@dataclass(slots=True)
class Informer:
    """Follows the objects of one collection that selectors choose.

    keep: returns the part of an object to keep and yield; metadata.uid and metadata.resourceVersion
    are necessary. objects: the present objects, by uid. lists, watches: their numbers so far.
    """

    api: Api
    path: str
    labels: str = ""
    fields: str = ""
    keep: Callable[[Object], Object] = lambda found: found
    objects: dict[str, Object] = field(default_factory=dict)
    lists: int = 0
    watches: int = 0
    _ended: threading.Event = field(default_factory=threading.Event)
    _stream: Stream | None = None

    def end(self) -> None:
        """Stop changes(), from another thread."""
        self._ended.set()
        if self._stream is not None:
            self._stream.break_off()

    def changes(self) -> Iterator[tuple[Object, bool]]:
        """Yield each object that is new or has changed, and whether it exists, until end().

        Two quick changes of an object may appear as one. Raises ForbiddenError: the server does not
        allow it. Raises MissingObjectError: the kind does not exist.
        """
        version, pause_s = "", _FIRST_PAUSE_S
        while not self._ended.is_set():
            try:
                if not version:
                    version = yield from self._list()
                for changed, there, newer in self._watch(version):
                    version, pause_s = newer, _FIRST_PAUSE_S
                    if changed is not None:
                        yield changed, there
            except ExpiredError:
                version = ""
            except MissingObjectError:
                raise
            except ApiError as error:
                if error.status in (401, 403) and not self.lists:
                    raise
                # After a success, a refusal comes from a server that has just restarted.
            if self._ended.wait(random.uniform(0.5, 1.0) * pause_s):
                return
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _list(self) -> Generator[tuple[Object, bool], None, str]:
        """List all objects, yield differences from the known ones, and return the version."""
        found: dict[str, Object] = {}
        version = ""
        selectors = {"labelSelector": self.labels, "fieldSelector": self.fields}
        for page in self.api.pages(self.path, **selectors):
            for each in page.get("items") or ():
                found[each["metadata"]["uid"]] = self.keep(each)
            version = _version(page)
        self.lists += 1
        known, self.objects = self.objects, found
        for uid, each in known.items():
            if uid not in found:
                yield each, False
        for uid, each in found.items():
            before = known.get(uid)
            if before is None or _version(before) != _version(each):
                yield each, True
        return version

    def _watch(self, version: str) -> Iterator[tuple[Object | None, bool, str]]:
        """Watch from a version: yield each change, whether it exists, and the new version."""
        self.watches += 1
        query = {"watch": "true", "resourceVersion": version, "allowWatchBookmarks": "true"}
        selectors = {"labelSelector": self.labels, "fieldSelector": self.fields}
        with self.api.stream(
            self.path, silence_s=SILENCE_S, timeoutSeconds=WATCH_S, **query, **selectors
        ) as stream:
            self._stream = stream
            if self._ended.is_set():
                return
            for line in stream:
                event = json.loads(line)
                changed = event["object"]
                if event["type"] == "ERROR":
                    raise _error_in(self.path, changed)
                if event["type"] == "BOOKMARK":
                    yield None, True, _version(changed)
                    continue
                there = event["type"] != "DELETED"
                changed = self.keep(changed)
                uid = changed["metadata"]["uid"]
                if there:
                    self.objects[uid] = changed
                else:
                    self.objects.pop(uid, None)
                yield changed, there, _version(changed)


def _error_in(path: str, status: Object) -> ApiError:
    kind = ExpiredError if status.get("code") == 410 else ApiError
    message = f"watch of {path}: {status.get('message')}"
    return kind(message, status=int(status.get("code") or 0), reason=str(status.get("reason")))


def _version(changed: Object) -> str:
    return str(changed["metadata"]["resourceVersion"])


@contextmanager
def beside(
    works: Mapping[str, Callable[[], None]], stop: Callable[[], object], limit_s: float
) -> Iterator[None]:
    """Run each of these functions, by its name, in a daemon thread until the block ends.

    stop: orders all of them to end. They have `limit_s` seconds for that in total, because a server
    that does not answer may delay them.
    """
    threads = [
        threading.Thread(target=work, name=f"rekindle-{name}", daemon=True)
        for name, work in works.items()
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop()
        join_all(threads, limit_s)
