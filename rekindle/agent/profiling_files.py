"""Light profiling in the agent: it reads and removes records, and reads the switch.

MindCluster mounts a job's ConfigMap `data-trace-...` as a folder of its pods, and changes the file
in it. The switch in this file holds for the whole job.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from rekindle.agent.node_state import NodeState
from rekindle.agent.threads import Problems, in_thread
from rekindle.profiling.blocked_collectives import CollectivePosition
from rekindle.profiling.files import ENV_TASK, LOOK_S, Follower, age, task_folder
from rekindle.profiling.markers import UNREADABLE, Ranges, marks
from rekindle.profiling.steps import Steps, StepTimes
from rekindle.profiling.switch import RecordLimits, Switch, read_switch, switch_of
from rekindle.protocol.agent import Message, ProfilingSwitchRead, StepTimings

# Steps a second that all ranks together report. If steps are shorter, they report only each second,
# fourth and so on. The coordinator reads and judges 40,000 a second (benchmarks/stragglers.py).
STEPS_PER_S = 4000
SWITCH = Path("/user/cluster-info/datatrace-config/profilingSwitch")
_TICK_S = 1.0


class ProfilingReader:
    """Reads the steps of a node's ranks while the ranks record them.

    folder: has the records of all ranks. environment: the ranks' environment, which names the task.
    world_size: the number of ranks in the full world.
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
        self._least_s = world_size / STEPS_PER_S  # between two steps that a rank reports
        self._ranks: dict[int, _Rank] = {}
        self._where = Path()

    def read(self) -> StepTimings | None:
        """Return the new steps. Raises OSError: records are unreadable."""
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
            if rank is None:  # earlier records do not count
                self._ranks[number] = _Rank(where / str(number))
                continue
            rank.position.formed(self._state.formed_ns)
            times = rank.read(self._least_s)
            if times:
                steps[number] = times
        return StepTimings(steps=steps) if steps else None

    def positions(self) -> dict[int, CollectivePosition]:
        """Return the position in collectives of each rank that has recorded any."""
        return {n: rank.position for n, rank in self._ranks.items() if rank.position.groups}


class _Rank:
    """One rank's records."""

    def __init__(self, folder: Path) -> None:
        self.position = CollectivePosition()
        self._follower = Follower(folder)
        self._ranges, self._steps = Ranges(), Steps()

    def read(self, least_s: float) -> tuple[StepTimes, ...]:
        """Return the steps since the last call; if there are too many, only some.

        All ranks choose the same ones. The durations of a step differ only a little between ranks,
        so one rank may choose each second step, and another each fourth. All have each fourth.
        """
        read = list(marks(self._follower.lines()))
        self.position.read(read)
        new = list(self._steps.read(self._ranges.read(read)))
        if not new:
            return ()
        usual_s = sum(each.seconds for each in new) / len(new)
        every = 1
        while every * usual_s < least_s and every < 2**20:
            every *= 2
        return tuple(each for each in new if each.step % every == 0)


class ProfilingFiles:
    """Reads and removes the records of an agent's ranks, and reads the switch.

    folder: has the records of all ranks. own: returns the agent's ranks. read: returns messages
    about their records for the coordinator; it runs in a thread. cap_bytes: the limit for all
    records.
    """

    def __init__(
        self,
        folder: Path,
        own: Callable[[], Iterable[int]],
        send: Callable[[Message], None],
        read: Callable[[], Message | None],
        switch: Path = SWITCH,
        cap_bytes: int = RecordLimits().cap_bytes,
    ) -> None:
        self._folder, self._own, self._send, self._file = folder, own, send, switch
        self._read, self._cap_bytes = read, cap_bytes
        self._last_switch: Switch | None = None
        self._problems = Problems()

    async def run(self) -> None:
        """Read switch and records without end."""
        due = time.monotonic()
        while True:
            await asyncio.sleep(_TICK_S)
            with self._outliving("the agent cannot read the profiling switch"):
                await self.report_switch()
            with self._outliving("the agent cannot read the profiling records"):
                news = await in_thread(self._read)
                if news is not None:
                    self._send(news)
            if time.monotonic() >= due:
                due = time.monotonic() + LOOK_S
                with self._outliving("the agent cannot search for old profiling records"):
                    await in_thread(age, self._folder, tuple(self._own()), self._cap_bytes)

    async def report_switch(self) -> None:
        """Send the position of the switch to the coordinator, at the start and after a change.

        Without a switch the agent sends nothing.
        """
        try:
            text = await in_thread(self._file.read_bytes)
        except FileNotFoundError:
            return
        except OSError as error:
            self._problems.report("switch", f"{self._file}: {error}")
            return
        try:
            switch = switch_of(read_switch(msgspec.json.decode(text, type=dict[str, str])).words)
        except UNREADABLE as error:
            why = f"the profiling switch {self._file} is invalid and has no effect: {error}"
            self._problems.report("switch", why)
            return
        if switch != self._last_switch:
            self._last_switch = switch
            self._send(ProfilingSwitchRead(switch=switch))

    @contextlib.contextmanager
    def _outliving(self, what: str) -> Iterator[None]:
        """Report an error once, and continue.

        A damaged file, or a bug in Rekindle, must not stop this work. For a bug the agent also
        prints the stack.
        """
        try:
            yield
        except (OSError, ValueError) as error:
            self._problems.report(what, f"{what}: {error}")
        except Exception as error:
            stack = "\n" + "".join(traceback.format_exception(error))
            self._problems.report(what, f"{what}, because of a bug in Rekindle: {error!r}", stack)
