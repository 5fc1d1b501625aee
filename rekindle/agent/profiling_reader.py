"""Reads what a node's ranks write down of their steps, for the coordinator to compare them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rekindle.agent.node_state import NodeState
from rekindle.profiling.blocked_collectives import Standing
from rekindle.profiling.files import ENV_TASK, Follower, task_folder
from rekindle.profiling.markers import Ranges, marks
from rekindle.profiling.steps import Steps, StepTimes
from rekindle.protocol.agent import Timed

# Steps a second that all ranks together tell of: of shorter ones only each second, fourth and so on
# is told. The coordinator reads and judges 40,000 a second (benchmarks/stragglers.py).
STEPS_PER_S = 4000


class RecordReader:
    """Reads the steps of a node's ranks, while they record them.

    folder: has the records of all ranks. environment: the ranks'; it names the task. world_size:
    ranks in the full world.
    """

    def __init__(
        self,
        folder: Path,
        environment: Mapping[str, str],
        state: NodeState,
        world_size: int,
    ) -> None:
        self._folder, self._task = folder, environment.get(ENV_TASK, "")
        self._state = state
        self._least_s = world_size / STEPS_PER_S  # between two steps that a rank tells of
        self._ranks: dict[int, _Rank] = {}
        self._where = Path()

    def read(self) -> Timed | None:
        """Return what is new. Raises OSError: records cannot be read."""
        asked = self._state.profile
        if not asked.switch.step:
            self._ranks.clear()
            return None
        where = task_folder(self._folder, self._task, asked.since)
        if where != self._where:
            self._where = where
            self._ranks.clear()
        steps = {}
        for number in self._state.ranks:
            rank = self._ranks.get(number)
            if rank is None:  # what was written before is over
                self._ranks[number] = _Rank(where / str(number))
                continue
            rank.standing.formed(self._state.formed_ns)
            times = rank.read(self._least_s)
            if times:
                steps[number] = times
        return Timed(steps=steps) if steps else None

    def standings(self) -> dict[int, Standing]:
        """Return where each rank stands that has ever told of a collective."""
        return {n: rank.standing for n, rank in self._ranks.items() if rank.standing.groups}


class _Rank:
    """One rank's records."""

    def __init__(self, folder: Path) -> None:
        self.standing = Standing()
        self._follower = Follower(folder)
        self._ranges, self._steps = Ranges(), Steps()

    def read(self, least_s: float) -> tuple[StepTimes, ...]:
        """Return the steps since the last call; of too many only some, the same of all ranks.

        Ranks differ a little in how long a step takes, but not by much: of two that choose each
        second and each fourth step, all have each fourth.
        """
        read = list(marks(self._follower.lines()))
        self.standing.read(read)
        new = list(self._steps.read(self._ranges.read(read)))
        if not new:
            return ()
        usual_s = sum(each.seconds for each in new) / len(new)
        every = 1
        while every * usual_s < least_s and every < 2**20:
            every *= 2
        return tuple(each for each in new if each.step % every == 0)
