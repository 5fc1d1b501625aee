"""Agents that come from hosts on which nothing is to be placed any more. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rekindle.job.spec import KeepsOff
from rekindle.protocol.agent import Hello

# How many agents of one host are refused while others are waited for, before that is in vain. The
# first may be the old one, started again where it was; where the job has to be placed anew, the
# second was placed there anew, and so may be all that follow. Where the host is kept off at once,
# five mean that it is not: rights may lack, or somebody undid it.
_ENOUGH = {KeepsOff.ANEW: 2, KeepsOff.AT_ONCE: 5}


class Isolation:
    """The hosts that this attempt has isolated, and the nodes that were to leave them.

    A person may release one at any time; until the job is placed anew, none of it goes back there.
    """

    def __init__(self, keeps_off: KeepsOff) -> None:
        self._keeps_off = keeps_off
        self._hosts: set[str] = set()
        self._leaving: set[int] = set()  # that have not come from elsewhere yet
        self._refused: Counter[str] = Counter()  # by host, while such a node was waited for

    def add(self, hosts: Iterable[str], nodes: Iterable[int]) -> None:
        """Take these hosts as isolated, and these nodes as on their way elsewhere."""
        self._hosts.update(hosts)
        self._leaving.update(nodes)

    def shuts_out(self, host: str) -> bool:
        """Whether nothing new is taken in from there."""
        return self._keeps_off is not KeepsOff.NEVER and host in self._hosts

    def refuses(self, hello: Hello) -> bool:
        """Whether an agent is not taken in because of where it is.

        One that was a node before goes on where it is: it was to leave, or it would have been told.
        """
        is_new = hello.node < 0 and not hello.ranks and not hello.ended
        return is_new and self.shuts_out(hello.host)

    def refused(self, host: str, waited_for: Iterable[int]) -> list[int]:
        """An agent was refused; return those of these nodes that have to come from elsewhere.

        Others were lost without their host being to blame: their own pods may well come.
        """
        awaited = sorted(self._leaving.intersection(waited_for))
        if awaited:
            self._refused[host] += 1
        return awaited

    def came(self, node: int) -> None:
        """An agent was taken in as a node, or as a spare."""
        self._leaving.discard(node)
        self._refused.clear()

    def just_in_vain(self, host: str) -> bool:
        """Whether the last one that was refused there was one too many."""
        return self._refused[host] == _ENOUGH.get(self._keeps_off)

    @property
    def is_in_vain(self) -> bool:
        """Whether waiting brings none but agents of such hosts."""
        enough = _ENOUGH.get(self._keeps_off)
        return enough is not None and any(each >= enough for each in self._refused.values())
