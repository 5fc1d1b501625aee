"""What the journal tells of light profiling. Pure."""

from __future__ import annotations

from rekindle.profiling.switch import Switch
from rekindle.recovery.journal.checkpoint_events import Event

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
