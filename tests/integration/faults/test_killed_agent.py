"""SIGKILL of the agent during a save, and during the restore of its ranks.

With one node no state is left in memory then: the only state is in the store.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from stores.servers import ENVIRONMENT, Server, rclone
from training_jobs.checks import assert_same_training, assert_samples_once
from training_jobs.injection import Fault
from training_jobs.job import STEPS, Job
from training_jobs.record import Record
from waiting import LIMIT_S

from rekindle.checkpoints.open_store import open_store
from rekindle.checkpoints.retention import Retention
from rekindle.checkpoints.store import CheckpointStore
from rekindle.checkpoints.verifying import verify
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import Policy

PROCESSES = 2
SAVING_S = 0.1  # after the first step, while the job saves: a step takes at least 5 ms
HELD = 20  # a short job is held in this step until the last kill; it is not there earlier
# These policies allow many kills, because they are not repeated errors of the script.
_POLICY = Policy(hang_timeout_s=LIMIT_S, max_recoveries=1000, max_in_row=1000)


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start an S3 server with an empty bucket."""
    with rclone(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(params=["directory", "s3"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the location of a store of each kind."""
    if request.param == "directory":
        return str(tmp_path / "store")
    server: Server = request.getfixturevalue("bucket")
    return server.location()


def assert_sound(store: CheckpointStore) -> int | None:
    """Check that all committed checkpoints are intact; return the newest step."""
    committed = [each for each in store.survey() if not each.unfinished]
    for each in committed:
        assert each.manifest, each
        assert not each.reason, each
        assert verify(store.at(each.manifest), lambda _: None) == ()
    found = store.newest()
    assert all("the write did not finish" in each.reason for each in found.passed_over)
    newest = found.checkpoint.manifest.step if found.checkpoint else None
    assert newest == (committed[0].step if committed else None)
    return newest


def kill_again_and_again(
    run: Job, store: CheckpointStore, kills: int, chance: random.Random
) -> int:
    """Kill the agent, in turn during a save and during a restore; return the kills during a save.

    The agent saves after each step, so that each moment can be in a save. The moment is random.
    """
    saving, known = 0, 0  # known: the number of events before the newest kill
    for kill in range(kills):
        restores = kill % 2 == 1
        wait_event(run, known, journal.NodeJoined if restores else journal.FirstStep)
        moment = time.monotonic() + chance.uniform(0, 3.0 if restores else SAVING_S)
        run.wait(
            lambda at=moment, first=known, until=restores: (
                time.monotonic() > at or (until and has_event(run, first, journal.FirstStep))
            ),
            "the moment of the kill",
        )
        run.kill_node(0)
        known = len(run.events())
        assert_sound(store)
        saving += any(each.unfinished for each in store.survey())
    return saving


def has_event(run: Job, first: int, kind: type[journal.Event]) -> bool:
    """Return whether the events after the first ones have one of this kind."""
    return any(isinstance(event, kind) for event in run.events()[first:])


def wait_event(run: Job, first: int, kind: type[journal.Event]) -> None:
    def there() -> bool:
        assert run.coordinator.poll() is None, f"the job has ended{run.story()}"
        return has_event(run, first, kind)

    run.wait(there, f"{kind.__name__} after {first} events")


def strike_and_end(run: Job, baseline: Record, kills: int, seed: str) -> int:
    """Kill the agent; check that the job ends with the baseline's training.

    Return how often the agent was saving.
    """
    store = open_store(run.spec.checkpoint_store, ENVIRONMENT)
    saving = kill_again_and_again(run, store, kills, random.Random(seed))
    for number in range(len(run.faults)):
        run.release(number)
    assert run.end(300).outcome == "succeeded", run.story()
    assert_same_training(run.record, baseline)
    assert_samples_once(run.record)
    assert run.leftovers() == []
    assert assert_sound(store) == baseline.total
    # Later writes remove the partial checkpoints.
    assert [each for each in store.survey() if each.unfinished] == []
    return saving


def steps_for(kills: int) -> int:
    """Return more steps than the job does before the last kill."""
    return 60 + 60 * kills


@pytest.mark.timeout(300)
def test_killed_agent(
    location: str, job: Callable[..., Job], baseline_of: Callable[..., Record]
) -> None:
    """After kills during a save and a restore the committed checkpoints are intact.

    The training equals the baseline.
    """
    held = Fault(0, "forward", HELD, life=0, do="pause", again=True)
    run = start(job, location, held, variant="ddp", steps=STEPS)
    strike_and_end(run, baseline_of("ddp", PROCESSES, STEPS), 2, location)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("variant", ["ddp", "hybrid"])  # the second: a shard on each rank
def test_agent_killed_often(
    variant: str,
    location: str,
    job: Callable[..., Job],
    baseline_of: Callable[..., Record],
) -> None:
    """After fifty kills, some during a save, the training equals the baseline."""
    kills = 50
    steps = steps_for(kills)
    baseline = baseline_of(variant, PROCESSES, steps)
    run = start(job, location, variant=variant, steps=steps)
    saving = strike_and_end(run, baseline, kills, variant)
    print(f"{variant}, {location}: {saving} of {kills} kills left an unfinished checkpoint")
    assert saving


def start(job: Callable[..., Job], location: str, *faults: Fault, **settings: object) -> Job:
    """Start a job of one node that saves after each step."""
    return job(
        *faults,
        **settings,
        processes=PROCESSES,
        checkpoint_every=1,
        keep=Retention(last=5),
        checkpoint_store=location,
        misfit=ENVIRONMENT,
        policy=_POLICY,
    )
