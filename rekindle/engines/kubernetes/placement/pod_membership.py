"""Request the pods that a job needs, with retries, and record which pods are its nodes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from rekindle import names
from rekindle.engines.kubernetes.client.api import Object
from rekindle.engines.kubernetes.client.pod_status import PodStatus, pod_status
from rekindle.engines.kubernetes.labels import Role
from rekindle.errors import JobError, RekindleError
from rekindle.recovery.journal.journal import (
    AnyEvent,
    Isolated,
    JobStarted,
    NodeJoined,
    NodeLeft,
    NodeWanted,
)

CLOSE_S = 90.0  # for the last requests: one request to the API server takes up to a minute
AGAIN_S = 10.0


@dataclass(frozen=True, slots=True)
class _Request:
    what: str
    do: Callable[[], None]


class RetryQueue:
    """Runs requests in their order: in a thread while the queue is open, otherwise in the caller.

    The queue reports a failed request once, and repeats it after the requests that came later.
    """

    def __init__(self) -> None:
        self._tell: Callable[[str], None] = print
        self._queue: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._is_open = False
        self._under_way = ""
        self._given_up: set[threading.Thread] = set()

    def do(self, what: str, request: Callable[[], None]) -> None:
        """Run a request. what: the text if it fails, such as `node 1 is not replaced`.

        Raises the request's error while the queue is not open.
        """
        if self._is_open:
            self._queue.put(_Request(what, request))
        else:
            request()

    @property
    def is_given_up(self) -> bool:
        """Return whether the queue no longer waits for this thread, which must then stop."""
        return threading.current_thread() in self._given_up

    @contextmanager
    def open(self, tell: Callable[[str], None]) -> Iterator[None]:
        """Run requests until the block ends, then the remaining ones. tell: takes a sentence."""
        self._tell = tell
        mine = self._queue = queue.SimpleQueue()
        thread = threading.Thread(
            target=self._work, args=(mine,), name="rekindle-retries", daemon=True
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
                tell(
                    f"Rekindle abandoned this work after {CLOSE_S:g} s, and all later work: "
                    f"{self._under_way}"
                )

    def _work(self, mine: queue.SimpleQueue[_Request | None]) -> None:
        failed: list[_Request] = []
        while not self.is_given_up:
            try:
                request = mine.get(timeout=AGAIN_S if failed else None)
            except queue.Empty:
                failed = [each for each in failed if self._fails(each, again=True)]
                continue
            if request is None:
                break
            if self._fails(request):
                failed.append(request)
        for each in failed:
            self._fails(each, again=True)

    def _fails(self, request: _Request, *, again: bool = False) -> bool:
        """Run a request; return whether it failed and a retry may succeed."""
        if self.is_given_up:
            return False
        self._under_way = request.what
        try:
            request.do()
        except (RekindleError, OSError) as error:
            if not again:
                self._tell(f"{request.what}: {error}")
            return isinstance(error, (JobError, OSError))
        return False


class Joined(msgspec.Struct, frozen=True):
    """The pod of a node when it joined, in seconds since the epoch."""

    address: str
    at: float

    def is_pod(self, status: PodStatus) -> bool:
        """Return whether this is the pod; the cluster assigns addresses again."""
        return status.ip == self.address and status.created <= self.at


class LostPods(msgspec.Struct, frozen=True):
    """Pods that are no longer nodes. lost: its agent is away. sent_away: the job replaced them."""

    lost: Joined | None = None
    sent_away: tuple[Joined, ...] = ()


class PodMembership:
    """Follows the nodes through the job's events, and records their pods.

    keeps_off: replacement pods avoid the hosts that this attempt has isolated. Then no new pod may
    stay on such a host.
    """

    def __init__(self, *, keeps_off: bool) -> None:
        self._keeps_off = keeps_off
        self._joined: dict[int, Joined] = {}  # the pods that are nodes now
        self._sent_away: list[Joined] = []
        self._isolated: set[str] = set()
        self._nodes: dict[str, int] = {}  # the present or former node of each address
        self._wanted: set[int] = set()  # nodes without a pod
        self._expected: dict[str, int] = {}  # by uid: the expected node of a pod that waits

    @property
    def isolated(self) -> frozenset[str]:
        """Return the hosts that this attempt has isolated."""
        return frozenset(self._isolated)

    def learn(self, event: AnyEvent) -> None:
        """Record an event."""
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
                self._nodes.pop(event.address, None)  # the address of a pod that was a node before
            case NodeJoined():
                self._wanted.discard(event.node)
                self._nodes[event.address] = event.node
                self._joined[event.node] = Joined(event.address, event.at)

    def take_gone(self, node: int) -> LostPods:
        """Return the pods to end because a node needs another one; each only once."""
        sent_away, self._sent_away = tuple(self._sent_away), []
        return LostPods(self._joined.pop(node, None), sent_away)

    def to_end(self, pods: Iterable[Object], gone: LostPods) -> list[Object]:
        """Return the pods that the engine must end, because nothing else ends them.

        These are pods that still run although their agent was lost, and pods that would restart on
        a host that they must leave: the job replaced them, or refused them because of the host.
        """
        return [pod for pod in pods if self._is_to_end(pod_status(pod), gone)]

    def _is_to_end(self, status: PodStatus, gone: LostPods) -> bool:
        if not status.stays or status.role != Role.WORKER.value:
            return False
        on_isolated = status.host in self._isolated
        if any(each.is_pod(status) for each in gone.sent_away):
            return True
        if gone.lost is not None and gone.lost.is_pod(status):
            return on_isolated or status.ran(gone.lost.at)
        is_node = any(each.is_pod(status) for each in list(self._joined.values()))
        return on_isolated and self._keeps_off and not is_node

    def at(self, address: str) -> int | None:
        """Return the present or last node of an address."""
        return self._nodes.get(address)

    def node_of(self, pod: PodStatus) -> int | None:
        """Return the node of a pod. A pod that waits may become any missing node."""
        node = self._nodes.get(pod.ip) if pod.ip else None
        if node is not None or pod.role != Role.WORKER.value or not pod.waits:
            return node
        free = sorted(self._wanted - set(self._expected.values())) or sorted(self._wanted)
        if self._expected.get(pod.uid) not in self._wanted and free:
            self._expected[pod.uid] = free[0]
        return self._expected.get(pod.uid) if free else None
