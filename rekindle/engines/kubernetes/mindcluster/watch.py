"""Watch MindCluster's ConfigMaps, and report the data on the job's hosts."""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, Protocol

import msgspec

from rekindle.engines.kubernetes.client.api import Api, Object
from rekindle.engines.kubernetes.client.api_errors import ApiError
from rekindle.engines.kubernetes.client.informer import Informer, beside
from rekindle.engines.kubernetes.client.objects import collection
from rekindle.engines.kubernetes.client.pod_status import pod_status
from rekindle.engines.kubernetes.labels import ROLE, Names, Role
from rekindle.engines.kubernetes.manifests.ascend import RESET_CONFIG
from rekindle.engines.kubernetes.manifests.settings import KubernetesSettings
from rekindle.engines.kubernetes.mindcluster.host_reports import HostReports
from rekindle.engines.kubernetes.mindcluster.reports import ActiveCode, Report, chip_numbers
from rekindle.engines.kubernetes.mindcluster.resets import RankState, ResetInfo, ResetProcess
from rekindle.errors import JobError
from rekindle.job.spec import JobSpec
from rekindle.recovery.faults.classification import EventSource, HealthEvent
from rekindle.recovery.journal.journal import AnyEvent, HealthEventSeen

BY = "mindcluster"
_LONGEST = 200  # characters of the text about a rank
_ALLOCATED = "huawei.com/AscendReal"  # the device plugin writes it once a pod has its chips
_RANK_INDEX = "hccl/rankIndex"  # MindCluster's name for a node's rank
MAKER = "huawei.com/"  # prefix of the devices that MindCluster knows
LOOK_S = 1.0  # between two checks for new pods
_PACE_S = 0.2  # between any two checks: a large cluster has changes at any time
_LONGEST_PAUSE_S = 30.0  # between two attempts to report a refused event
_JOIN_S = 2.0  # for a thread that waits for a server that does not answer; it ends on its own
_OWN = "mx-consumer-cim=true"  # label of the ConfigMaps of the device plugin and NodeD
_CLUSTERD = "mx-consumer-volcano=true"  # label of ClusterD's ConfigMaps
_CHIPS, _BOARDS = "kube-system", "mindx-dl"  # their namespaces; ClusterD also uses the second one
_Name = tuple[EventSource, str, int]  # key of a pod's fault; the number is the device


class Placed(msgspec.Struct, frozen=True):
    """A pod that runs on a host.

    `ip` identifies its node. `chips`: their numbers on the host, in the order of the pod's devices;
    empty if unknown. `index`: its rank among the pods, for MindCluster, or -1.
    """

    uid: str
    host: str
    ip: str
    chips: tuple[int, ...] = ()
    index: int = -1


def placed(pod: Object, device: str) -> Placed | None:
    """Read a pod; None: it does not run, or has no ranks. device: the resource that it requests."""
    status, metadata = pod_status(pod), pod["metadata"]
    has_ranks = (metadata.get("labels") or {}).get(ROLE) == Role.WORKER.value
    if not has_ranks or status.is_over or not (status.host and status.ip):
        return None
    annotations = metadata.get("annotations") or {}
    index = annotations.get(_RANK_INDEX, "")
    return Placed(
        uid=status.uid,
        host=status.host,
        ip=status.ip,
        chips=chip_numbers(annotations.get(_ALLOCATED) or annotations.get(device) or ""),
        index=int(index) if index.isascii() and index.isdigit() and len(index) < 10 else -1,
    )


def health_events(
    place: Placed, reports: Iterable[Report], node: int, ranks: int
) -> list[HealthEvent]:
    """Return the health events of a host for its node. ranks: the number of the node's ranks.

    Chips of other pods do not count.
    """
    faults = [fault for report in reports for fault in report.faults]
    return [_of_host(place, one, node, ranks) for one in faults if is_ours(place, one.chip)]


def is_ours(place: Placed, chip: int) -> bool:
    """Return whether a chip belongs to the pod. -1 concerns the complete host, and so each pod."""
    return chip < 0 or chip in place.chips


def remarks(place: Placed, reports: Iterable[Report]) -> list[str]:
    """Return texts for users about a host: problems without a code or with an unknown owner."""
    found = []
    for report in reports:
        listed = [(chip, text) for chip, text in report.remarks if is_ours(place, chip)]
        if not place.chips:
            listed += [
                (
                    fault.chip,
                    f"has fault {fault.code}; Rekindle does not know whether the pod uses this "
                    f"chip, because the pod has no annotation {_ALLOCATED}",
                )
                for fault in report.faults
                if fault.chip >= 0
            ]
        found += [f"host {place.host}{_chip(chip)}: {text}" for chip, text in listed]
    return found


def _chip(number: int) -> str:
    return f", chip {number}" if number >= 0 else ""


