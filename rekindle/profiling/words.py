"""Findings in words. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rekindle.profiling.detector import Finding, Slow


def nodes_of(found: Finding, per_node: int) -> tuple[int, ...]:
    """Return the nodes that the finding is about; their ranks are numbered one after the other."""
    return tuple(sorted({rank // per_node for rank in found.ranks}))


def who(found: Finding) -> str:
    """Name its ranks."""
    return f"rank{'s' * (len(found.ranks) > 1)} {', '.join(map(str, found.ranks))}"


def in_words(found: Finding, nodes: Sequence[int], hosts: Sequence[str] = ()) -> str:
    """Say what is slow, where, since when, and what that costs."""
    where = f"node{'s' * (len(nodes) > 1)} {', '.join(map(str, nodes))}"
    on = f" on {', '.join(hosts)}" if any(hosts) else ""
    subject = f"{who(found)} ({where}{on})"
    since = f"since step {found.since}, seen in step {found.found}"
    cost = f"; it costs {found.cost:.0%} of each step" if found.cost else ""
    times = f"{found.factor:.3g} times"
    match found.kind:
        case Slow.UNEVEN:
            return f"{subject}: {times} the work of its peers from the start; not sick"
        case Slow.LOADING:
            return f"{subject}: waits {times} as long for its data, {since}{cost}"
        case Slow.SAVING:
            return f"{subject}: saves take {times} as long, {since}"
        case _:
            return f"{subject}: computes {times} as long as before, {since}{cost}"
