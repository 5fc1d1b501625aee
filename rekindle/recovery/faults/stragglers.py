"""Define the journal's events of light profiling and slow ranks. Pure.

A slow rank does not lose work; it only takes the time of the others. Therefore the reaction must
cost less, and must not affect healthy nodes. A check compares the node with others before any
replacement.
"""

from __future__ import annotations

from rekindle.profiling.findings import Finding, in_words, who
from rekindle.profiling.switch import Switch
from rekindle.recovery.journal.event import Event
from rekindle.recovery.node_check.verdicts import NodeVerdict

BY_TRACE = "data-trace"  # MindCluster's switch


class Profiled(Event, frozen=True, kw_only=True, tag="profiled"):
    """Record that ranks now record these times.

    `since` is the time of the first report to the job, and `by` is its source.
    """

    switch: Switch
    since: int
    by: str = ""

    def in_words(self) -> str:
        """Return the recorded times as text."""
        what = f"ranks record {', '.join(self.switch.words)}"
        return (what if self.switch.words else "profiling is off") + f" ({self.by})" * bool(self.by)


class Slowed(Event, frozen=True, kw_only=True, tag="slowed"):
    """Record that something has become slow.

    `nodes` and `hosts` are the place, and `then` is the reaction. `would` marks shadow mode: no
    reaction follows, and `then` is the reaction without shadow mode.
    """

    finding: Finding
    nodes: tuple[int, ...]
    hosts: tuple[str, ...] = ()
    then: str = ""
    would: bool = False

    def in_words(self) -> str:
        """Return the slow process and the reaction as text."""
        text = in_words(self.finding, self.nodes, self.hosts)
        return f"{text}; {'in shadow mode: ' * self.would}{self.then}" if self.then else text


class SlowOver(Event, frozen=True, kw_only=True, tag="slow-over"):
    """Record that it is not slow any longer, without an action."""

    finding: Finding
    hosts: tuple[str, ...] = ()

    def in_words(self) -> str:
        """Return the end of the slowness as text."""
        return f"{who(self.finding)}: {self.finding.kind.value} is over without an action"


class Examined(Event, frozen=True, kw_only=True, tag="examined"):
    """Record a check of a node while training paused: a slow node (suspect) or a reference node."""

    node: int
    host: str
    suspect: bool
    verdict: NodeVerdict

    def in_words(self) -> str:
        """Return the health of the node as text."""
        what = "which has become slow" if self.suspect else "which is a reference node"
        where = f" on {self.host}" if self.host else ""
        return f"the job checked node {self.node}{where}, {what}: {self.verdict.in_words()}"


StragglerEvent = Slowed | SlowOver | Examined
