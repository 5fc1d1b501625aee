"""Isolate hosts: keep the list of them, and cordon or taint their nodes.

The change of a node is a pure function of its object. The server accepts the change only if the
node has not changed since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from urllib.parse import quote

import msgspec

from rekindle.engines.hosts import HostLog
from rekindle.engines.kubernetes import labels
from rekindle.engines.kubernetes.client.api import Api, Object, may
from rekindle.engines.kubernetes.client.api_errors import (
    ConflictError,
    ForbiddenError,
    MissingObjectError,
)
from rekindle.engines.kubernetes.manifests.settings import IsolationMode, KubernetesSettings
from rekindle.engines.kubernetes.placement.host_log import ClusterHostLog
from rekindle.errors import JobError
from rekindle.recovery.journal.host_history import AnyHostEvent, HostIsolated, fold
from rekindle.waiting import retry

NODES = "/api/v1/nodes"
_TRIES_S, _PAUSE_S = 30.0, 0.5
_UNREADABLE = "Rekindle cannot read its annotation"
_LONGEST_REASON = 300


class IsolationMark(msgspec.Struct, frozen=True, kw_only=True):
    """The reason for a node's isolation, stored in its annotation.

    `by`: the job. `namespace`: of the log of hosts that isolates it. `at`: seconds since the epoch.
    `source`: the event that caused it. If another user cordoned the node before, `ours` is False.
    """

    how: IsolationMode
    by: str
    namespace: str
    reason: str
    at: float
    source: str
    ours: bool = True

    @property
    def done(self) -> str:
        """Return a text about a node that has the mark."""
        word = "tainted" if self.how is IsolationMode.TAINT else "cordoned"
        return word if self.ours else f"{word}, but not by Rekindle"


def mark_on(node: Object) -> IsolationMark | None:
    """Read the mark of a node; an unreadable mark belongs to no namespace."""
    text = (node["metadata"].get("annotations") or {}).get(labels.ISOLATED)
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=IsolationMark)
    except msgspec.DecodeError:
        tainted = any(_is_our_taint(each) for each in _taints(node))
        how = IsolationMode.TAINT if tainted else IsolationMode.CORDON
        return IsolationMark(
            how=how, by="?", namespace="", reason=_UNREADABLE, at=0.0, source="", ours=tainted
        )


def holds(node: Object, mark: IsolationMark) -> bool:
    """Return whether the node matches its mark; False: a person has undone the change."""
    if mark.how is IsolationMode.TAINT:
        return any(_is_our_taint(each) for each in _taints(node))
    return bool(node["spec"].get("unschedulable"))


def marking(node: Object, wanted: IsolationMark) -> Object | None:
    """Return the patch that marks a node; None: no change is necessary.

    The same event does not repeat a change that a person has undone.
    """
    known = mark_on(node)
    if known is not None and (known.source == wanted.source or holds(node, known)):
        return None
    mark = msgspec.structs.replace(wanted, ours=not holds(node, wanted))
    spec: Object = {}
    if mark.ours and mark.how is IsolationMode.CORDON:
        spec["unschedulable"] = True
    elif mark.ours:
        taint = {"key": labels.ISOLATED, "value": labels.slug(mark.by), "effect": "NoSchedule"}
        spec["taints"] = [*_taints(node), taint]
    return _patch(node, spec, msgspec.json.encode(mark).decode())


def unmarking(node: Object, namespace: str) -> Object | None:
    """Return the patch that releases a node; None: it has no mark of this namespace's log.

    A node that another user had cordoned stays cordoned.
    """
    mark = mark_on(node)
    if mark is None or mark.namespace not in ("", namespace):
        return None
    spec: Object = {}
    if mark.ours and holds(node, mark):
        if mark.how is IsolationMode.CORDON:
            spec["unschedulable"] = None
        else:
            spec["taints"] = [each for each in _taints(node) if not _is_our_taint(each)] or None
    return _patch(node, spec, None)


def _patch(node: Object, spec: Object, annotation: str | None) -> Object:
    metadata = {
        "resourceVersion": node["metadata"]["resourceVersion"],
        "annotations": {labels.ISOLATED: annotation},
    }
    return {"metadata": metadata} | ({"spec": spec} if spec else {})


def _taints(node: Object) -> list[Object]:
    return list(node["spec"].get("taints") or [])


def _is_our_taint(taint: Object) -> bool:
    return bool(taint["key"] == labels.ISOLATED)


class Quarantine:
    """Marks nodes and releases them.

    Every method raises ApiError; ForbiddenError without retries.
    """

    def __init__(self, api: Api) -> None:
        self._api = api

    def put(self, host: str, mark: IsolationMark) -> None:
        """Mark a node if it exists and has no mark."""
        self._change(host, lambda node: marking(node, mark))

    def take(self, host: str, namespace: str) -> Object | None:
        """Release a node; return it as it was. None: it does not exist."""
        return self._change(host, lambda node: unmarking(node, namespace))

    def nodes(self) -> Iterable[Object]:
        """Yield all nodes of the cluster, page by page."""
        self._must_be_allowed("list")
        for page in self._api.pages(NODES):
            yield from page.get("items") or ()

    def _change(self, host: str, decide: Callable[[Object], Object | None]) -> Object | None:
        if not host:
            return None
        self._must_be_allowed("get")
        path = f"{NODES}/{quote(host, safe='')}"

        def change() -> Object | None:
            try:
                node = self._api.get(path)
                patch = decide(node)
                if patch is not None:
                    self._must_be_allowed("patch")
                    self._api.patch(path, patch)
            except MissingObjectError:
                return None
            return node

        # On a conflict the node has changed, or another node has this name.
        return retry(change, ConflictError, _TRIES_S, _PAUSE_S)

    def _must_be_allowed(self, verb: str) -> None:
        if not may(self._api, verb, "nodes"):
            raise ForbiddenError(
                f"Rekindle does not have the right to {verb} nodes (deploy/nodes has a role)",
                status=403,
            )


class Hosts:
    """The cluster's log of hosts; this machine's log has events that the cluster's could not take.

    `home`: the folder of this machine's log. `tell` takes a sentence about a problem.
    """

    def __init__(self, api: Api, pods: KubernetesSettings, home: Path) -> None:
        self.tell: Callable[[str], None] = print
        self._here = HostLog(home)
        self._log = ClusterHostLog(api, pods.namespace)
        self._marks = Quarantine(api)
        self._namespace = pods.namespace
        self._how = pods.isolated_hosts

    def isolated(self) -> tuple[str, ...]:
        """Return the hosts on which Rekindle places nothing, by the last event of each.

        Raises JobError: this machine's log is unreadable.
        """
        events = self._here.events()
        try:
            events += self._log.events()
        except JobError as error:
            self.tell(f"Rekindle does not know which hosts other machines have isolated: {error}")
        known = fold(sorted(events, key=lambda event: event.at))
        return tuple(sorted(host.host for host in known.values() if host.isolated))

    def note(self, event: AnyHostEvent) -> None:
        """Record an event of a host, and mark the node of an isolated one.

        A second call with the same event does no harm. Raises JobError: only this machine's log has
        the event, or no log has it, or the node has no mark.
        """
        try:
            self._log.append(event)
        except JobError as error:
            self._here.append(event)
            raise JobError(
                f"Rekindle recorded the event of {event.host} only on this machine: {error}"
            ) from error
        if isinstance(event, HostIsolated) and self._how is not IsolationMode.AVOID:
            try:
                self._mark(event)
            except JobError as error:
                raise JobError(
                    f"{event.host} is isolated for Rekindle's jobs, but other pods may use it: "
                    f"{error}"
                ) from error

    def _mark(self, event: HostIsolated) -> None:
        if not self._is_isolated(event):
            return  # a person has released it since
        mark = IsolationMark(
            how=self._how,
            by=event.by,
            namespace=self._namespace,
            reason=event.reason[:_LONGEST_REASON],
            at=event.at,
            source=f"{event.source}@{event.at}",
        )
        self._marks.put(event.host, mark)
        if not self._is_isolated(event):  # a person has released it during the change
            self._marks.take(event.host, self._namespace)

    def _is_isolated(self, event: HostIsolated) -> bool:
        host = self._log.hosts().get(event.host)
        return host is not None and bool(host.isolated)
