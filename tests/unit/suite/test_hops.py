"""The search for the hops of the architecture page in a trace."""

from architecture.hops import Hop, missing
from traced.fault import Call

PROCESSES = {"agent": (1,), "peers": (2, 3), "coordinator": (4,)}
LINES = {"end": 10, "fail": 20, "decide": 30, "arrive": 40}
HOPS = (
    Hop(1, (), False, "agent", (("a.py", "end"),)),
    Hop(2, (), False, "peers", (("p.py", "fail"),)),
    Hop(3, (1, 2), True, "coordinator", (("c.py", "decide"),)),
    Hop(4, (2, 3), False, "peers", (("p.py", "arrive"),)),
)
TRACE = (
    Call(1.0, 2, "p.py", 20),
    Call(2.0, 4, "c.py", 30),
    Call(3.0, 1, "a.py", 10),
    Call(3.0, 2, "p.py", 40),
    Call(4.0, 3, "p.py", 20),
    Call(5.0, 3, "p.py", 40),
)


def lacks(*calls: Call) -> list[str]:
    return missing(HOPS, calls, PROCESSES, lambda file, name: frozenset({LINES[name]}))


def test_a_partial_order() -> None:
    """One report is enough for a decision, and a peer does not wait for other peers."""
    assert lacks(*TRACE) == []


def test_a_call_that_is_missing() -> None:
    """missing() reports each process of a hop that lacks a call."""
    assert lacks(*TRACE[:-1]) == ["hop 4: peers 3 calls no p.py:arrive"]


def test_a_call_that_comes_too_early() -> None:
    """missing() reports a peer without a failure, and a peer that arrives before its failure."""
    assert lacks(*TRACE[1:], Call(1.0, 4, "c.py", 30)) == [
        "hop 2: peers 2 calls no p.py:fail",
    ]
    early = Call(3.5, 3, "p.py", 40)
    assert lacks(*TRACE[:-1], early) == ["hop 4: peers 3 calls no p.py:arrive"]
