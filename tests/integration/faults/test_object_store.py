"""Jobs whose checkpoints are in an object store: a real S3 server, real kills."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from stores.servers import ENVIRONMENT, SECRET_KEY, Server, rclone
from training_jobs import RANKS
from training_jobs.checks import (
    assert_recovered,
    assert_same_training,
    assert_samples_once,
    steps_lost,
)
from training_jobs.injection import Fault
from training_jobs.job import Job, pause_all
from training_jobs.record import Record

from rekindle.checkpoints.location import S3Location, parse
from rekindle.checkpoints.opening import open_store
from rekindle.checkpoints.verifying import verify
from rekindle.recovery import journal

PAUSE_ALL = pause_all(12)


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An S3 server with an empty bucket."""
    with rclone(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.mark.parametrize("variant", ["ddp", "sharded"])
def test_all_nodes_lost(
    variant: str, bucket: Server, job: Callable[..., Job], baseline_of: Callable[[str], Record]
) -> None:
    """New nodes take the state from the store; who looks for secrets in what is kept finds none."""
    location = bucket.location()
    run = job(
        *PAUSE_ALL,
        variant=variant,
        nodes=2,
        checkpoint_every=10,
        checkpoint_store=location,
        misfit=ENVIRONMENT,
    )
    run.wait_pause(12)
    run.wait_event(journal.Checkpointed, step=10)
    run.kill_node(0, 1)
    run.release_all()
    assert_recovered(run, baseline_of(variant), replaced=range(RANKS))
    [again] = run.events_of(journal.Formed)[1:]
    assert (again.step, again.sources) == (10, {"checkpoint": RANKS})
    assert max(steps_lost(run)) == 2
    said = (run.spec.directory, run.spec.log_directory)
    for file in (each for folder in said for each in Path(folder).rglob("*") if each.is_file()):
        if file.name != "job.json":  # which nobody else may read
            assert SECRET_KEY.encode() not in file.read_bytes(), file
    assert Path(run.spec.directory, "job.json").stat().st_mode & 0o077 == 0


def test_next_attempt(bucket: Server, job: Callable[..., Job], baseline: Record) -> None:
    """A job that has failed goes on from the store, on whatever machine; what is damaged, it says.

    Of the newest checkpoint a byte differs: the one before is taken.
    """
    pauses = [Fault(0, "forward", step, do="pause") for step in (6, 11, 16)]
    run = job(
        *pauses,
        Fault(1, "forward", 18, do="raise"),
        checkpoint_every=5,
        checkpoint_store=bucket.location(),
        misfit=ENVIRONMENT,
    )
    for number, step in enumerate((5, 10, 15)):
        run.wait_event(journal.Checkpointed, step=step)
        run.release(number)
    assert run.end().outcome == "failed"
    store = open_store(run.spec.checkpoint_store, ENVIRONMENT)
    [newest, *_] = store.survey()
    assert newest.manifest
    [entry] = newest.manifest.files
    flip(bucket, store.location, f"step-0000000015-g000001/{entry.file}")
    run.plan()
    run.start()
    assert run.end().outcome == "succeeded", run.story()
    (skipped,) = run.events_of(journal.CheckpointSkipped)
    assert skipped.path == newest.location
    assert "checksum" in skipped.reason
    assert run.events_of(journal.Formed)[-1].sources == {"checkpoint": RANKS}
    assert run.events_of(journal.Formed)[-1].step == 10
    assert_same_training(run.record, baseline)
    assert_samples_once(run.record)


def test_two_jobs_with_one_place(
    bucket: Server, job: Callable[..., Job], baseline_of: Callable[[str], Record]
) -> None:
    """By mistake, and even of one name: what one has committed the other leaves as it is."""
    location = bucket.location()
    settings = {"checkpoint_every": 2, "checkpoint_store": location, "misfit": ENVIRONMENT}
    runs = {variant: job(variant=variant, processes=2, **settings) for variant in ("plain", "ddp")}
    for variant, run in runs.items():
        assert run.end().outcome == "succeeded", run.story()
        assert_same_training(run.record, baseline_of(variant, 2))
    store = open_store(location, ENVIRONMENT)
    seen = store.survey()
    assert seen[0].step == 24
    for each in seen:
        assert each.manifest, each
        assert verify(store.at(each.manifest), lambda _: None) == ()


def flip(server: Server, location: str, name: str) -> None:
    """Change a byte in the middle of an object."""
    where = parse(location)
    assert isinstance(where, S3Location)
    with contextlib.closing(server.client()) as client:
        place = {"Bucket": where.bucket, "Key": where.root + name}
        data = bytearray(client.get_object(**place)["Body"].read())
        data[len(data) // 2] ^= 0x40
        client.put_object(**place, Body=bytes(data))


def test_server_that_is_gone(tmp_path: Path, job: Callable[..., Job], baseline: Record) -> None:
    """Training goes on meanwhile, and what was due then is written when the server is back."""
    pauses = (Fault(0, "forward", step, do="pause") for step in (8, 18))
    with rclone(tmp_path) as server:
        run = job(
            *pauses,
            checkpoint_every=5,
            checkpoint_store=server.location("job"),
            misfit=ENVIRONMENT,
        )
        run.wait_fault(0)
        run.wait_event(journal.Checkpointed, step=5)
    run.release(0)
    run.wait_fault(1)
    with rclone(tmp_path, server.port):
        run.release(1)
        assert_recovered(run, baseline, replaced=())
        assert run.events_of(journal.CheckpointFailed) == []
        found = open_store(run.spec.checkpoint_store, ENVIRONMENT).newest()
    assert found.checkpoint is not None
    assert (found.checkpoint.manifest.step, found.passed_over) == (24, ())
