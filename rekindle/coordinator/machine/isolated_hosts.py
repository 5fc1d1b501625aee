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
        """Whether the coordinator takes no new agent from this host."""
        return self._keeps_off is not KeepsOff.NEVER and host in self._hosts

    def refuses(self, hello: Hello) -> bool:
        """Whether the coordinator refuses an agent because of its host.

        An agent that was a node before stays, because its order to leave reaches it.
        """
        is_new = hello.node < 0 and not hello.ranks and not hello.ended
        return is_new and self.shuts_out(hello.host)

    def refused(self, host: str, waited_for: Iterable[int]) -> list[int]:
        """An agent was refused; return those of these nodes that have to come from elsewhere.

        Other nodes were lost for another reason, so their own pods may come.
        """
        awaited = sorted(self._leaving.intersection(waited_for))
        if awaited:
            self._refused[host] += 1
        return awaited

    def came(self, node: int) -> None:
        """An agent became a node, or a spare."""
        self._leaving.discard(node)
        self._refused.clear()

    def just_in_vain(self, host: str) -> bool:
        """Whether the last one that was refused there was one too many."""
        return self._refused[host] == _ENOUGH.get(self._keeps_off)

    @property
    def is_in_vain(self) -> bool:
        """Whether only agents of such hosts come."""
        enough = _ENOUGH.get(self._keeps_off)
        return enough is not None and any(each >= enough for each in self._refused.values())
