"""What ails the hosts of a job: conditions of the cluster's nodes, as signs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster.launch import Simulated
from training_jobs.checks import assert_same_training
from training_jobs.job import pause_all
from training_jobs.pods import PodJob
from training_jobs.record import Record

from rekindle.engines.kubernetes.api import Api, load
from rekindle.engines.kubernetes.marks import NODES
from rekindle.engines.kubernetes.node_eyes import REMOVED, NodeEyes
from rekindle.engines.kubernetes.pods import Isolation
from rekindle.recovery import journal
from rekindle.recovery.classification import Sign, Source
from rekindle.recovery.codes.verdict import Urgency
from rekindle.recovery.fault import Kind
from rekindle.recovery.policy import Strategy

pytestmark = pytest.mark.timeout(300)  # a cluster, and a job in its pods

NODE_COUNT = 3
DISK = "DiskPressure=True"


class Seen:
    """What is reported and told of a job with node 0 on node-0, node 1 on node-1."""

    def __init__(self, api: Api) -> None:
        self.eyes = NodeEyes(api)
        self.signs: list[tuple[int, str, bool]] = []
        self.told: list[str] = []
        self._news = threading.Condition()
        for number in (0, 1):
            self.eyes.joined(number, f"node-{number}")

    def report(self, sign: Sign) -> None:
        assert sign.source is Source.NODE_CONDITION
        assert sign.host.startswith("node-")
        with self._news:
            self.signs.append((sign.node, sign.what, sign.gone))
            self._news.notify_all()

    def wait(self, *wanted: tuple[int, str, bool]) -> None:
        with self._news:
            assert self._news.wait_for(lambda: set(wanted) <= set(self.signs), 30), self.signs


@pytest.fixture
def seen(server: Simulated, api: Api) -> Iterator[Seen]:
    found = Seen(api)
    with found.eyes.open(found.report, found.told.append):
        yield found
    for name in ("node-0", "node-1", "node-2"):
        condition(server, name, "DiskPressure", "False")


def condition(server: Simulated, name: str, kind: str, status: str) -> None:
    node = server.get(f"{NODES}/{name}")
    conditions = [each for each in node["status"]["conditions"] if each["type"] != kind]
    conditions.append({"type": kind, "status": status, "message": "said so"})
    server.patch(f"{NODES}/{name}/status", {"status": {"conditions": conditions}})


def test_a_condition_comes_and_goes(seen: Seen, server: Simulated) -> None:
    """It is told with its words; that of a host without a node of the job is not."""
    condition(server, "node-2", "DiskPressure", "True")
    condition(server, "node-1", "DiskPressure", "True")
    seen.wait((1, DISK, False))
    condition(server, "node-1", "DiskPressure", "False")
    seen.wait((1, DISK, True))
    assert seen.signs == [(1, DISK, False), (1, DISK, True)]
    assert seen.told == [
        "node node-1 of the cluster: DiskPressure=True: said so",
        "node node-1 of the cluster: DiskPressure=True is over",
    ]


def test_a_host_that_falls_silent_and_comes_back(seen: Seen, server: Simulated) -> None:
    server.kill_node("node-1")
    seen.wait((1, "Ready=Unknown", False))
    server.revive_node("node-1")
    seen.wait((1, "Ready=Unknown", True))


def test_a_node_that_joins_where_something_is_amiss(seen: Seen, server: Simulated) -> None:
    """And one that goes elsewhere: its old host is no concern of it any more."""
    condition(server, "node-2", "DiskPressure", "True")
    condition(server, "node-0", "DiskPressure", "True")  # what was seen later is seen by then
    seen.wait((0, DISK, False))
    seen.eyes.joined(1, "node-2")
    seen.wait((1, DISK, False))
    condition(server, "node-1", "DiskPressure", "True")
    condition(server, "node-0", "DiskPressure", "False")
    seen.wait((0, DISK, True))
    assert [sign for sign in seen.signs if sign[0] == 1] == [(1, DISK, False)]


def test_a_node_that_is_taken_out_of_the_cluster(seen: Seen, server: Simulated) -> None:
    """It may come again under its name, also while nobody looked."""
    named = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-9"}}
    condition(server, "node-0", "DiskPressure", "True")
    seen.wait((0, DISK, False))  # it looks by now
    seen.eyes.joined(7, "node-9")
    server.create(NODES, named)
    server.delete(f"{NODES}/node-9")
    seen.wait((7, REMOVED, False))
    server.stop_server()
    server.start_server()
    server.create(NODES, named)
    seen.wait((7, REMOVED, True))
    server.delete(f"{NODES}/node-9")


def test_it_costs_one_list_and_one_watch(server: Simulated) -> None:
    """However many changes there are; of each node its conditions alone are kept."""
    began = time.time()
    api = load(str(server.kubeconfig))
    other = Seen(api)
    with other.eyes.open(other.report, other.told.append):
        for number in range(5):
            condition(server, "node-0", "DiskPressure", "True")
            other.wait(*[(0, DISK, False)] * (number + 1))
            condition(server, "node-0", "DiskPressure", "False")
            other.wait((0, DISK, True))
            other.signs.clear()
    asked = [each["verb"] for each in server.calls(began) if each["resource"] == "nodes"]
    assert (asked.count("list"), asked.count("watch")) == (1, 1)
    api.close()


def test_without_rights_nothing_is_watched(server: Simulated, tmp_path: Path) -> None:
    """They are optional: nothing is said, and the job's end does not wait for it."""
    token = server.token_for("stranger")
    api = load(str(server.kubeconfig_for(token, tmp_path / "config")))
    seen, began = Seen(api), time.monotonic()
    with seen.eyes.open(seen.report, seen.told.append):
        pass
    assert seen.told == []
    assert time.monotonic() - began < 10
    api.close()


def test_a_job_on_hosts_that_are_amiss(
    job: Callable[..., PodJob], cluster: Simulated, baseline: Record
) -> None:
    """What need not stop it is written down; a node whose kernel hangs is left."""
    # Cordoned, or its pod might well come back to it: nothing else is at work there.
    run = job(*pause_all(12), pods={"isolated_hosts": Isolation.CORDON})
    run.wait_pause(12)
    host = run.pod_of(1)["spec"]["nodeName"]
    node = next(e.node for e in run.events_of(journal.NodeJoined) if e.host == host)
    condition(cluster, host, "MemoryPressure", "True")

    def signs() -> dict[str, Any]:
        return {event.sign.what: event for event in run.events_of(journal.SignSeen)}

    run.wait(lambda: "MemoryPressure=True" in signs(), "the first sign in the journal")
    assert signs()["MemoryPressure=True"].urgency is Urgency.WATCH
    assert run.incidents() == []
    condition(cluster, host, "KernelDeadlock", "True")
    run.wait(lambda: "KernelDeadlock=True" in signs(), "the second sign in the journal")
    run.release_all()
    assert run.end().outcome == "succeeded", run.story()
    assert_same_training(run.record, baseline)
    first = run.incidents()[0]
    assert (first.cause.kind, first.strategy) == (Kind.NODE, Strategy.RECOVER)
    assert first.cause.node in (1, node)
    run.remove()
