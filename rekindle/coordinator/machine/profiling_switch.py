"""The switch of light profiling, and its order to all agents."""

from __future__ import annotations

from rekindle.coordinator.machine.fleet import Fleet
from rekindle.coordinator.machine.job_state import ENDING, JobState
from rekindle.errors import UsageError
from rekindle.profiling.switch import Order, Switch, switched
from rekindle.protocol import agent as p
from rekindle.recovery.faults.profiled import BY_TRACE, Profiled


class ProfilingSwitch:
    """The last order holds, from a person or from MindCluster's switch.

    traced: the last position of MindCluster's switch.
    """

    def __init__(self, job: JobState, fleet: Fleet, traced: Switch) -> None:
        self._job = job
        self._fleet = fleet
        self.traced = traced

    @property
    def profile(self) -> p.Profile:
        """What the ranks record."""
        return self._fleet.settings.profile

    def switch(self, order: Order, now: float) -> str:
        """Switch light profiling; return why that is impossible, or nothing."""
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
        """An agent sends the position of MindCluster's switch.

        Every agent sends it, also one that replaces a lost agent. So an old position does not undo
        a person's later order. The journal gets each new position, also one that changes nothing:
        the next coordinator would take it for news.
        """
        if message.switch != self.traced and self._job.phase not in ENDING:
            self.traced = message.switch
            self._switch(message.switch, BY_TRACE, now)

    def _switch(self, switch: Switch, by: str, now: float) -> None:
        changed, since = switch != self.profile.switch, self.profile.since or int(now)
        self._job.record(Profiled(switch=switch, since=since, by=by))
        if changed:
            self._fleet.change_settings(profile=p.Profile(switch=switch, since=since))
