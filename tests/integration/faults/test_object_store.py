"""Jobs with checkpoints in an object store: a real S3 server and real kills."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from stores.servers import ENVIRONMENT, SECRET_KEY, Server, rclone
from training_jobs import RANKS
from training_jobs.baselines import Baselines
from training_jobs.checks import (
    assert_recovered,
    assert_same_training,
    assert_samples_once,
    steps_lost,
)
from training_jobs.injection import Fault
from training_jobs.job import Job, pause_all

from rekindle.checkpoints.location import S3Location, parse
from rekindle.checkpoints.open_store import open_store
from rekindle.checkpoints.verifying import verify
from rekindle.recovery.journal import journal

TWO = 2  # ranks


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start an S3 server with an empty bucket."""
    with rclone(tmp_path_factory.mktemp("s3")) as server:
        yield server


def flip(server: Server, location: str, name: str) -> None:
    """Change a byte in the middle of an object."""
    where = parse(location)
    assert isinstance(where, S3Location)
    with contextlib.closing(server.client()) as client:
        place = {"Bucket": where.bucket, "Key": where.root + name}
        data = bytearray(client.get_object(**place)["Body"].read())
        data[len(data) // 2] ^= 0x40
        client.put_object(**place, Body=bytes(data))


def flip_newest(server: Server, location: str) -> str:
    """Change a byte of the newest checkpoint; return its location."""
    store = open_store(location, ENVIRONMENT)
    [newest, *_] = store.survey()
    assert newest.manifest
    [entry] = newest.manifest.files
    [name] = re.findall(r"step-\d+-g\d+", newest.location)
    flip(server, store.location, f"{name}/{entry.file}")
    return newest.location


def lose_all_nodes(run: Job) -> None:
    """Kill all nodes in step 12, when the checkpoint of step 10 exists."""
    run.wait_pause(12)
    run.wait_event(journal.Checkpointed, step=10)
    run.kill_node(0, 1)
    run.release_all()


def assert_restored(run: Job) -> None:
    """Check that new nodes got the state from the store, and that no file has a secret."""
    again = run.events_of(journal.Formed)[1]
    assert (again.step, again.sources) == (10, {"checkpoint": run.record.ranks})
    assert steps_lost(run)[0] == 2
    kept = (run.spec.directory, run.spec.log_directory)
    for file in (each for folder in kept for each in Path(folder).rglob("*") if each.is_file()):
        if file.name != "job.json":  # other users cannot read it
            assert SECRET_KEY.encode() not in file.read_bytes(), file
    assert Path(run.spec.directory, "job.json").stat().st_mode & 0o077 == 0


def test_all_nodes_of_shards_lost(
    bucket: Server, job: Callable[..., Job], baseline_of: Baselines
) -> None:
    """Each rank of the new nodes loads its shard from the store."""
    settings = {"nodes": 2, "checkpoint_every": 10, "checkpoint_store": bucket.location()}
    run = job(*pause_all(12), variant="sharded", misfit=ENVIRONMENT, **settings)
    lose_all_nodes(run)
    assert_recovered(run, baseline_of("sharded"), replaced=range(RANKS))
    assert_restored(run)


@dataclass
class Story:
    """A job of two attempts, with their events and the checkpoint damaged between them."""

    job: Job
    first: list[journal.AnyEvent] = field(default_factory=list)
    second: list[journal.AnyEvent] = field(default_factory=list)
    damaged: str = ""


def fail_after_a_loss(run: Job) -> None:
    """Run the first attempt: all nodes are lost, and later the script fails."""
    run.start()
    lose_all_nodes(run)
    run.wait_fault(TWO)
    run.wait_event(journal.Checkpointed, step=15)
    run.release(TWO)
    assert run.end().outcome == "failed", run.story()


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    """Run two attempts; between them a byte of the newest checkpoint changes.

    In the second attempt the server is stopped from step 13 to step 18.
    """
    root = tmp_path_factory.mktemp("s3") / "root"
    ends = (
        Fault(0, "forward", 16, life=0, do="pause"),
        Fault(0, "forward", 18, life=0, do="raise"),
    )
    settings = {"processes": TWO, "nodes": 2, "checkpoint_every": 5, "misfit": ENVIRONMENT}
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(contextlib.ExitStack())
        first = server.enter_context(rclone(root))
        run = Job(
            tmp_path_factory.mktemp("job"),
            *pause_all(12, TWO),
            *ends,
            checkpoint_store=first.location("job"),
            **settings,
        )
        stack.callback(run.__exit__)
        fail_after_a_loss(run)
        result = Story(run, first=run.events())
        result.damaged = flip_newest(first, run.spec.checkpoint_store)
        run.plan(*(Fault(0, "forward", step, life=0, do="pause") for step in (13, 18)))
        run.start()
        run.wait_fault(0)
        server.close()
        run.release(0)
        run.wait_fault(1)
        server.enter_context(rclone(root, first.port))
        run.release(1)
        assert run.end().outcome == "succeeded", run.story()
        assert run.leftovers() == []
        found = open_store(run.spec.checkpoint_store, ENVIRONMENT).newest()
        assert found.checkpoint is not None
        assert (found.checkpoint.manifest.step, found.passed_over) == (24, ())
    result.second = run.events()[len(result.first) :]
    return result


def test_all_nodes_lost(story: Story) -> None:
    assert_restored(story.job)


def test_next_attempt(story: Story) -> None:
    """The ranks start with the checkpoint before the damaged one; the journal has the reason."""
    skipped = [e for e in story.second if isinstance(e, journal.CheckpointSkipped)]
    assert {each.path for each in skipped} == {story.damaged}
    assert all("checksum" in each.reason for each in skipped)
    formed = next(e for e in story.second if isinstance(e, journal.Formed))
    assert (formed.step, formed.sources) == (10, {"checkpoint": TWO})


def test_server_that_is_gone(story: Story) -> None:
    """Training continues without the server; the agent writes the due checkpoints afterwards."""
    assert not any(isinstance(event, journal.CheckpointFailed) for event in story.second)
    assert not any(isinstance(event, journal.FaultSeen) for event in story.second)
    assert len([event for event in story.second if isinstance(event, journal.Formed)]) == 1


def test_the_training_is_that_of_an_undisturbed_run(story: Story, baseline_of: Baselines) -> None:
    assert_same_training(story.job.record, baseline_of("ddp", TWO))
    assert_samples_once(story.job.record)


def test_two_jobs_with_one_place(
    bucket: Server, job: Callable[..., Job], baseline_of: Baselines
) -> None:
    """If two jobs of one name share a store by mistake, neither changes the other's checkpoints."""
    location = bucket.location()
    settings = {"checkpoint_every": 2, "checkpoint_store": location, "misfit": ENVIRONMENT}
    runs = {
        variant: job(variant=variant, processes=TWO, **settings) for variant in ("plain", "ddp")
    }
    for variant, run in runs.items():
        assert run.end().outcome == "succeeded", run.story()
        assert_same_training(run.record, baseline_of(variant, TWO))
    store = open_store(location, ENVIRONMENT)
    found = store.survey()
    assert found[0].step == 24
    for each in found:
        assert each.manifest, each
        assert verify(store.at(each.manifest), lambda _: None) == ()
