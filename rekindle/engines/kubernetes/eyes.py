"""Watches a job's pods while it is steered: what becomes of them is reported as signs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rekindle.engines.kubernetes.api import Api, Object
from rekindle.engines.kubernetes.errors import ApiError
from rekindle.engines.kubernetes.follow import Follower
from rekindle.engines.kubernetes.seen import PodSeen, Reason, look_at
from rekindle.errors import JobError
from rekindle.recovery.classification import Sign, Source

BY = "kubernetes"


class Eyes:
    """One thread that follows the pods.

    node_at: which node the pod of an address is. report: takes a sign; may raise JobError.
    tell: takes a sentence for people.
    """

    def __init__(
        self,
        api: Api,
        path: str,
        selector: str,
        node_at: Callable[[str], int | None],
        report: Callable[[Sign], None],
        tell: Callable[[str], None],
    ) -> None:
        self._follower = Follower(api, path, labels=selector)
        self._node_at = node_at
        self._report = report
        self._tell = tell
        self._told: dict[str, tuple[object, ...]] = {}  # of each pod, by its uid

    @contextmanager
    def open(self, see: Callable[[Object, bool], None]) -> Iterator[None]:
        """Follow meanwhile. see: takes each pod that is new or has changed, and if it is there."""
        thread = threading.Thread(
            target=self._follow, args=[see], name="rekindle-pods", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            self._follower.end()
            thread.join()

    def _follow(self, see: Callable[[Object, bool], None]) -> None:
        try:
            for pod, there in self._follower.changes():
                self._look(look_at(pod))
                see(pod, there)
                if not there:
                    self._told.pop(pod["metadata"]["uid"], None)
        except ApiError as error:
            # The agents' own lines tell of what is lost; only its reasons are missed.
            self._tell(f"the pods cannot be watched: {error}")

    def _look(self, pod: PodSeen) -> None:
        news = (pod.reasons, pod.exit_code)
        if not pod.reasons or self._told.get(pod.uid) == news:
            return
        self._told[pod.uid] = news
        self._tell(pod.in_words())
        node = self._node_at(pod.ip) if pod.ip else None
        if node is None:
            return
        for reason in pod.reasons:
            with contextlib.suppress(JobError):  # of a job that ends, or whose node came back
                self._report(_sign(reason, node, pod.host))


def _sign(reason: Reason, node: int, host: str) -> Sign:
    return Sign(source=Source.POD_REASON, what=reason.word, node=node, by=BY, host=host)
