"""Findings in words. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rekindle.profiling.findings import Finding, Slow

MOST = 16  # ranks that are named


def nodes_of(found: Finding, per_node: int) -> tuple[int, ...]:
    """Return the nodes that the finding is about; their ranks are numbered one after the other."""
    return tuple(sorted({rank // per_node for rank in found.ranks}))


def who(found: Finding) -> str:
    """Name its ranks, of very many the first."""
    shown = ", ".join(map(str, found.ranks[:MOST])) + ", ..." * (len(found.ranks) > MOST)
    return f"rank{'s' * (len(found.ranks) > 1)} {shown}"


def _where(nodes: Sequence[int]) -> str:
    several = "s" * (len(nodes) > 1)
    return f"node{several} {', '.join(map(str, nodes[:MOST]))}" + ", ..." * (len(nodes) > MOST)


def forward_in_words(found: Finding, nodes: Sequence[int]) -> str:
    """Say whose forward pass has become longer, where nothing else can be told."""
    since = f"since step {found.since}, seen in step {found.found}"
    longer = f"the forward pass takes {found.factor:.3g} times as long as before, {since}"
    return f"{who(found)} ({_where(nodes)}): {longer}; in plain DDP it waits for nobody there"


def in_words(found: Finding, nodes: Sequence[int], hosts: Sequence[str] = ()) -> str:
    """Say what is slow, where, since when, and what that costs."""
    on = f" on {', '.join(hosts)}" if any(hosts) and len(hosts) <= MOST else ""
    subject = f"{who(found)} ({_where(nodes)}{on})"
    since = f"since step {found.since}, seen in step {found.found}"
    cost = f"; it costs {found.cost:.0%} of each step" if found.cost else ""
    times = f"{found.factor:.3g} times"
    match found.kind:
        case Slow.UNEVEN:
            since = f"since step {found.since}" if found.since else "since records began"
            return f"{subject}: {times} the work of its peers {since}; not sick"
        case Slow.LINK:
            slow = f"collectives of {found.group} take {times} as long"
            return f"{subject}: {slow}, though nobody comes late to them, {since}{cost}"
        case Slow.LOADING:
            return f"{subject}: waits {times} as long for its data, {since}{cost}"
        case Slow.SAVING:
            return f"{subject}: saves take {times} as long, {since}{cost}"
        case _:
            return f"{subject}: computes {times} as long as before, {since}{cost}"
