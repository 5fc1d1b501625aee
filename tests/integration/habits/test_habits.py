"""Scripts with the habits of other people: random faults change no value, or the script is refused.

`HABIT_TRIALS` is the number of trials of each habit in `make soak`, each with two faults. A failed
trial prints its seed; `-k "NAME and SEED"` selects it.
"""

from __future__ import annotations

import os
import shutil
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from habits.table import HABITS, Habit, Outcome
from habits.trial import SCRIPTS, check, check_refused, folder, undisturbed
from jobs import Place
from repository import SUPPORT
from waiting import run_command

TRIALS = int(os.environ.get("HABIT_TRIALS", "10"))
QUICK = (
    "epochs_shuffle",
    "running_loss",
    "ddp",
    "torchrun_lines",
    "grad_scaler_clipping",
    "kept_group",
    "replay_buffer",
    "own_ema",
    "guarded",
    "compile",
)
RUN = [habit for habit in HABITS if habit.outcome is not Outcome.REFUSED]
REFUSED = [habit for habit in HABITS if habit.outcome is Outcome.REFUSED]


@pytest.fixture
def place(tmp_path: Path) -> Callable[[str], Place]:
    """Return a function that returns a place for a run."""
    return lambda name: Place(folder(tmp_path / name))


def _name(habit: Habit) -> str:
    return habit.name


def _seed(habit: Habit, number: int) -> int:
    """Return another seed for each habit and number, the same in each session."""
    return zlib.crc32(habit.name.encode()) % 100_000 * 1000 + number


def test_each_script_has_a_row() -> None:
    """No script is without an expected outcome."""
    assert {habit.name for habit in HABITS} == {file.stem for file in SCRIPTS.glob("*.py")}


@pytest.mark.parametrize("habit", [habit for habit in RUN if habit.name in QUICK], ids=_name)
def test_two_faults_change_no_value(habit: Habit, place: Callable[[str], Place]) -> None:
    """After two random faults, all losses of all ranks and the state at the end are the same."""
    check(habit, _seed(habit, 0), place, undisturbed(habit, place))


def test_a_script_alone(place: Callable[[str], Place]) -> None:
    """A script that keeps its lines for torchrun also trains with `python train.py`."""
    with place("alone") as mine:
        shutil.copy(SCRIPTS / "torchrun_lines.py", mine.folder / "train.py")
        environment = mine.environment({"PYTHONPATH": str(SUPPORT)})
        done = run_command([sys.executable, "train.py"], cwd=mine.folder, env=environment)
        assert (done.returncode, done.stderr) == (0, "")
        assert (mine.folder / "end-0.json").exists()


@pytest.mark.soak
@pytest.mark.parametrize("habit", RUN, ids=_name)
def test_many_faults_change_no_value(habit: Habit, place: Callable[[str], Place]) -> None:
    """The same in many trials."""
    expected = undisturbed(habit, place)
    for number in range(1, TRIALS + 1):
        check(habit, _seed(habit, number), place, expected)


@pytest.mark.parametrize("habit", REFUSED, ids=_name)
def test_a_script_that_cannot_be_exact_is_refused(
    habit: Habit, place: Callable[[str], Place]
) -> None:
    """The job ends with an error that names the remedy, before wrong steps count."""
    check_refused(habit, place)
