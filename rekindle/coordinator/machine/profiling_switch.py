"""Which times ranks write down: by whom that is switched, and who is told."""

from __future__ import annotations

from rekindle.coordinator.machine.fleet import Fleet
from rekindle.coordinator.machine.inheritance import Earlier
from rekindle.coordinator.machine.job_state import ENDING, JobState
from rekindle.errors import UsageError
from rekindle.profiling.switch import Order, Switch, switched
from rekindle.protocol import agent as p
from rekindle.recovery.faults.profiled import BY_TRACE, Profiled


class ProfilingSwitch:
    """What was asked for last holds, be it by a person or by MindCluster's switch.

    profile: what ranks write down. traced: what MindCluster's switch last said.
    """

    def __init__(self, job: JobState, fleet: Fleet, earlier: Earlier) -> None:
        self._job = job
        self._fleet = fleet
        self.profile, self.traced = earlier.profile, earlier.traced

    def switch(self, order: Order, now: float) -> str:
        """Have ranks write down where time goes, or no more; return why not, if that cannot be."""
        if self._job.phase in ENDING:
            return "the job is ending"
        try:
            switch = switched(self.profile.switch, order.kinds, on=order.on)
        except UsageError as error:
            return str(error)
        if switch != self.profile.switch:
            self._switch(switch, order.by, now)
        return ""

    def on_traced(self, message: p.Traced, now: float) -> None:
        """An agent tells what MindCluster's switch says.

        Each agent does so by itself, and whoever takes a lost one's place says again what is known
        already: since then a person may have asked for something else. It is recorded also where it
        changes nothing, or the next coordinator would take it for news.
        """
        if message.switch != self.traced and self._job.phase not in ENDING:
            self.traced = message.switch
            self._switch(message.switch, BY_TRACE, now)

    def _switch(self, switch: Switch, by: str, now: float) -> None:
        changed, since = switch != self.profile.switch, self.profile.since or int(now)
        self._job.record(Profiled(switch=switch, since=since, by=by))
        if changed:
            self.profile = p.Profile(switch=switch, since=since)
            self._fleet.tell_nodes(self.profile)
