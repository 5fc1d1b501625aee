"""Define the steps around training: prepare, evaluate, publish, notify.

Preparation and evaluation run a user's commands.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import selectors
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from prefect import get_run_logger, task
from prefect.artifacts import create_link_artifact
from prefect.assets import Asset, add_asset_metadata, materialize
from prefect.cache_policies import NO_CACHE
from prefect.deployments import run_deployment
from prefect.transactions import Transaction, get_transaction
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rekindle import names
from rekindle.checkpoints.directory import DirectoryCheckpoint, DirectoryStore
from rekindle.checkpoints.open_store import open_store
from rekindle.checkpoints.publishing import (
    LATEST_FILE,
    Latest,
    Published,
    address,
    announce,
    withdraw,
)
from rekindle.checkpoints.publishing import publish as publish_checkpoint
from rekindle.checkpoints.retention import Retention
from rekindle.checkpoints.store import Checkpoint, reading
from rekindle.checkpoints.verifying import copy
from rekindle.errors import CheckpointError, JobError, RejectedError, UsageError
from rekindle.file_lock import locked
from rekindle.job.spec import JobDirectory
from rekindle.rank.program import die_with_parent
from rekindle.tasks import job_access as jobs

_MARK = "REKINDLE_COMMAND_LOCK"  # in the environment of a command and of its child processes
ENV_CHECKPOINT = "REKINDLE_CHECKPOINT"
ENV_METRICS = "REKINDLE_METRICS"
_METRICS_FILE = "metrics.json"
_ANNOUNCED = "announced"  # the value of a transaction: what the pointer has from it
_LAST_LINE = "the last line of the evaluation's stdout"
_BLOCK_BYTES = 65_536  # that one read of a command's output returns at most


class Retraining(BaseModel):
    """The commands before and after training, and the publication of the checkpoint."""

    model_config = ConfigDict(extra="forbid")

    prepare: list[str] = Field(
        default=[],
        description="Command that prepares the data, as a list of words; run once, before "
        "training. Empty: none.",
    )
    evaluate: list[str] = Field(
        default=[],
        description="Command that evaluates the checkpoint whose folder is in "
        "REKINDLE_CHECKPOINT. It writes its metrics as one JSON object to the file that "
        "REKINDLE_METRICS names, or to metrics.json in its folder, or prints it as the last line "
        "of its stdout.",
    )
    at_least: dict[str, float] = Field(
        default={},
        description="Lowest value of each metric; below it the checkpoint is not published.",
    )
    at_most: dict[str, float] = Field(
        default={},
        description="Highest value of each metric; above it the checkpoint is not published.",
    )
    publish_to: str = Field(
        default="published",
        min_length=1,
        description="Folder for copies of published checkpoints, best on shared storage, relative "
        "to the working directory; or s3://bucket/prefix?endpoint=https://host:port, with the key "
        "of the job's checkpoint store.",
    )
    downstream: list[str] = Field(
        default=[],
        description="Deployments (flow/deployment) that run once with the parameter `checkpoint`, "
        "the reference of the published checkpoint.",
    )


def run_command(
    command: Sequence[str],
    *,
    folder: Path,
    environment: Mapping[str, str],
    lock: Path,
    log: Callable[..., None],
) -> str:
    """Run a command; return the last line of its stdout.

    The function logs stdout and stderr line by line. lock: a file; one command at a time runs
    under it. The function first ends the processes of a command whose flow was killed, because both
    would work on the same data. Raises UsageError: the command cannot start. Raises JobError: its
    status is not 0.
    """
    another = "Another process of this flow run does this already (%s); this process waits"
    with locked(lock, lambda: log(another, lock)) as handle:
        _end_leftovers(lock)
        marked = {**os.environ, **environment, _MARK: str(lock)}
        process = _start(command, folder, marked, handle)
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            last, newest = _log_output(process.stdout, process.stderr, log)
            status = process.wait()
        except BaseException:  # Prefect raises one on a request to end the flow's process
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        finally:
            process.stdout.close()
            process.stderr.close()
    if status:
        raise JobError(f"{' '.join(command)} ended with status {status}: {newest}")
    return last


def _log_output(stdout: IO[bytes], stderr: IO[bytes], log: Callable[..., None]) -> tuple[str, str]:
    """Log all lines of both streams until they end. Return the last of stdout, and of both.

    A progress bar returns to the beginning of its line. Only its newest text is in the log.
    """
    last, newest = "", ""
    rest = {stdout.fileno(): b"", stderr.fileno(): b""}
    with selectors.DefaultSelector() as open_streams:
        for handle in rest:
            open_streams.register(handle, selectors.EVENT_READ)
        while open_streams.get_map():
            for key, _ in open_streams.select():
                read = os.read(key.fd, _BLOCK_BYTES)
                if not read:
                    open_streams.unregister(key.fd)
                # The end of a stream ends its last line.
                *lines, rest[key.fd] = (rest[key.fd] + (read or b"\n")).split(b"\n")
                if not read and lines == [b""]:
                    continue
                for line in lines:
                    text = line.decode(errors="replace").rstrip().rpartition("\r")[2]
                    log("%s", text)
                    newest = text or newest
                    if key.fd == stdout.fileno():
                        last = text or last
    return last, newest


def _start(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], handle: int
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            pass_fds=(handle,),
            # A rerun of the flow starts the command again. The function takes no lock.
            preexec_fn=functools.partial(die_with_parent, os.getpid()),  # noqa: PLW1509
        )
    except OSError as error:
        raise UsageError(f"Rekindle cannot start the command {command[0]!r}: {error}") from error


def _end_leftovers(lock: Path) -> None:
    """End the child processes of a former command under this lock; the kernel ended the command."""
    mark = f"{_MARK}={lock}".encode()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)


@task(name="prepare", cache_policy=NO_CACHE)
def prepare(around: Retraining, job_id: str, folder: Path) -> None:
    """Prepare the data, unless an earlier run of this flow run has done it."""
    directory = jobs.directory_of(job_id).path
    directory.mkdir(parents=True, exist_ok=True)
    done = directory / names.PREPARED_FILE
    if around.prepare and not done.exists():
        run_command(
            around.prepare,
            folder=folder,
            environment={},
            lock=directory / names.PREPARE_LOCK_FILE,
            log=get_run_logger().info,
        )
    done.touch()


@task(name="evaluate", cache_policy=NO_CACHE)
def evaluate(around: Retraining, job_id: str, checkpoint: str, folder: Path) -> dict[str, float]:
    """Evaluate a checkpoint, and compare its metrics with the limits.

    Raises RejectedError: a metric is outside its limit, or missing.
    """
    metrics: dict[str, float] = {}
    if around.evaluate:
        metrics = measure(
            around.evaluate,
            folder=folder,
            checkpoint=checkpoint,
            lock=jobs.directory_of(job_id).path / names.EVALUATE_LOCK_FILE,
            log=get_run_logger().info,
        )
    judge(metrics, at_least=around.at_least, at_most=around.at_most)
    return metrics


def measure(
    command: Sequence[str], *, folder: Path, checkpoint: str, lock: Path, log: Callable[..., None]
) -> dict[str, float]:
    """Run an evaluation and return its metrics.

    The first of these places has them: the file that REKINDLE_METRICS names, `metrics.json` in the
    folder if the command has written it, the last line of stdout. Raises as run_command() and
    read_metrics() do.
    """
    with tempfile.TemporaryDirectory() as own:
        asked, usual = Path(own, _METRICS_FILE), folder / _METRICS_FILE
        before = _stamp(usual)
        environment = {ENV_CHECKPOINT: checkpoint, ENV_METRICS: str(asked)}
        last = run_command(command, folder=folder, environment=environment, lock=lock, log=log)
        if asked.exists():
            return read_metrics(asked.read_text(), f"the file that {ENV_METRICS} names")
        if _stamp(usual) not in (before, None):  # a file of an earlier evaluation does not count
            return read_metrics(usual.read_text(), str(usual))
        return read_metrics(last)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Return what changes when a file is written; None: there is no file."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def read_metrics(text: str, source: str = _LAST_LINE) -> dict[str, float]:
    """Read the metrics of an evaluation. source: the name of the text, for an error.

    Raises JobError: it is not a JSON object of numbers. Raises RejectedError: a number is infinite
    or nan.
    """
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise JobError(
            f"{source} is not a JSON object of metrics: {text[:200]!r}. Print one there, or write "
            f"it to the file that {ENV_METRICS} names"
        )
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise JobError(f"the evaluation's metric {name} is {value!r}, which is not a number")
        if not math.isfinite(value):
            raise RejectedError(f"the evaluation's metric {name} is {value}")
    return {name: float(value) for name, value in found.items()}


def judge(
    metrics: Mapping[str, float], *, at_least: Mapping[str, float], at_most: Mapping[str, float]
) -> None:
    """Check that all metrics exist and are within their limits; nan never is.

    Raises RejectedError.
    """
    for name in (*at_least, *at_most):
        if name not in metrics:
            known = ", ".join(metrics) or "none"
            raise RejectedError(f"the evaluation does not have the metric {name}; it has {known}")
    for name, least in at_least.items():
        if not metrics[name] >= least:
            raise RejectedError(f"{name} is {metrics[name]:g}, but must be at least {least:g}")
    for name, most in at_most.items():
        if not metrics[name] <= most:
            raise RejectedError(f"{name} is {metrics[name]:g}, but must be at most {most:g}")


@contextlib.contextmanager
def newest_checkpoint(
    directory: JobDirectory, environment: Mapping[str, str], *, step: int
) -> Iterator[Checkpoint]:
    """Yield the newest checkpoint of a job, verified and in a folder, protected against pruning.

    environment: has the key of its store. step: the job's finished steps; the function logs a
    warning if the checkpoint is older. Raises CheckpointError: there is no checkpoint.
    """
    spec = directory.spec()
    store = open_store(spec.checkpoint_store, os.environ | environment)
    found = store.newest()
    if found.checkpoint is None:
        why = "; ".join(f"{each.location}: {each.reason}" for each in found.passed_over)
        raise CheckpointError(
            f"job {spec.job_id} has no checkpoint to publish: {why or 'give checkpoint.every'}"
        )
    newest = found.checkpoint.manifest
    if newest.step != step:
        why = "; ".join(f"{each.location}: {each.reason}" for each in found.passed_over)
        get_run_logger().warning(
            "Job %s has finished step %d, but its newest checkpoint has step %d: %s",
            spec.job_id,
            step,
            newest.step,
            why or "training ended early, or the job could not write the last checkpoint",
        )
    with reading(store, newest.state):
        yield _brought(found.checkpoint, directory)


def _brought(checkpoint: Checkpoint, directory: JobDirectory) -> Checkpoint:
    """Return a checkpoint in a folder, for an evaluation; copy it if it is in an object store."""
    if isinstance(checkpoint, DirectoryCheckpoint):
        return checkpoint
    here = DirectoryStore(directory.path / names.BROUGHT_DIRECTORY)
    copy(checkpoint, here, lambda count: None)
    found = here.find(*checkpoint.manifest.state)
    assert found is not None  # it was committed
    here.prune(Retention(last=1))
    return found


def publish(
    checkpoint: Checkpoint, to: str, metrics: Mapping[str, float], environment: Mapping[str, str]
) -> Published:
    """Publish a checkpoint once, as an asset, and announce it unless a newer one is announced.

    If a later step of the same transaction fails, the pointer gets its earlier contents again,
    unless another process has changed it.
    """
    undo = functools.partial(_withdraw, to=to, environment=environment)
    options: dict[str, Any] = {"name": "publish", "cache_policy": NO_CACHE, "on_rollback": [undo]}
    where = address(checkpoint, to)
    key = asset_key(where)
    if not key:
        get_run_logger().warning(
            "Prefect accepts no asset with the key %s, so there is none", where
        )
    decorate = materialize(Asset(key=key), **options) if key else task(**options)
    return decorate(_publish)(checkpoint, to, dict(metrics), environment, key)


def asset_key(location: str) -> str:
    """Return the key of the asset of a published checkpoint; empty: Prefect accepts none."""
    key = location if "://" in location else f"file://{location}"
    try:
        return Asset(key=key).key
    except ValidationError:
        return ""


def _publish(
    checkpoint: Checkpoint,
    to: str,
    metrics: dict[str, float],
    environment: Mapping[str, str],
    key: str,
) -> Published:
    environment = os.environ | environment
    published = publish_checkpoint(checkpoint, to, environment)
    manifest = checkpoint.manifest
    where = published.location
    create_link_artifact(
        link=where if "://" in where else Path(where).as_uri(),
        link_text=f"checkpoint of step {published.step}",
        key=f"{manifest.job_id}-published",
        description=f"Published as {published.reference}; metrics: {metrics or 'none'}",
    )
    latest = Latest(
        reference=published.reference,
        location=where,
        job_id=manifest.job_id,
        step=manifest.step,
        created=manifest.created,
        metrics=metrics,
    )
    if key:
        facts = {"reference": latest.reference, "job_id": latest.job_id, "step": latest.step}
        add_asset_metadata(key, {**facts, "metrics": metrics})
    # Last, because Prefect rolls a task back only if it has succeeded.
    if announce(latest, to, environment):
        promotion = get_transaction()
        assert promotion is not None  # that of the task
        promotion.set(_ANNOUNCED, latest)
    word = "was already published" if published.existed else "is published"
    get_run_logger().info("Step %d %s: %s", published.step, word, published.reference)
    return published


def _withdraw(promotion: Transaction, *, to: str, environment: Mapping[str, str]) -> None:
    latest = promotion.get(_ANNOUNCED, None)
    if latest is not None and withdraw(latest, to, os.environ | environment):
        get_run_logger().warning(
            "A step after the publication has failed; %s has its earlier contents again",
            LATEST_FILE,
        )


@task(name="tell downstream", cache_policy=NO_CACHE)
def tell_downstream(deployments: list[str], reference: str) -> list[str]:
    """Start each deployment once for this reference; return the names of the flow runs."""
    names = []
    for name in deployments:
        # Prefect starts no second flow run of a deployment with the same idempotency key.
        run: Any = run_deployment(
            name,
            parameters={"checkpoint": reference},
            timeout=0,
            as_subflow=False,
            idempotency_key=f"{name}:{reference}",
        )
        get_run_logger().info("%s runs with the new checkpoint: %s", name, run.name)
        names.append(run.name)
    return names
