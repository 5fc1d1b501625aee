"""Decide from which checkpoint a job begins: its own newest one, or one of another job."""

from __future__ import annotations

import logging
import os
import threading

from rekindle.checkpoints.open_store import open_store
from rekindle.checkpoints.store import Checkpoint, CheckpointStore, foreign
from rekindle.cli.checkpoints import chosen, copy_to
from rekindle.console import say
from rekindle.errors import RekindleError, UsageError
from rekindle.job.spec import JobSpec

_ANSWER_S = 10.0  # for a store that may hang; the job itself waits longer for it


def newest_of(spec: JobSpec) -> Checkpoint | None:
    """Return the newest complete checkpoint of the job; None: none, or the store is unreadable.

    The agents of the job read the store again. They report a store that they cannot read, and
    refuse checkpoints of another job.
    Raises UsageError: the newest checkpoint belongs to another job.
    """
    newest = _first_of(spec)
    if newest is not None:
        reason = foreign(spec.checkpoint_store, newest.manifest, spec.job_id)
        if reason:
            raise UsageError(reason)
    return newest


def begin_with(spec: JobSpec, source: str, newest: Checkpoint | None) -> None:
    """Copy the newest checkpoint of another store to the job's store, unless the job has one.

    source: the location of a store, the id of its job, or a reference of a published checkpoint.
    newest: the job's own checkpoint.
    Raises UsageError: `source` names no other store; CheckpointError: there is no intact
    checkpoint, or it cannot be copied.
    """
    if newest is not None:
        say(
            f"job {spec.job_id} continues from its own checkpoint of step {newest.manifest.step}; "
            f"--resume-from {source} has no effect",
            logging.INFO,
        )
        return
    with chosen(source, None) as checkpoint:
        copied = copy_to(_store(spec), checkpoint, job_id=spec.job_id)
        say(f"job {spec.job_id} begins with {checkpoint.location}: {copied}", logging.INFO)


def _store(spec: JobSpec) -> CheckpointStore:
    return open_store(spec.checkpoint_store, os.environ | spec.environment)


def _first_of(spec: JobSpec) -> Checkpoint | None:
    """Return the newest complete checkpoint of any job in the store."""
    found: list[Checkpoint] = []

    def look() -> None:
        try:
            store = _store(spec)
            for step, generation in list(store.keys()):
                checkpoint = store.find(step, generation)
                if checkpoint is not None:
                    found.append(checkpoint)
                    return
        except RekindleError as error:
            say(f"whose checkpoints {spec.checkpoint_store} has is unknown: {error}")

    reader = threading.Thread(target=look, daemon=True)
    reader.start()
    reader.join(_ANSWER_S)
    if reader.is_alive():
        say(f"{spec.checkpoint_store} does not answer; whose checkpoints it has is unknown")
    return found[0] if found else None
