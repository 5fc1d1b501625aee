"""The lease: the right to steer the job, which one process has at a time.

The holder has an open connection, and renews the lease with requests. The kernel closes the
connections of a killed process, but not those of a stopped process or a dead machine. So another
process that asks for the lease gets it if the holder does not renew it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

LEASE_S = 15.0  # a holder that has not renewed the lease for so long loses it to another process
ASK_S = 5.0  # time that the holder has at least, after another process has asked for the lease


class Lease:
    """The holder of the lease, and when it renewed the lease.

    holder: the name of the process that steers the job; "": none.
    """

    def __init__(self) -> None:
        self.holder = ""
        self._token = ""
        self._stream: asyncio.Task[object] | None = None  # serves the holder's connection
        self._renewed_at = 0.0
        self._renewed = asyncio.Event()

    @contextlib.contextmanager
    def held(self, holder: str, token: str) -> Iterator[None]:
        """Give the lease to a process until the block ends. An earlier holder loses its stream."""
        if self._stream is not None:
            self._stream.cancel()
        stream = self._stream = asyncio.current_task()
        self.holder, self._token = holder, token
        self.renew(token)
        try:
            yield
        finally:
            if self._stream is stream:  # no other process has taken the lease
                self.holder, self._token, self._stream = "", "", None
                self._renewed.set()

    def renew(self, token: str) -> bool:
        """Note a sign of life of the holder. Return False: another process has the lease."""
        if self._token not in ("", token):
            return False
        self._renewed_at = asyncio.get_running_loop().time()
        self._renewed.set()
        return True

    async def is_free_for(self, token: str) -> bool:
        """Return whether this process may take the lease: no other live process holds it.

        The holder, or this process itself, may have been stopped for a while. So the holder has
        ASK_S to renew the lease, however old its last renewal is.
        """
        if self._token in ("", token):
            return True
        age_s = asyncio.get_running_loop().time() - self._renewed_at
        self._renewed.clear()
        try:
            await asyncio.wait_for(self._renewed.wait(), max(LEASE_S - age_s, ASK_S))
        except asyncio.TimeoutError:
            return True
        return self._token in ("", token)
