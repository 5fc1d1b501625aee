"""The loop over epochs: ranks die at each kind of place in it, and no value changes."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from jobs import Place
from repository import SUPPORT
from training_jobs.epochs import BATCHES, DEATHS, EPOCHS, VARIED, WORKERS

SCRIPT = SUPPORT / "training_jobs" / "epochs.py"
RANKS = 3
# In the order of the run. Each death finds the other ranks at another kind of place.
FIRST = (
    "1 evaluate -1",
    "0 block 1",
    "2 before 2",
    "0 closing 0",
    "1 evaluated 0",
    "2 returned 0",
    "0 before 6",
    "1 opening 2",
)
SECOND = (
    "2 evaluated -1",
    "2 opening 0",
    "0 before 0",
    "1 block 3",
    "2 evaluate 1",
    "0 block 8",
    "1 returned 2",
    "2 evaluate 3",
    "0 end",
)
# No other rank knows the variables of these, so all ranks return to a snapshot.
UNKNOWN = (
    *("0 after 2", "1 evaluate between 4", "2 before 5", "0 after 6", "1 evaluated between 10"),
    *("0 evaluated 2", "2 evaluated 2"),  # only rank 1 remains, at the end
)
EVERY = 2  # steps between two snapshots


def _train(
    place: Place,
    deaths: Sequence[str],
    *options: str,
    arguments: Sequence[int] = (EPOCHS,),
    varied: bool = False,
    workers: int = 0,
    all_die: bool = True,
) -> dict[str, Any]:
    """Run the script, and return the values of all steps of all ranks, and those at the end.

    all_die: the run must come to each place of a death.
    """
    environment = place.environment({"OMP_NUM_THREADS": "1", DEATHS: ",".join(deaths)})
    if varied:
        environment[VARIED] = "1"
    if workers:
        environment[WORKERS] = str(workers)
    options = ("--nproc-per-node", str(RANKS), *options, str(SCRIPT), *map(str, arguments))
    run = place.start(*options, env=environment).end(1 if len(arguments) > 1 else 0)
    died = [(place.folder / f"died-{each.replace(' ', '-', 1)}").exists() for each in deaths]
    assert all(died) if all_die else any(died)
    found: dict[str, Any] = {}
    for rank, steps in run.records().items():
        found |= {f"rank {rank} step {s}": record.metrics for s, record in steps.items()}
    for file in sorted(place.folder.glob("end-*.json")):
        found[file.stem] = json.loads(file.read_text())
    lost = sum(incident.steps_lost or 0 for incident in run.incidents())
    return {**found, "lost": lost, "story": run.story()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the values of a run without deaths."""
    with Place(tmp_path_factory.mktemp("undisturbed")) as place:
        found = _train(place, ())
    assert len(found) == RANKS * EPOCHS * BATCHES + RANKS + 2, found
    return found


@pytest.mark.parametrize(
    "deaths", [FIRST, pytest.param(SECOND, marks=pytest.mark.soak)], ids=["first", "second"]
)
def test_a_death_at_any_place_changes_no_value(
    deaths: Sequence[str], undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    """Losses, rates, draws and sums of all ranks are the same, and no step is lost."""
    with Place(tmp_path) as place:
        found = _train(place, deaths, "--max-restarts", "20")
    story = found.pop("story")
    wrong = {k: (found.get(k), v) for k, v in undisturbed.items() if k != "story"}
    wrong = {k: pair for k, pair in wrong.items() if pair[0] != pair[1]}
    assert not wrong, f"{wrong} {story}"


def test_a_death_at_an_unknown_place_changes_no_value(tmp_path: Path) -> None:
    """All ranks repeat some steps, with seeds and variables of their own."""
    folders = [tmp_path / name for name in ("undisturbed", "deaths")]
    for each in folders:
        each.mkdir()
    with Place(folders[0]) as place:
        expected = _train(place, (), varied=True)
    with Place(folders[1]) as place:
        options = ("--max-restarts", "20", "--snapshot-every", str(EVERY))
        found = _train(place, UNKNOWN, *options, varied=True)
    story, lost = found.pop("story"), found.pop("lost")
    wrong = {k: (found.get(k), v) for k, v in expected.items() if k not in ("story", "lost")}
    wrong = {k: pair for k, pair in wrong.items() if pair[0] != pair[1]}
    assert not wrong, f"{wrong} {story}"
    assert 0 < lost <= (EVERY + 1) * len(UNKNOWN), story


def _random_deaths(seed: int) -> list[str]:
    """Return places of deaths. Some ranks die at one place together, or one after the other."""
    drawn = random.Random(seed)
    batches = [
        f"{what} {n}" for n in range(EPOCHS * BATCHES) for what in ("before", "block", "after")
    ]
    whole = [f"{what} {n}" for n in range(EPOCHS) for what in ("opening", "closing", "returned")]
    whole += [f"{what} {n}" for n in range(-1, EPOCHS) for what in ("evaluate", "evaluated")]
    places = drawn.sample(batches, 4) + drawn.sample(whole, 2)
    deaths = [f"{drawn.randrange(RANKS)} {place}" for place in places]
    deaths += [f"{drawn.randrange(RANKS)} {place}" for place in drawn.sample(places, 3)]
    return sorted(set(deaths))


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(12))
def test_random_deaths_change_no_value(seed: int, tmp_path: Path) -> None:
    """Pairs of deaths, rank 0 in an evaluation, and loaders with persistent workers."""
    settings: dict[str, Any] = {"varied": seed % 2 == 1, "workers": seed % 3}
    folders = [tmp_path / name for name in ("undisturbed", "deaths")]
    for each in folders:
        each.mkdir()
    with Place(folders[0]) as place:
        expected = _train(place, (), **settings)
    deaths = _random_deaths(seed)
    with Place(folders[1]) as place:
        options = ("--max-restarts", "30", "--snapshot-every", str(EVERY))
        found = _train(place, deaths, *options, **settings, all_die=False)
    story, lost = found.pop("story"), found.pop("lost")
    wrong = {k: (found.get(k), v) for k, v in expected.items() if k not in ("story", "lost")}
    wrong = {k: pair for k, pair in wrong.items() if pair[0] != pair[1]}
    assert not wrong, f"{deaths} {wrong} {story}"
    assert lost <= (EVERY + 1) * len(deaths), story


@pytest.mark.parametrize(
    "arguments",
    [(EPOCHS, 6), pytest.param((2,), marks=pytest.mark.soak)],
    ids=["in an epoch", "more epochs"],
)
def test_a_later_run_continues_where_the_former_one_ended(
    arguments: Sequence[int], undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    """It continues in the middle of an epoch, or with more epochs."""
    with Place(tmp_path) as place:
        options = ("--checkpoint-dir", str(tmp_path / "store"), "--checkpoint-every", "5")
        before = _train(place, (), *options, arguments=arguments)
        found = _train(place, (), *options)
    assert not any(key.startswith("end") for key in before) or len(arguments) == 1
    first = min(int(key.split()[3]) for key in found.keys() - before.keys() if "step" in key)
    assert first == (6 if len(arguments) > 1 else 8)
    for key, expected in undisturbed.items():
        if key in ("story", "lost"):
            continue
        assert found[key] == expected, f"{key} {found['story']}"
