"""Which pods are the nodes of an attempt, and which are to go, as its journal tells. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from rekindle import names
from rekindle.engines.kubernetes.client.api import Object
from rekindle.engines.kubernetes.client.pod_status import PodSeen, look_at
from rekindle.engines.kubernetes.labels import Role
from rekindle.recovery.journal.journal import (
    AnyEvent,
    Isolated,
    JobStarted,
    NodeJoined,
    NodeLeft,
    NodeWanted,
)


class Joined(msgspec.Struct, frozen=True):
    """The pod that a node was when it joined, in seconds since the epoch."""

    address: str
    at: float

    def is_pod(self, seen: PodSeen) -> bool:
        """Whether it is this one."""
        return seen.is_of(self.address, self.at)


class Gone(msgspec.Struct, frozen=True):
    """Pods that are nodes no more. lost: whose agent is away; sent_away: told to end."""

    lost: Joined | None = None
    sent_away: tuple[Joined, ...] = ()


class Members:
    """What is told of the nodes, one event after the other, and of the pods that they are.

    keeps_off: whether what is placed in the place of a pod keeps off the hosts that this attempt
    has isolated; then nothing new is to stay there.
    """

    def __init__(self, *, keeps_off: bool) -> None:
        self._keeps_off = keeps_off
        self._joined: dict[int, Joined] = {}  # the pods that are nodes now
        self._sent_away: list[Joined] = []
        self._isolated: set[str] = set()
        self._nodes: dict[str, int] = {}  # what the pods of addresses are, or were
        self._wanted: set[int] = set()  # nodes that no pod is
        self._expected: dict[str, int] = {}  # which of them pods by uid may be, that are not yet

    @property
    def isolated(self) -> frozenset[str]:
        """The hosts that this attempt has isolated."""
        return frozenset(self._isolated)

    def learn(self, event: AnyEvent) -> None:
        """Note what an event says."""
        match event:
            case JobStarted():
                self._wanted = set(range(event.nodes))
                self._isolated.clear()
            case Isolated():
                self._isolated.add(event.host)
            case NodeLeft(replaced=True) if event.node in self._joined:
                self._sent_away.append(self._joined.pop(event.node))
            case NodeWanted() if event.node != names.SPARE:
                self._wanted.add(event.node)
            case NodeJoined(node=names.SPARE):
                self._nodes.pop(event.address, None)  # of a pod that was a node before
            case NodeJoined():
                self._wanted.discard(event.node)
                self._nodes[event.address] = event.node
                self._joined[event.node] = Joined(event.address, event.at)

    def take_gone(self, node: int) -> Gone:
        """Return what is to go now that another one is wanted for a node; it is told once."""
        sent_away, self._sent_away = tuple(self._sent_away), []
        return Gone(self._joined.pop(node, None), sent_away)

    def to_end(self, pods: Iterable[Object], gone: Gone) -> list[Object]:
        """Return the pods that have to be ended, as nothing else would end them.

        A lost one runs still, and one that was sent away would be started anew where it is, as
        would be one that was refused because of its host.
        """
        return [pod for pod in pods if self._is_to_end(look_at(pod), gone)]

    def _is_to_end(self, seen: PodSeen, gone: Gone) -> bool:
        if not seen.stays or seen.role != Role.WORKER.value:
            return False
        on_isolated = seen.host in self._isolated
        if any(each.is_pod(seen) for each in gone.sent_away):
            return True
        if gone.lost is not None and gone.lost.is_pod(seen):
            return on_isolated or seen.ran(gone.lost.at)
        is_node = any(each.is_pod(seen) for each in list(self._joined.values()))
        return on_isolated and self._keeps_off and not is_node

    def at(self, address: str) -> int | None:
        """Return which node the pod of an address is, or was."""
        return self._nodes.get(address)

    def node_of(self, pod: PodSeen) -> int | None:
        """Return the node that a pod is; one that waits may be any that is wanted."""
        node = self._nodes.get(pod.ip) if pod.ip else None
        if node is not None or pod.role != Role.WORKER.value or not pod.waits:
            return node
        free = sorted(self._wanted - set(self._expected.values())) or sorted(self._wanted)
        if self._expected.get(pod.uid) not in self._wanted and free:
            self._expected[pod.uid] = free[0]
        return self._expected.get(pod.uid) if free else None
