"""Which times ranks write down: by whom that is switched, and who is told."""

from __future__ import annotations

from rekindle.coordinator.machine.job_state import ENDING
from rekindle.coordinator.machine.stragglers import Slowing
from rekindle.errors import UsageError
from rekindle.profiling.switch import Order, Switch, switched
from rekindle.protocol import agent as p
from rekindle.recovery.faults.profiled import BY_TRACE, Profiled


class Switching(Slowing):
    """What was asked for last holds, be it by a person or by MindCluster's switch."""

    def profile(self, order: Order, now: float) -> str:
        """Have ranks write down where time goes, or no more; return why not, if that cannot be."""
        if self.phase in ENDING:
            return "the job is ending"
        try:
            switch = switched(self._profile.switch, order.kinds, on=order.on)
        except UsageError as error:
            return str(error)
        if switch != self._profile.switch:
            self._switch(switch, order.by, now)
        return ""

    def on_traced(self, message: p.Traced, now: float) -> None:
        """An agent tells what MindCluster's switch says.

        Each agent does so by itself, and whoever takes a lost one's place says again what is known
        already: since then a person may have asked for something else. It is recorded also where it
        changes nothing, or the next coordinator would take it for news.
        """
        if message.switch != self._traced and self.phase not in ENDING:
            self._traced = message.switch
            self._switch(message.switch, BY_TRACE, now)

    def _switch(self, switch: Switch, by: str, now: float) -> None:
        changed, since = switch != self._profile.switch, self._profile.since or int(now)
        self._record(Profiled(switch=switch, since=since, by=by))
        if changed:
            self._profile = p.Profile(switch=switch, since=since)
            self._tell_nodes(self._profile)
