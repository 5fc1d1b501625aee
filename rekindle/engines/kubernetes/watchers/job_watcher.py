"""Watch the workload of a job and its pods, and queue health events."""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rekindle.engines.kubernetes.client.api import Api, Object
from rekindle.engines.kubernetes.client.api_errors import ApiError
from rekindle.engines.kubernetes.client.informer import Informer, beside
from rekindle.engines.kubernetes.client.pod_status import PodStatus, Reason, pod_status
from rekindle.engines.kubernetes.labels import selector
from rekindle.engines.kubernetes.manifests.kinds.base import WorkloadPhase
from rekindle.engines.kubernetes.placement.placement import Placement
from rekindle.errors import JobError, UnansweredError
from rekindle.recovery.faults.classification import EventSource, HealthEvent

AGAIN_S = 1.0
LATE_S = 300.0  # after that an event no longer explains a fault
_NAME = re.compile(r'"[^"]*"')
_COMBINED = "(combined from similar events): "  # the text of client-go's recorder

Report = Callable[[HealthEvent], None]
BY = "kubernetes"
_BETWEEN_ROUNDS_S = 1.0
CLOSE_S = 5.0  # for threads to end: a request to a silent server takes up to a minute


class HealthEventQueue:
    """A thread that reports health events in their order. It keeps events until they are accepted.

    `report` takes an event. It raises UnansweredError if the coordinator did not receive it, and
    JobError if the event is obsolete: its node came back, or the job ends. `tell` takes a sentence
    for users. The queue drops an event after LATE_S seconds.
    """

    def __init__(self, report: Report, tell: Callable[[str], None]) -> None:
        self._report = report
        self._tell = tell
        self._queue: queue.SimpleQueue[tuple[HealthEvent, float] | None] = queue.SimpleQueue()
        self._closed = threading.Event()

    @contextmanager
    def open(self) -> Iterator[Report]:
        """Report events until the block ends; yield the function that queues an event."""
        with beside({"health-events": self._work}, self._close, CLOSE_S):
            yield lambda health_event: self._queue.put((health_event, time.monotonic()))

    def _close(self) -> None:
        self._closed.set()
        self._queue.put(None)

    def _work(self) -> None:
        while (found := self._queue.get()) and not self._closed.is_set():
            health_event, since = found
            while not self._try_report(health_event):
                if time.monotonic() - since > LATE_S:
                    self._tell(
                        f"{health_event.in_words()}: Rekindle could not report it, because the "
                        "coordinator did not answer for too long"
                    )
                    break
                if self._closed.wait(AGAIN_S):
                    return

    def _try_report(self, health_event: HealthEvent) -> bool:
        try:
            self._report(health_event)
        except JobError as error:
            return not isinstance(error, UnansweredError)
        return True


