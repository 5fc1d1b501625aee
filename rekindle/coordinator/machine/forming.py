"""The next generation, or the end of training, when all ranks wait."""

from __future__ import annotations

from rekindle.coordinator.machine.elasticity import Elasticity
from rekindle.coordinator.machine.fleet import Fleet
from rekindle.coordinator.machine.generations import Generations
from rekindle.coordinator.machine.job_state import ENDING, JobState, Phase
from rekindle.coordinator.machine.recovery import Recovery
from rekindle.coordinator.machine.roster import Status
from rekindle.coordinator.machine.stragglers import StragglerCheck
from rekindle.recovery.faults.fault import FaultKind, root_cause


class Forming:
    """Forms the next generation, or dismisses the ranks."""

    def __init__(
        self,
        job: JobState,
        fleet: Fleet,
        generations: Generations,
        elasticity: Elasticity,
        recovery: Recovery,
        stragglers: StragglerCheck,
    ) -> None:
        self._job = job
        self._fleet = fleet
        self._generations = generations
        self._elasticity = elasticity
        self._recovery = recovery
        self._stragglers = stragglers
        self._roster = job.roster

    def proceed(self) -> None:
        """If every rank of the world waits, form the next generation or dismiss the ranks.

        The method does nothing while a user must approve a decision, while the stragglers' nodes
        are checked, or before the ranks' store listens.
        """
        if self._job.phase in (Phase.RESTARTING, *ENDING) or not self._roster.all_are(
            Status.WAITING
        ):
            return
        if self._job.incidents.awaiting is not None:
            return
        live = {self._generations.live(rank) for rank in self._roster.world}
        if len(live) == 1 and None not in live and self._generations.are_done():
            self._generations.dismiss()
            return
        if self._job.phase is Phase.REGROUPING and self._roster.outside:
            self._fleet.take_in()  # all ranks wait already
        if (
            self._job.phase not in (Phase.REGROUPING, Phase.GATHERING)
            or self._stragglers.holds_up()
        ):
            return
        if self._generations.disagree():
            return
        self._fleet.ask_for_store()
        if not self._job.store.is_up:
            return
        faults = self._job.incidents.unanswered
        if faults and all(fault.kind is FaultKind.LINK for fault in faults):
            # Every process is alive, so only links can have failed.
            self._elasticity.put_newcomers_out()
            self._recovery.decide(root_cause(faults))
        if self._job.phase in (Phase.REGROUPING, Phase.GATHERING):
            self._generations.form()
            self._stragglers.formed()
