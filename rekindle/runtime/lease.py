"""The lease: one process at a time steers a job, and an older holder's orders are refused."""

from __future__ import annotations


class Lease:
    """Held for as long as its holder's line is open; every holder gets a higher token."""

    def __init__(self) -> None:
        self.holder = ""
        self._token = 0

    def take(self, holder: str) -> int | None:
        """Return the token of a new lease; None: it is held."""
        if self.holder:
            return None
        self.holder = holder
        self._token += 1
        return self._token

    def give_back(self, token: int) -> None:
        """End the lease of this token; a later one is not touched."""
        if token == self._token:
            self.holder = ""

    def is_held_by(self, token: int) -> bool:
        """Whether this token's lease is the one in force."""
        return bool(self.holder) and token == self._token
