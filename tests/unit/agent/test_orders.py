"""The agent has a handler for each order of the coordinator."""

from types import SimpleNamespace
from typing import Any, get_args

from jobs.driver import spec_of

from rekindle.agent.node_state import NodeState
from rekindle.agent.ranks import RankSupervisor
from rekindle.protocol import agent as p

# `Agent._listen`, `Agent._handle_orders` and `RankSupervisor.handle` take these by name.
BY_HAND = {p.Bye, p.Welcome, p.Promote, p.Spawn, p.HostStore, *p.CheckOrder}


def test_each_order_has_a_handler() -> None:
    """The table of orders, and those handled by hand, are all messages to an agent."""
    snapshots: Any = SimpleNamespace(dump=print, write_parts=print, commit=print)
    ranks = RankSupervisor(spec_of(nodes=1, processes=1), snapshots, print, {}, NodeState(1))
    assert set(ranks._orders) | BY_HAND == set(get_args(p.ToAgent))
