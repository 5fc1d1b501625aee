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


class Seen:
    """The reports and messages for a job with node 0 on node-0 and node 1 on node-1."""

    def __init__(self, api: Api, fault_tables: str = "") -> None:
        self.eyes = NodeWatcher(api, fault_tables)
        self.signs: list[tuple[int, str, bool]] = []
        self.told: list[str] = []
        self._news = threading.Condition()
        for number in (0, 1):
            self.eyes.joined(number, f"node-{number}")

    def report(self, sign: HealthEvent) -> None:
        assert sign.source is EventSource.NODE_CONDITION
        assert sign.host.startswith("node-")
        with self._news:
            self.signs.append((sign.node, sign.what, sign.gone))
            self._news.notify_all()

    def wait(self, *wanted: tuple[int, str, bool]) -> None:
        with self._news:
            met = self._news.wait_for(lambda: set(wanted) <= set(self.signs), bound_s(30))
            assert met, self.signs


@pytest.fixture
def seen(cluster: Simulated, api: Api) -> Iterator[Seen]:
    found = Seen(api)
    with found.eyes.open(found.report, found.told.append):
        yield found
    for name in ("node-0", "node-1", "node-2"):
        condition(cluster, name, "DiskPressure", "False")


def condition(cluster: Simulated, name: str, kind: str, status: str) -> None:
    node = cluster.get(f"{NODES}/{name}")
    conditions = [each for each in node["status"]["conditions"] if each["type"] != kind]
    conditions.append({"type": kind, "status": status, "message": "said so"})
    cluster.patch(f"{NODES}/{name}/status", {"status": {"conditions": conditions}})


def test_a_condition_comes_and_goes(seen: Seen, cluster: Simulated) -> None:
    """A condition of a job's host is reported with its message, and its end as well.

    A condition of another host is not reported.
    """
    condition(cluster, "node-2", "DiskPressure", "True")
    condition(cluster, "node-1", "DiskPressure", "True")
    seen.wait((1, DISK, False))
    condition(cluster, "node-1", "DiskPressure", "False")
    seen.wait((1, DISK, True))
    assert seen.signs == [(1, DISK, False), (1, DISK, True)]
    assert seen.told == [
        "node node-1 of the cluster: DiskPressure=True: said so",
        "node node-1 of the cluster: DiskPressure=True is over",
    ]


def test_a_host_that_falls_silent_and_comes_back(seen: Seen, cluster: Simulated) -> None:
    cluster.kill_node("node-1")
    seen.wait((1, "Ready=Unknown", False))
    cluster.revive_node("node-1")
    seen.wait((1, "Ready=Unknown", True))


def test_a_node_that_joins_where_something_is_amiss(seen: Seen, cluster: Simulated) -> None:
    """A node that joins gets the existing conditions of its host.

    Conditions of its earlier host are no longer reported for it.
    """
    condition(cluster, "node-2", "DiskPressure", "True")
    condition(cluster, "node-0", "DiskPressure", "True")  # later than the other
    seen.wait((0, DISK, False))
    seen.eyes.joined(1, "node-2")
    seen.wait((1, DISK, False))
    condition(cluster, "node-1", "DiskPressure", "True")
    condition(cluster, "node-0", "DiskPressure", "False")
    seen.wait((0, DISK, True))
    assert [sign for sign in seen.signs if sign[0] == 1] == [(1, DISK, False)]


def test_a_node_that_is_taken_out_of_the_cluster(seen: Seen, cluster: Simulated) -> None:
    """A removed cluster node is reported; a new one with its name ends the report.

    This also holds if the node was created while the API server was not watched.
    """
    named = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-9"}}
    condition(cluster, "node-0", "DiskPressure", "True")
    seen.wait((0, DISK, False))  # the watch has started
    seen.eyes.joined(7, "node-9")
    cluster.create(NODES, named)
    cluster.delete(f"{NODES}/node-9")
    seen.wait((7, REMOVED, False))
    cluster.stop_server()
    cluster.start_server()
    cluster.create(NODES, named)
    seen.wait((7, REMOVED, True))
    cluster.delete(f"{NODES}/node-9")


def test_a_condition_of_the_users_own_tables(cluster: Simulated, api: Api, tmp_path: Path) -> None:
    """A condition in the user's table is reported like those in Rekindle's tables."""
    tables = tmp_path / "own.toml"
    tables.write_text(
        "[[node_condition]]\nconditions = ['FanBroken']\nstatus = ['True']\n"
        "kind = 'node'\nsays = 'a fan stands still'\n"
    )
    seen = Seen(api, str(tables))
    with seen.eyes.open(seen.report, seen.told.append):
        condition(cluster, "node-0", "FanBroken", "True")
        seen.wait((0, "FanBroken=True", False))
        condition(cluster, "node-0", "FanBroken", "False")
        seen.wait((0, "FanBroken=True", True))


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
    seen = Seen(api, str(tables))
    with seen.eyes.open(seen.report, seen.told.append):
        wait_until(lambda: seen.told, "a sentence about the file")
        if not text:
            condition(cluster, "node-0", "DiskPressure", "True")
            seen.wait((0, DISK, False))
            condition(cluster, "node-0", "DiskPressure", "False")
            seen.wait((0, DISK, True))
    assert str(tables) in seen.told[0]


def test_it_costs_one_list_and_one_watch(cluster: Simulated) -> None:
    """The watcher does one list and one watch, for any number of changes."""
    began = time.time()
    api = load(str(cluster.kubeconfig))
    other = Seen(api)
    with other.eyes.open(other.report, other.told.append):
        for number in range(5):
            condition(cluster, "node-0", "DiskPressure", "True")
            other.wait(*[(0, DISK, False)] * (number + 1))
            condition(cluster, "node-0", "DiskPressure", "False")
            other.wait((0, DISK, True))
            other.signs.clear()
    asked = [each["verb"] for each in cluster.calls(began) if each["resource"] == "nodes"]
    assert (asked.count("list"), asked.count("watch")) == (1, 1)
    api.close()


def test_without_rights_nothing_is_watched(cluster: Simulated, tmp_path: Path) -> None:
    """Without rights on nodes the watcher reports nothing and sends at most one request."""
    token = cluster.token_for("stranger")
    api = load(str(cluster.kubeconfig_for(token, tmp_path / "config")))
    seen, began = Seen(api), time.time()
    with seen.eyes.open(seen.report, seen.told.append):
        pass
    assert seen.told == []
    user = "system:serviceaccount:default:stranger"
    assert len(cluster.calls(began, user)) <= 1
    api.close()
