"""Agents that come from hosts on which nothing is to be placed any more. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from rekindle.runtime.protocol import Hello
from rekindle.runtime.spec import KeepsOff

# The first may be the old one, started again where it was; the second was placed there anew, and
# so may be all that follow.
ENOUGH = 2


class Isolation:
    """The hosts that this attempt has isolated.

    A person may release one at any time; until the job is placed anew, none of it goes back there.
    """

    def __init__(self, keeps_off: KeepsOff) -> None:
        self._keeps_off = keeps_off
        self._hosts: set[str] = set()
        self._refused = 0  # in a row

    def add(self, hosts: Iterable[str]) -> None:
        """Take these hosts as isolated."""
        self._hosts.update(hosts)

    @property
    def hosts(self) -> frozenset[str]:
        """All of them."""
        return frozenset(self._hosts)

    def refuses(self, hello: Hello) -> str:
        """Return why an agent is not taken in; empty: it may be.

        One that was a node before goes on where it is: it was to leave, or it would have been told.
        """
        is_new = hello.node < 0 and not hello.ranks and not hello.ended
        if self._keeps_off is KeepsOff.NEVER or not is_new or hello.host not in self._hosts:
            return ""
        self._refused += 1
        return f"host {hello.host} is isolated"

    def came(self) -> None:
        """An agent was taken in as a node."""
        self._refused = 0

    @property
    def is_hopeless(self) -> bool:
        """Whether it has just become clear that waiting brings none but agents of such hosts."""
        return self._keeps_off is KeepsOff.ANEW and self._refused == ENOUGH
