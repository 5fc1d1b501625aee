"""Health events from the conditions of cluster nodes, for the hosts of a job."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster.launch import Simulated
from waiting import bound_s, wait_until

from rekindle.engines.kubernetes.client.api import Api, load
from rekindle.engines.kubernetes.placement.quarantine import NODES
from rekindle.engines.kubernetes.watchers.node_watcher import REMOVED, NodeWatcher
from rekindle.recovery.faults.classification import EventSource, HealthEvent

pytestmark = pytest.mark.timeout(300)  # a cluster

DISK = "DiskPressure=True"


class EventRecorder:
    """The reports and messages for a job with node 0 on node-0 and node 1 on node-1."""

    def __init__(self, api: Api, fault_tables: str = "") -> None:
        self.watcher = NodeWatcher(api, fault_tables)
        self.events: list[tuple[int, str, bool]] = []
        self.texts: list[str] = []
        self._news = threading.Condition()
        for number in (0, 1):
            self.watcher.joined(number, f"node-{number}")

    def report(self, event: HealthEvent) -> None:
        assert event.source is EventSource.NODE_CONDITION
        assert event.host.startswith("node-")
        with self._news:
            self.events.append((event.node, event.what, event.gone))
            self._news.notify_all()

    def wait(self, *wanted: tuple[int, str, bool]) -> None:
        with self._news:
            met = self._news.wait_for(lambda: set(wanted) <= set(self.events), bound_s(30))
            assert met, self.events


@pytest.fixture
def recorder(cluster: Simulated, api: Api) -> Iterator[EventRecorder]:
    found = EventRecorder(api)
    with found.watcher.open(found.report, found.texts.append):
        yield found
    for name in ("node-0", "node-1", "node-2"):
        condition(cluster, name, "DiskPressure", "False")


def condition(cluster: Simulated, name: str, kind: str, status: str) -> None:
    node = cluster.get(f"{NODES}/{name}")
    conditions = [each for each in node["status"]["conditions"] if each["type"] != kind]
    conditions.append({"type": kind, "status": status, "message": "said so"})
    cluster.patch(f"{NODES}/{name}/status", {"status": {"conditions": conditions}})


def test_a_condition_comes_and_goes(recorder: EventRecorder, cluster: Simulated) -> None:
    """A condition of a job's host is reported with its message, and its end as well.

    A condition of another host is not reported.
    """
    condition(cluster, "node-2", "DiskPressure", "True")
    condition(cluster, "node-1", "DiskPressure", "True")
    recorder.wait((1, DISK, False))
    condition(cluster, "node-1", "DiskPressure", "False")
    recorder.wait((1, DISK, True))
    assert recorder.events == [(1, DISK, False), (1, DISK, True)]
    assert recorder.texts == [
        "node node-1 of the cluster: DiskPressure=True: said so",
        "node node-1 of the cluster: DiskPressure=True is over",
    ]


def test_a_host_that_falls_silent_and_comes_back(
    recorder: EventRecorder, cluster: Simulated
) -> None:
    cluster.kill_node("node-1")
    recorder.wait((1, "Ready=Unknown", False))
    cluster.revive_node("node-1")
    recorder.wait((1, "Ready=Unknown", True))


def test_a_node_that_joins_where_something_is_amiss(
    recorder: EventRecorder, cluster: Simulated
) -> None:
    """A node that joins gets the existing conditions of its host.

    Conditions of its earlier host are no longer reported for it.
    """
    condition(cluster, "node-2", "DiskPressure", "True")
    condition(cluster, "node-0", "DiskPressure", "True")  # later than the other
    recorder.wait((0, DISK, False))
    recorder.watcher.joined(1, "node-2")
    recorder.wait((1, DISK, False))
    condition(cluster, "node-1", "DiskPressure", "True")
    condition(cluster, "node-0", "DiskPressure", "False")
    recorder.wait((0, DISK, True))
    assert [event for event in recorder.events if event[0] == 1] == [(1, DISK, False)]


def test_a_node_that_is_taken_out_of_the_cluster(
    recorder: EventRecorder, cluster: Simulated
) -> None:
    """A removed cluster node is reported; a new one with its name ends the report.

    This also holds if the node was created while the API server was not watched.
    """
    named = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-9"}}
    condition(cluster, "node-0", "DiskPressure", "True")
    recorder.wait((0, DISK, False))  # the watch has started
    recorder.watcher.joined(7, "node-9")
    cluster.create(NODES, named)
    cluster.delete(f"{NODES}/node-9")
    recorder.wait((7, REMOVED, False))
    cluster.stop_server()
    cluster.start_server()
    cluster.create(NODES, named)
    recorder.wait((7, REMOVED, True))
    cluster.delete(f"{NODES}/node-9")


def test_a_condition_of_the_users_own_tables(cluster: Simulated, api: Api, tmp_path: Path) -> None:
    """A condition in the user's table is reported like those in Rekindle's tables."""
    tables = tmp_path / "own.toml"
    tables.write_text(
        "[[node_condition]]\nconditions = ['FanBroken']\nstatus = ['True']\n"
        "kind = 'node'\nsays = 'a fan stands still'\n"
    )
    recorder = EventRecorder(api, str(tables))
    with recorder.watcher.open(recorder.report, recorder.texts.append):
        condition(cluster, "node-0", "FanBroken", "True")
        recorder.wait((0, "FanBroken=True", False))
        condition(cluster, "node-0", "FanBroken", "False")
        recorder.wait((0, "FanBroken=True", True))


@pytest.mark.parametrize("text", ["", "[[node_condition]]\n"], ids=["not here", "wrong"])
def test_tables_that_cannot_be_read_here(
    text: str, cluster: Simulated, api: Api, tmp_path: Path
) -> None:
    """An unreadable or invalid table file causes a message with its path.

    If the file is missing, conditions of Rekindle's tables are still reported.
    """
    tables = tmp_path / "own.toml"
    if text:
        tables.write_text(text)
    recorder = EventRecorder(api, str(tables))
    with recorder.watcher.open(recorder.report, recorder.texts.append):
        wait_until(lambda: recorder.texts, "a sentence about the file")
        if not text:
            condition(cluster, "node-0", "DiskPressure", "True")
            recorder.wait((0, DISK, False))
            condition(cluster, "node-0", "DiskPressure", "False")
            recorder.wait((0, DISK, True))
    assert str(tables) in recorder.texts[0]


def test_it_costs_one_list_and_one_watch(cluster: Simulated) -> None:
    """The watcher does one list and one watch, for any number of changes."""
    began = time.time()
    api = load(str(cluster.kubeconfig))
    other = EventRecorder(api)
    with other.watcher.open(other.report, other.texts.append):
        for number in range(5):
            condition(cluster, "node-0", "DiskPressure", "True")
            other.wait(*[(0, DISK, False)] * (number + 1))
            condition(cluster, "node-0", "DiskPressure", "False")
            other.wait((0, DISK, True))
            other.events.clear()
    asked = [each["verb"] for each in cluster.calls(began) if each["resource"] == "nodes"]
    assert (asked.count("list"), asked.count("watch")) == (1, 1)
    api.close()


def test_without_rights_nothing_is_watched(cluster: Simulated, tmp_path: Path) -> None:
    """Without rights on nodes the watcher reports nothing and sends at most one request."""
    token = cluster.token_for("stranger")
    api = load(str(cluster.kubeconfig_for(token, tmp_path / "config")))
    recorder, began = EventRecorder(api), time.time()
    with recorder.watcher.open(recorder.report, recorder.texts.append):
        pass
    assert recorder.texts == []
    user = "system:serviceaccount:default:stranger"
    assert len(cluster.calls(began, user)) <= 1
    api.close()
