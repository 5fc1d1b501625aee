"""The pods that are nodes, and the pods that the engine must end, from the journal."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from rekindle import names
from rekindle.engines.kubernetes.client.pod_status import pod_status
from rekindle.engines.kubernetes.labels import ROLE, Role
from rekindle.engines.kubernetes.placement.pod_membership import LostPods, PodMembership
from rekindle.recovery.journal import journal

BEGAN = 1_700_000_000.0
LEFT = "host-1"


def stamp(at: float) -> str:
    return datetime.datetime.fromtimestamp(at, datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def pod(name: str, ip: str, host: str, *, created: float = BEGAN, **status: Any) -> dict[str, Any]:
    """Return a pod whose container runs since its creation."""
    running = {
        "name": "node",
        "restartCount": 0,
        "state": {"running": {"startedAt": stamp(created)}},
    }
    return {
        "metadata": {
            "name": name,
            "uid": name,
            "labels": {ROLE: Role.WORKER.value},
            "creationTimestamp": stamp(created),
        },
        "spec": {"nodeName": host},
        "status": {
            "phase": "Running",
            "podIP": ip,
            "containerStatuses": [running],
            **status,
        },
    }


NODES = [pod("a", "10.0.0.1", "host-0"), pod("b", "10.0.0.2", LEFT)]
RESTARTS = pod("c", "10.0.0.3", LEFT, created=BEGAN + 60)
ELSEWHERE = pod("d", "10.0.0.4", "host-2", created=BEGAN + 60)


def joined(node: int, address: str, at: float = BEGAN + 10) -> journal.NodeJoined:
    return journal.NodeJoined(node=node, address=address, pid=1, host="", at=at)


def isolated(node: int) -> journal.Isolated:
    return journal.Isolated(incident=1, node=node, host=LEFT, reason="it is sick")


def left(node: int) -> journal.NodeLeft:
    return journal.NodeLeft(node=node, address="", pid=1, reason="it is sick", replaced=True)


def membership_after(*events: journal.AnyEvent, keeps_off: bool = True) -> PodMembership:
    """Return the membership of two nodes after these events."""
    members = PodMembership(keeps_off=keeps_off)
    for event in (joined(0, "10.0.0.1"), joined(1, "10.0.0.2"), *events):
        members.learn(event)
    return members


def ending(members: PodMembership, gone: LostPods, *pods: dict[str, Any]) -> list[str]:
    return [each["metadata"]["name"] for each in members.to_end([*NODES, *pods], gone)]


def test_times_are_read_on_every_python() -> None:
    assert pod_status(NODES[0]).created == BEGAN


def test_of_a_lost_node_the_pod_that_still_runs() -> None:
    """The engine ends the running pod of a lost node, and not its replacement.

    The replacement may have the same address.
    """
    members = membership_after()
    gone = members.take_gone(1)
    again = pod("e", "10.0.0.2", "host-2", created=BEGAN + 60)
    assert ending(members, gone, again) == ["b"]
    assert ending(members, members.take_gone(1)) == []


def test_one_that_was_sent_away_is_asked_for_once() -> None:
    members = membership_after(left(1))
    assert ending(members, members.take_gone(names.SPARE)) == ["b"]
    assert ending(members, members.take_gone(1)) == []


@pytest.mark.parametrize("keeps_off", [True, False])
def test_what_waits_on_a_host_that_was_left(keeps_off: bool) -> None:
    """If new pods avoid the isolated host, the engine ends a pod that waits there.

    Otherwise the pod stays, because the next pod could have the same host.
    """
    members = membership_after(
        isolated(1), left(1), joined(1, "10.0.0.4", BEGAN + 70), keeps_off=keeps_off
    )
    gone = members.take_gone(names.SPARE)
    assert ending(members, gone, RESTARTS, ELSEWHERE) == (["b", "c"] if keeps_off else ["b"])
    assert ending(members, LostPods(), RESTARTS, ELSEWHERE) == (["b", "c"] if keeps_off else [])


def test_a_node_that_goes_on_there_is_left_alone() -> None:
    """On an isolated host, the engine keeps the pod of a node that had no fault."""
    members = membership_after(isolated(0))
    assert ending(members, LostPods(), RESTARTS) == ["c"]


def test_a_coordinators_pod_is_no_nodes() -> None:
    members = membership_after(isolated(0))
    coordinator = pod("c", "10.0.0.9", LEFT)
    coordinator["metadata"]["labels"][ROLE] = Role.COORDINATOR.value
    assert ending(members, LostPods(), coordinator) == []


def test_one_that_ends_or_has_ended_is_left_alone() -> None:
    members = membership_after(isolated(1))
    over = pod("c", "10.0.0.3", LEFT, phase="Failed")
    ends = pod("d", "10.0.0.4", LEFT)
    ends["metadata"]["deletionTimestamp"] = stamp(BEGAN)
    assert ending(members, LostPods(), over, ends) == []


def test_another_attempt_knows_of_no_isolated_hosts() -> None:
    again = journal.JobStarted(job_id="j", attempt=1, nodes=2, processes_per_node=1, pid=1)
    assert membership_after(isolated(1), again).isolated == frozenset()