class JobWatcher:
    """One list and one watch of the pods, of the workload, and of warnings about it.

    `node_of` returns the present or future node of a pod; None: unknown. `report` takes an event.
    `tell` takes a sentence for users.
    """

    def __init__(
        self,
        api: Api,
        place: Placement,
        job_id: str,
        node_of: Callable[[PodStatus], int | None],
        report: Callable[[HealthEvent], None],
        tell: Callable[[str], None],
    ) -> None:
        self._place = place
        workloads, _, name = place.workload_path.rpartition("/")
        self._pods = Informer(api, place.path("v1", "pods"), labels=selector(job_id))
        self._workload = Informer(api, workloads, fields=f"metadata.name={name}")
        warnings = f"involvedObject.name={place.pods_maker},type=Warning"
        self._events = Informer(api, place.path("v1", "events"), fields=warnings)
        self._node_of = node_of
        self._report = report
        self._tell = tell
        self._last_news: dict[str, tuple[object, ...]] = {}  # last text by uid
        self._unreported: dict[str, PodStatus] = {}
        self._closed = threading.Event()

    @contextmanager
    def open(self, see: Callable[[Object, bool], None]) -> Iterator[None]:
        """Watch until the block ends. see: takes each new or changed pod, and whether it exists."""

        def handle_pod(pod: Object, there: bool) -> None:
            self._handle_pod(pod)
            see(pod, there)

        works = {
            "pods": lambda: self._follow(self._pods, handle_pod),
            "workload": lambda: self._follow(self._workload, self._handle_workload),
            "events": lambda: self._follow(self._events, self._handle_event),
            "rounds": self._go_round,
        }
        with beside(works, self._close, CLOSE_S):
            yield

    def _close(self) -> None:
        self._closed.set()
        for follower in (self._pods, self._workload, self._events):
            follower.end()

    # ---- known objects

    def pods(self) -> list[Object] | None:
        """Return the job's pods, from the watch; None: they are not known yet."""
        return self.known() if self._pods.lists else None

    def known(self) -> list[Object]:
        """Return the known pods of the job."""
        return list(self._pods.objects.values())

    def workload_stands(self) -> bool:
        """Return whether the workload is known to exist without a failure."""
        found = list(self._workload.objects.values())
        return any(
            self._place.kind.status(each).phase is not WorkloadPhase.FAILED for each in found
        )

    # ---- events

    def _follow(self, follower: Informer, handle: Callable[[Object, bool], None]) -> None:
        try:
            for changed, there in follower.changes():
                handle(changed, there)
                if not there:
                    self._last_news.pop(changed["metadata"]["uid"], None)
                    self._unreported.pop(changed["metadata"]["uid"], None)
        except ApiError as error:
            # The agents' connections also report losses. Only the reasons are missing.
            self._tell(f"Rekindle cannot watch {follower.path}: {error}")

    def _handle_pod(self, changed: Object) -> None:
        pod = pod_status(changed)
        if not pod.reasons or self._is_old(pod.uid, (pod.reasons, pod.exit_code, pod.restarts)):
            return
        self._tell(pod.in_words())
        self._unreported[pod.uid] = pod
        self._report_reasons(pod)

    def _report_reasons(self, pod: PodStatus) -> None:
        node = self._node_of(pod)
        if node is None:
            return
        self._unreported.pop(pod.uid, None)
        for reason in pod.reasons:
            self._report(_health_event(reason, node, pod))

    def _handle_workload(self, changed: Object, there: bool) -> None:
        status, metadata = self._place.kind.status(changed), changed["metadata"]
        if self._is_old(metadata["uid"], (status.phase,)):
            return
        if status.phase in (WorkloadPhase.FAILED, WorkloadPhase.SUSPENDED):
            why = ": ".join(each for each in (status.reason, status.message) if each)
            kind = self._place.kind.gvk.kind
            self._tell(
                f"{kind} {metadata['name']} is {status.phase.value}" + f" ({why})" * bool(why)
            )

    def _handle_event(self, event: Object, there: bool) -> None:
        """Report a warning about the workload, such as the reason why its pods cannot be created.

        Each refused pod has another name. So texts that differ only in names count as equal.
        """
        about, reason, text = event["involvedObject"], event.get("reason"), event.get("message", "")
        news = (reason, _NAME.sub("", text.removeprefix(_COMBINED)))
        if there and not self._is_old(f"events of {about.get('uid')}: {reason}", news):
            at = event.get("lastTimestamp") or event["metadata"]["creationTimestamp"]
            self._tell(f"{about['kind']} {about['name']}: {reason} at {at}: {text}")

    def _is_old(self, uid: str, news: tuple[object, ...]) -> bool:
        """Return whether this was the last text about the object."""
        if self._last_news.get(uid) == news:
            return True
        self._last_news[uid] = news
        return False

    # ---- periodic work

    def _go_round(self) -> None:
        ending: dict[str, float] = {}
        while not self._closed.wait(_BETWEEN_ROUNDS_S):
            for pod in list(self._unreported.values()):
                self._report_reasons(pod)
            ending = self._end_overdue(ending, time.monotonic())

    def _end_overdue(self, since: dict[str, float], now: float) -> dict[str, float]:
        """Remove pods that have not ended in time, because their host does not answer.

        Some kinds create no replacement before that. since: the first time that each was seen
        ending. Return the new `since`.
        """
        ending = {
            status.uid: (pod, status)
            for pod in self.pods() or ()
            if (status := pod_status(pod)).ending and not status.is_over
        }
        since = {uid: since.get(uid, now) for uid in ending}
        for uid, (pod, status) in ending.items():
            if now - since[uid] > status.grace_s + self._place.overdue_s:
                self._end_by_force(pod, status)
        return since

    def _end_by_force(self, pod: Object, status: PodStatus) -> None:
        try:
            self._place.end_pod(pod, 0)
        except ApiError as error:
            if not self._is_old(status.uid, (str(error),)):
                self._tell(
                    f"pod {status.name} does not end, and Rekindle cannot remove it: {error}"
                )


def _health_event(reason: Reason, node: int, pod: PodStatus) -> HealthEvent:
    """Make a health event.

    A pod that waits is not a node yet, so its host and address do not identify it.
    """
    host, address = ("", "") if pod.waits else (pod.host, pod.ip)
    return HealthEvent(
        source=EventSource.POD_REASON,
        what=reason.word,
        node=node,
        by=BY,
        host=host,
        address=address,
        run=pod.restarts,
        exit_code=pod.exit_code,
    )