def _of_host(place: Placed, fault: ActiveCode, node: int, ranks: int) -> HealthEvent:
    """Make a health event. It is for the node, not a device, if a rank has several chips."""
    named = fault.chip >= 0 and len(place.chips) == ranks
    return HealthEvent(
        source=EventSource.ASCEND,
        what=fault.code,
        node=node,
        device=place.chips.index(fault.chip) if named else -1,
        by=BY,
        severity=fault.severity,
        origin=fault.origin,
        host=place.host,  # another pod on another host may be the node by now
    )


def recovery_events(place: Placed, info: ResetInfo, node: int, ranks: int) -> list[HealthEvent]:
    """Return the health events for the node's ranks in MindCluster's recovery."""
    devices = len(place.chips) or ranks
    if place.index < 0:
        return []
    return [
        HealthEvent(
            source=EventSource.MINDCLUSTER,
            what=_listed(rank),
            node=node,
            device=number % devices if devices == ranks else -1,
            by=BY,
            host=place.host,
        )
        for number, rank in info.ranks.items()
        if number // devices == place.index
    ]


def _listed(rank: RankState) -> str:
    words = (rank.status or "listed", rank.policy, rank.error_code_hex)
    return " ".join(filter(None, words))[:_LONGEST]


def reported_before(events: Iterable[AnyEvent]) -> dict[str, list[HealthEvent]]:
    """Return the events, by host, that an earlier process reported and that are not over.

    events: of the job's journal.
    """
    found: dict[tuple[str, EventSource, str, int], HealthEvent] = {}
    for event in events:
        if isinstance(event, HealthEventSeen):
            health_event = event.health_event
            name = event.host, health_event.source, health_event.what, health_event.device
            if health_event.gone:
                found.pop(name, None)
            elif health_event.by == BY:
                found[name] = health_event
    hosts: dict[str, list[HealthEvent]] = {}
    for (host, *_), health_event in found.items():
        hosts.setdefault(host, []).append(health_event)
    return hosts


class _Takes(Protocol):
    def __call__(self, thing: Object, /, *, there: bool) -> None: ...


class _TellsNews(Protocol):
    def __call__(self, thing: Object, /, *, there: bool) -> list[str]: ...


class ReportHandlers(NamedTuple):
    """Takes health events (may raise JobError) and sentences; finds pods and their nodes.

    journal: the job's events so far.
    """

    report: Callable[[HealthEvent], None]
    tell: Callable[[str], None]
    pods: Callable[[], Iterable[Object]]
    node_at: Callable[[str], int | None]
    journal: Iterable[AnyEvent] = ()


def watch_hosts(
    api: Api, pods: KubernetesSettings, spec: JobSpec, handlers: ReportHandlers
) -> AbstractContextManager[None]:
    """Return a context that watches, if MindCluster manages the job's devices."""
    if not pods.device.startswith(MAKER):
        return nullcontext()
    return HostWatcher(api, pods, spec, handlers).open()


