"""A queue of requests to the cluster, which a thread repeats until they succeed."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rekindle.errors import JobError, RekindleError

CLOSE_S = 90.0  # for what is left to do: the API server is asked for a minute
AGAIN_S = 10.0


@dataclass(frozen=True, slots=True)
class _Chore:
    what: str
    do: Callable[[], None]


class Chores:
    """Runs requests in their order: in a thread while the queue is open, else in the caller.

    The queue reports a failed request once, and repeats it after the requests that came later.
    """

    def __init__(self) -> None:
        self._tell: Callable[[str], None] = print
        self._queue: queue.SimpleQueue[_Chore | None] = queue.SimpleQueue()
        self._is_open = False
        self._under_way = ""
        self._given_up: set[threading.Thread] = set()

    def do(self, what: str, chore: Callable[[], None]) -> None:
        """Run a request. what: the text if it fails, such as `node 1 is not replaced`.

        Raises the request's error while the queue is not open.
        """
        if self._is_open:
            self._queue.put(_Chore(what, chore))
        else:
            chore()

    @property
    def is_given_up(self) -> bool:
        """Whether the chore that asks is no longer waited for, and has to leave all as it is."""
        return threading.current_thread() in self._given_up

    @contextmanager
    def open(self, tell: Callable[[str], None]) -> Iterator[None]:
        """Run requests until the block ends, then those that are left. tell: takes a sentence."""
        self._tell = tell
        mine = self._queue = queue.SimpleQueue()
        thread = threading.Thread(
            target=self._work, args=(mine,), name="rekindle-chores", daemon=True
        )
        self._is_open = True
        thread.start()
        try:
            yield
        finally:
            self._is_open = False
            mine.put(None)
            thread.join(CLOSE_S)
            if thread.is_alive():
                self._given_up.add(thread)
                tell(f"given up after {CLOSE_S:g} s, with all that came later: {self._under_way}")

    def _work(self, mine: queue.SimpleQueue[_Chore | None]) -> None:
        failed: list[_Chore] = []
        while not self.is_given_up:
            try:
                chore = mine.get(timeout=AGAIN_S if failed else None)
            except queue.Empty:
                failed = [each for each in failed if self._fails(each, again=True)]
                continue
            if chore is None:
                break
            if self._fails(chore):
                failed.append(chore)
        for each in failed:
            self._fails(each, again=True)

    def _fails(self, chore: _Chore, *, again: bool = False) -> bool:
        """Do it; say whether it may be tried again."""
        if self.is_given_up:
            return False
        self._under_way = chore.what
        try:
            chore.do()
        except (RekindleError, OSError) as error:
            if not again:
                self._tell(f"{chore.what}: {error}")
            return isinstance(error, (JobError, OSError))
        return False
