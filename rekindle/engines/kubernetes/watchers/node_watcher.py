"""Watches the cluster's nodes while a job is steered: what ails a host of the job is reported."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rekindle.engines.kubernetes.client.access_review import may
from rekindle.engines.kubernetes.client.api import Api, Object
from rekindle.engines.kubernetes.client.errors import ApiError
from rekindle.engines.kubernetes.client.informer import Follower
from rekindle.engines.kubernetes.placement.quarantine import NODES
from rekindle.engines.kubernetes.watchers.job_watcher import BY, CLOSE_S
from rekindle.recovery.faults.classification import Sign, Source
from rekindle.recovery.faults.tables.tables import Tables
from rekindle.recovery.faults.tables.verdict import Urgency

REMOVED = "Exists=False"  # no condition of Kubernetes': the Node object was deleted

_Ailments = dict[str, str]  # conditions, as Type=Status, and what is said of them


class NodeEyes:
    """One thread that follows all nodes, if we may; of each it keeps what ails it, and no more."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._hosts: dict[int, str] = {}  # of the job's nodes now, or when they were lost
        self._ailing: dict[str, _Ailments] = {}
        self._lock = threading.Lock()
        self._report: Callable[[Sign], None] = _to_nobody

    @contextmanager
    def open(self, report: Callable[[Sign], None], tell: Callable[[str], None]) -> Iterator[None]:
        """Follow meanwhile. report: takes a sign. tell: takes a sentence."""
        self._report = report
        follower = Follower(self._api, NODES, keep=_conditions_alone)
        thread = threading.Thread(
            target=self._follow, args=[follower, tell], name="rekindle-nodes", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            follower.end()
            thread.join(CLOSE_S)

    def joined(self, node: int, host: str) -> None:
        """Know that a node of the job is on this host from now on; what ails that is reported."""
        with self._lock:
            self._hosts[node] = host
            present = list(self._ailing.get(host, ()))
        for condition in present:
            self._say(node, host, condition, gone=False)

    def _follow(self, follower: Follower, tell: Callable[[str], None]) -> None:
        try:
            if not may(self._api, "watch", "nodes"):
                return  # the agents' own lines tell of what is lost
            tables = Tables.load()
            for node, there in follower.changes():
                ailments = _ailments(node, tables) if there else {REMOVED: "it was removed"}
                self._look(node["metadata"]["name"], ailments, tell)
        except ApiError as error:
            tell(f"the nodes cannot be watched: {error}")

    def _look(self, host: str, now: _Ailments, tell: Callable[[str], None]) -> None:
        with self._lock:
            before = self._ailing.pop(host, {})
            if now:
                self._ailing[host] = now
            nodes = [node for node, where in self._hosts.items() if where == host]
        for condition in (*before.keys() - now.keys(), *now.keys() - before.keys()):
            gone = condition not in now
            if nodes:
                said = " is over" if gone else f": {now[condition]}" if now[condition] else ""
                tell(f"node {host} of the cluster: {condition}{said}")
            for node in nodes:
                self._say(node, host, condition, gone=gone)

    def _say(self, node: int, host: str, condition: str, *, gone: bool) -> None:
        sign = Sign(
            source=Source.NODE_CONDITION, what=condition, node=node, gone=gone, by=BY, host=host
        )
        self._report(sign)


def _ailments(node: Object, tables: Tables) -> _Ailments:
    """Return the conditions that the tables of faults know as anything but well."""
    return {
        f"{each['type']}={each['status']}": " ".join((each.get("message") or "").split())[:300]
        for each in (node.get("status") or {}).get("conditions") or ()
        if tables.node_condition(each["type"], each["status"]).urgency is not Urgency.NONE
    }


def _conditions_alone(node: Object) -> Object:
    """Leave out the rest, such as the images that are there: some 20 kB of each node."""
    metadata = {key: node["metadata"][key] for key in ("name", "uid", "resourceVersion")}
    conditions = (node.get("status") or {}).get("conditions") or []
    return {"metadata": metadata, "status": {"conditions": conditions}}


def _to_nobody(sign: Sign) -> None:
    """Before anybody watches."""
