"""What is done in the cluster beside steering: an API server that is away holds nobody up."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rekindle.errors import JobError

CLOSE_S = 90.0  # for what is left to do: the API server is asked for a minute


class Chores:
    """Done in their order by a thread of its own while it is open, else at once."""

    def __init__(self) -> None:
        self._tell: Callable[[str], None] = print
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_open = False
        self._under_way = ""

    def do(self, what: str, chore: Callable[[], None]) -> None:
        """Have it done. what: for whoever is told that it failed, as `node 1 is not replaced`.

        Raises JobError: it failed, and nobody is open to be told so.
        """
        if not self._is_open:
            chore()
            return
        self._queue.put(lambda: self._do(what, chore))

    @contextmanager
    def open(self, tell: Callable[[str], None]) -> Iterator[None]:
        """Do what comes meanwhile, and in the end what is left. tell: takes a sentence."""
        self._tell = tell
        self._is_open = True
        thread = threading.Thread(target=self._work, name="rekindle-chores", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._is_open = False
            self._queue.put(None)
            thread.join(CLOSE_S)
            if thread.is_alive():
                tell(f"given up after {CLOSE_S:g} s, with all that came later: {self._under_way}")

    def _work(self) -> None:
        while chore := self._queue.get():
            chore()

    def _do(self, what: str, chore: Callable[[], None]) -> None:
        self._under_way = what
        try:
            chore()
        except JobError as error:
            self._tell(f"{what}: {error}")
