"""Events of light profiling and slow ranks in the journal. Pure.

A slow rank loses nothing, it only takes all others' time; so what is done about it must cost less,
and hit nobody who is healthy. Before anybody is replaced its node is checked beside others.
"""

from __future__ import annotations

from rekindle.profiling.findings import Finding, in_words, who
from rekindle.profiling.switch import Switch
from rekindle.recovery.journal.checkpoint_events import Event
from rekindle.recovery.node_check.verdicts import NodeVerdict

BY_TRACE = "data-trace"  # MindCluster's switch


class Profiled(Event, frozen=True, kw_only=True, tag="profiled"):
    """From now on ranks write down what is on. since: when the job was told so first; by: who."""

    switch: Switch
    since: int
    by: str = ""

    def in_words(self) -> str:
        """Say what is written down."""
        what = f"ranks write down {', '.join(self.switch.words)}"
        return (what if self.switch.words else "profiling is off") + f" ({self.by})" * bool(self.by)


class Slowed(Event, frozen=True, kw_only=True, tag="slowed"):
    """Something has become slow. nodes, hosts: where; then: what follows.

    would: nothing follows, `then` is what would have, if the policy were not tried out only.
    """

    finding: Finding
    nodes: tuple[int, ...]
    hosts: tuple[str, ...] = ()
    then: str = ""
    would: bool = False

    def in_words(self) -> str:
        """Say what is slow, and what follows."""
        said = in_words(self.finding, self.nodes, self.hosts)
        return f"{said}; {'in shadow mode: ' * self.would}{self.then}" if self.then else said


class SlowOver(Event, frozen=True, kw_only=True, tag="slow-over"):
    """It is not slow any more, and nothing was done about it."""

    finding: Finding
    hosts: tuple[str, ...] = ()

    def in_words(self) -> str:
        """Say what is over."""
        return f"{who(self.finding)}: {self.finding.kind.value} is over, by itself"


class Examined(Event, frozen=True, kw_only=True, tag="examined"):
    """A node was checked while training stood still: a suspect (it is slow) or a reference."""

    node: int
    host: str
    suspect: bool
    verdict: NodeVerdict

    def in_words(self) -> str:
        """Say how the node is."""
        what = "which has become slow" if self.suspect else "as a reference node"
        where = f" on {self.host}" if self.host else ""
        return f"node {self.node}{where}, {what}, is checked: {self.verdict.in_words()}"


StragglerEvent = Slowed | SlowOver | Examined
