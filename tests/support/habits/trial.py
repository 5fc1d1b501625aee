"""One trial of a habit: a run with random faults, compared with a run that has none."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jobs import Place, Run
from repository import SUPPORT

from habits.common import STEPS, STRIKES
from habits.table import RANKS, Habit, Outcome
from rekindle.errors import JobError
from rekindle.protocol.agent import Inject, InjectionKind

SCRIPTS = SUPPORT.parent / "integration" / "habits" / "scripts"
_FIRST, _LAST = 2, STEPS - 3  # steps that a fault may hit
_LONGEST_MS = 12.0  # a step takes about half of it, so that faults also hit the time after it
_INJECTED = (InjectionKind.KILL, InjectionKind.TORN_UPDATE)


@dataclasses.dataclass(frozen=True)
class Faults:
    """The faults of one trial: rank, step, and the moment of a SIGKILL or the kind to inject."""

    strikes: tuple[tuple[int, int, float], ...]
    injected: tuple[Inject, ...]


def faults_of(seed: int, count: int = 2) -> Faults:
    """Return `count` faults, a pure function of the seed. Each rank and step has at most one."""
    draw = random.Random(seed)
    places = draw.sample([(r, s) for r in range(RANKS) for s in range(_FIRST, _LAST + 1)], count)
    strikes, injected = [], []
    for number, (rank, step) in enumerate(places):
        if (seed + number) % 2:
            injected.append(Inject(rank=rank, kind=draw.choice(_INJECTED), step=step))
        else:
            strikes.append((rank, step, round(draw.uniform(0, _LONGEST_MS), 1)))
    return Faults(tuple(strikes), tuple(injected))


class Trial:
    """One run of a habit's script in a folder of its own."""

    def __init__(self, place: Place, habit: Habit, faults: Faults) -> None:
        self.place = place
        shutil.copy(SCRIPTS / f"{habit.name}.py", place.folder / "train.py")
        environment = place.environment(
            {
                "PYTHONPATH": str(SUPPORT),
                "OMP_NUM_THREADS": "1",
                STRIKES: json.dumps(faults.strikes),
            }
        )
        options = ("--nproc-per-node", str(RANKS), "--allow-injection", *habit.options)
        self.run: Run = place.start(*options, "train.py", env=environment)
        if faults.injected:
            self.run.endpoint()
        for order in faults.injected:
            self._inject(order)

    def _inject(self, order: Inject) -> None:
        """Give the order, also if the coordinator does not know the rank yet."""

        def given() -> bool:
            if self.run.has_ended():
                return True
            try:
                self.run.client().inject(order)
            except JobError:
                return False
            return True

        self.run.wait_until(given, f"the order {order}")

    def result(self) -> dict[str, Any]:
        """Wait for a successful end. Return the values of all steps, and the digests, by rank."""
        self.run.end(0)
        found: dict[str, Any] = {}
        for rank, steps in self.run.records().items():
            found |= {f"rank {rank} step {s}": record.metrics for s, record in steps.items()}
        for file in sorted(self.place.folder.glob("end-*.json")):
            found[file.stem] = json.loads(file.read_text())
        return found

    def lost(self) -> int:
        """Return the number of steps that the incidents of the run have cost."""
        return sum(incident.steps_lost or 0 for incident in self.run.incidents())


def check(habit: Habit, seed: int, place: Callable[[str], Place], expected: dict[str, Any]) -> None:
    """Run one trial and check its outcome. expected: the result of the run without faults."""
    faults = faults_of(seed)
    with place(f"trial-{seed}") as mine:
        trial = Trial(mine, habit, faults)
        found = trial.result()
        wrong = {key for key in expected.keys() | found if expected.get(key) != found.get(key)}
        story = f"{habit.name}, seed {seed}, {faults}{trial.run.story()}"
        assert not wrong, f"other values than without faults: {sorted(wrong)[:6]}; {story}"
        most = habit.repeats * len(trial.run.incidents()) if habit.outcome is Outcome.REPEATS else 0
        assert trial.lost() <= most, f"{trial.lost()} steps were lost; {story}"


def check_refused(habit: Habit, place: Callable[[str], Place]) -> None:
    """Run a script that Rekindle refuses, and check the text and the number of finished steps."""
    with place("refused") as mine:
        trial = Trial(mine, habit, Faults(((1, 5, 0.0),) if habit.killed else (), ()))
        trial.run.end()
        story = f"{habit.name}{trial.run.story()}"
        assert trial.run.process.returncode == 1, story
        for part in habit.text.split(" ... "):
            assert part in trial.run.stderr, story
        steps = {step for steps in trial.run.records().values() for step in steps}
        assert max(steps, default=-1) <= habit.repeats, story


def undisturbed(habit: Habit, place: Callable[[str], Place]) -> dict[str, Any]:
    """Return the result of a run without faults. It has a value for each step of each rank."""
    with place("undisturbed") as mine:
        trial = Trial(mine, habit, Faults((), ()))
        found = trial.result()
        story = f"{habit.name}{trial.run.story()}"
        assert sum(key.startswith("end-") for key in found) == RANKS, story
        assert sum(key.startswith("rank") for key in found) == RANKS * STEPS, story
        # A step that a guard skips is an incident without a decision.
        assert not [each for each in trial.run.incidents() if each.strategies], story
        return found


def folder(path: Path) -> Path:
    """Create a folder and return it."""
    path.mkdir(parents=True, exist_ok=True)
    return path
