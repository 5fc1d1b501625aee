"""The environment in which an agent imports the framework and starts its ranks."""

from __future__ import annotations

from typing import Any

import pytest

from rekindle import names
from rekindle.agent import fork_server
from rekindle.agent.fork_server import agent_environment
from rekindle.job.spec import EntryKind, JobSpec


@pytest.fixture(autouse=True)
def _interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"127.0.0.1": "lo", "10.0.0.1": "eth0", "10.0.0.9": "eth1"}
    monkeypatch.setattr(fork_server, "interfaces", lambda: known)


def spec(nodes: int, per_node: int) -> JobSpec:
    """Return a job of so many nodes and ranks per node."""
    return JobSpec(
        job_id="job",
        entry=EntryKind.SCRIPT,
        target="train.py",
        nodes=nodes,
        processes_per_node=per_node,
        working_directory="/work",
        directory="/job",
        log_directory="/job/logs",
        checkpoint_store="/store",
    )


@pytest.mark.parametrize(
    ("nodes", "per_node", "address", "where", "threads"),
    [
        (1, 1, names.LOOPBACK, {}, None),
        (1, 2, names.LOOPBACK, {}, "1"),
        (2, 1, names.LOOPBACK, {}, "1"),
        (2, 1, "10.0.0.1", {"simulated": True}, "1"),
        (2, 1, "10.0.0.1", {}, None),
        (2, 2, "10.0.0.1", {}, "1"),
    ],
)
def test_threads_of_a_rank(
    nodes: int, per_node: int, address: str, where: dict[str, Any], threads: str | None
) -> None:
    """All ranks of the machine count: simulated nodes share it, and nodes that meet on loopback."""
    found = agent_environment({}, spec(nodes, per_node), address, **where)
    assert found.get("OMP_NUM_THREADS") == threads
    kept = agent_environment({"OMP_NUM_THREADS": "8"}, spec(nodes, per_node), address, **where)
    assert kept["OMP_NUM_THREADS"] == "8"


def test_the_interface_of_gloo() -> None:
    """It is that of the agent's address, unless the user has set one or all nodes are here."""

    def interface(address: str, user: str = "", **where: Any) -> str | None:
        base = {"GLOO_SOCKET_IFNAME": user} if user else {}
        return agent_environment(base, spec(2, 1), address, **where).get("GLOO_SOCKET_IFNAME")

    assert interface("10.0.0.9") == "eth1"
    assert interface("10.0.0.9", "ib0") == "ib0"
    assert interface("10.0.0.7") is None  # behind a translation of addresses
    assert interface(names.LOOPBACK) is None
    assert interface("10.0.0.9", simulated=True) is None