class HostWatcher:
    """Watches MindCluster: a thread for each followed collection, and one that reports.

    The reporting thread compares the present faults of each pod with the reported ones. So it
    reports a fault once, also if a pod of its host becomes a node later. It repeats a report that
    fails.
    """

    def __init__(
        self, api: Api, pods: KubernetesSettings, spec: JobSpec, handlers: ReportHandlers
    ) -> None:
        self._api = api
        self._pods = pods
        self._workload = Names.of(spec.job_id).workload
        self._ranks = spec.processes_per_node
        self._handlers = handlers
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # calls
        self._followers: dict[str, Informer | None] = {}  # by collection; None: unreadable
        self._ended = threading.Event()
        self._host_reports = HostReports()
        self._recovery = ResetProcess(self._workload)
        self._refused: list[str] = []
        self._reported: dict[str, dict[_Name, HealthEvent]] = {}  # by pod
        self._before = reported_before(handlers.journal)  # by host
        self._sentences: set[str] = set()  # sentences that are still true
        self._pause_s = LOOK_S
        self._followed = self._all_followed()

    @contextmanager
    def open(self) -> Iterator[None]:
        """Watch until the block ends."""
        with beside({**self._followed, "npu-reports": self._check_until_end}, self._close, _JOIN_S):
            yield

    def _close(self) -> None:
        self._ended.set()
        for follower in list(self._followers.values()):
            if follower is not None:
                follower.end()
        self._calls.put(lambda: None)

    # ---- followed collections

    def _all_followed(self) -> dict[str, Callable[[], None]]:
        """Return the function that follows each collection."""
        boards = Informer(self._api, _maps(_BOARDS), labels=_OWN)
        found = {
            "npu-chips": self._follow_chips,
            "npu-boards": lambda: self._follow_all("boards", boards, self._host_reports.take),
        }
        if self._pods.by_mindcluster:
            name, namespace = f"metadata.name={RESET_CONFIG}{self._workload}", self._pods.namespace
            resets = Informer(self._api, _maps(namespace), fields=name)
            path = collection("scheduling.volcano.sh/v1beta1", "podgroups", namespace)
            groups = Informer(self._api, path)
            take_reset = self._tells(self._recovery.take_reset)
            take_group = self._tells(self._recovery.take_group)
            found["npu-reset"] = lambda: self._follow_all("reset", resets, take_reset)
            found["npu-groups"] = lambda: self._follow_all("groups", groups, take_group)
        return found

    def _is_complete(self) -> bool:
        """Return whether the queue has had the first objects of all collections."""
        followers = dict(self._followers)
        started = all(one and one.watches for what, one in followers.items() if what != "groups")
        return started and len(followers) == len(self._followed)

    def _follow_chips(self) -> None:
        """Follow the device plugins' ConfigMaps. If the server refuses that, follow ClusterD's."""
        take = self._host_reports.take
        if self._follow("chips", Informer(self._api, _maps(_CHIPS), labels=_OWN), take) is not None:
            self._follow_all("chips", Informer(self._api, _maps(_BOARDS), labels=_CLUSTERD), take)

    def _tells(self, take: _TellsNews) -> _Takes:
        """Make a function that sends the sentences of `take` to the user."""

        def take_and_tell(thing: Object, *, there: bool) -> None:
            for sentence in take(thing, there=there):
                self._handlers.tell(sentence)

        return take_and_tell

    def _follow_all(self, what: str, follower: Informer, take: _Takes) -> None:
        """Follow a collection to the end. If the server refuses, queue a sentence about that."""
        error = self._follow(what, follower, take)
        if error is not None:
            self._followers[what] = None
            refused = (
                "Rekindle cannot read MindCluster's reports, and continues without them "
                f"(deploy/mindcluster has the rights): {error}"
            )
            self._calls.put(lambda: self._refused.append(refused))

    def _follow(self, what: str, follower: Informer, take: _Takes) -> ApiError | None:
        """Follow a collection to the end; return the error if that is impossible.

        take: the reporting thread calls it.
        """
        self._followers[what] = follower
        if self._ended.is_set():
            return None
        try:
            for thing, there in follower.changes():
                self._calls.put(functools.partial(take, thing, there=there))
        except ApiError as error:
            return error
        return None

    # ---- reports

    def _check_until_end(self) -> None:
        while not self._ended.is_set():
            complete = self._is_complete()
            with contextlib.suppress(queue.Empty):
                self._calls.get(timeout=self._pause_s)()
                while True:
                    self._calls.get_nowait()()
            self._check(complete=complete)
            self._ended.wait(_PACE_S)

    def _check(self, *, complete: bool) -> None:
        """Report new and past faults, and write new sentences."""
        holding = [*self._refused, *filter(None, [self._recovery.damage])]
        reported: dict[str, dict[_Name, HealthEvent]] = {}
        refused = False
        for place in self._places():
            known = self._reported.get(place.uid, {})
            reports = self._host_reports.of(place.host)
            node = self._handlers.node_at(place.ip)
            if node is not None:
                present = [
                    *health_events(place, reports, node, self._ranks),
                    *recovery_events(place, self._recovery.reset, node, self._ranks),
                ]
                _inherit(known, present, self._before.get(place.host, []), complete=complete)
                refused |= not self._report(known, present, node)
            reported[place.uid] = known
            holding += self._host_reports.damage(place.host)
            holding += remarks(place, reports)
        self._reported = reported
        for text in dict.fromkeys(holding):
            if text not in self._sentences:
                self._handlers.tell(text)
        self._sentences = set(holding)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S) if refused else LOOK_S

    def _places(self) -> list[Placed]:
        found = [placed(pod, self._pods.device) for pod in self._handlers.pods()]
        return [place for place in found if place is not None]

    def _report(
        self, known: dict[_Name, HealthEvent], present: list[HealthEvent], node: int
    ) -> bool:
        """Report the differences of known and present faults; return whether all were accepted."""
        now = {_name(health_event): health_event for health_event in present}
        over = [known[name] for name in known.keys() - now]
        gone = [
            msgspec.structs.replace(health_event, node=node, gone=True) for health_event in over
        ]
        taken = True
        for health_event in (*gone, *(now[name] for name in now.keys() - known)):
            try:
                self._handlers.report(health_event)
            except JobError:  # the coordinator is away, the job ends, or the node left
                taken = False
                continue
            if health_event.gone:
                del known[_name(health_event)]
            else:
                known[_name(health_event)] = health_event
        return taken


def _maps(namespace: str) -> str:
    return collection("v1", "configmaps", namespace)


def _name(health_event: HealthEvent) -> _Name:
    return health_event.source, health_event.what, health_event.device


def _inherit(
    known: dict[_Name, HealthEvent],
    present: list[HealthEvent],
    before: list[HealthEvent],
    *,
    complete: bool,
) -> None:
    """Count events of an earlier process as reported, to report them once and to report their end.

    Events whose source may only be late stay in `before`.
    """
    names = set(map(_name, present))
    for health_event in list(before):
        if complete or _name(health_event) in names:
            known[_name(health_event)] = health_event
            before.remove(health_event)
