"""Find the store and the checkpoints that a command's arguments name."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rekindle.checkpoints.checkpoint_path import key_of
from rekindle.checkpoints.open_store import open_store
from rekindle.checkpoints.pins import reading
from rekindle.checkpoints.publishing import is_reference, resolve
from rekindle.checkpoints.store import Checkpoint, CheckpointInfo, CheckpointStore, bytes_of
from rekindle.checkpoints.verifying import check_intact
from rekindle.cli.terminal_output import progress
from rekindle.errors import CheckpointError, CorruptError, UsageError
from rekindle.job.spec import JobDirectory, job_directory


def open_at(text: str, *, exists: bool) -> CheckpointStore:
    """Return the store at a folder or s3:// location, or the store of the job with this id.

    exists: the folder must exist. Raises UsageError: the name matches nothing, or several things.
    """
    if "://" in text:
        return open_store(text)
    path = Path(text).absolute()
    job = JobDirectory(job_directory(text)) if "/" not in text and text not in (".", "..") else None
    if job is not None and job.path.is_dir():
        if path.exists():
            raise UsageError(f"{text!r} is a job and a folder; write ./{text}, or {job.path}")
        return open_store(job.spec().checkpoint_store, os.environ | job.spec().environment)
    if exists and not path.is_dir():
        raise UsageError(f"there is no folder {path}, and no job {text!r} on this machine")
    if key_of(path.name):
        raise UsageError(f"{path} is one checkpoint; give the folder of the store, and --step")
    return open_store(str(path))


@contextlib.contextmanager
def chosen(source: str, step: int | None) -> Iterator[Checkpoint]:
    """Yield the newest intact checkpoint of a store, or of a step, or of a reference.

    The checkpoint is protected against pruning until the block ends. The function prints the
    checkpoints that it skips. Raises CheckpointError: there is none, or a newer one is unreadable.
    """
    if is_reference(source):
        if step is not None:
            raise UsageError(f"{source} is one checkpoint; leave out --step")
        published = resolve(source)
        _check(published)
        yield published
        return
    store = open_at(source, exists=True)
    passed: list[str] = []
    for seen in store.survey() if step is None else of_steps(store.survey(), [step], store):
        if seen.manifest is None or seen.reason:
            passed.append(f"{seen.location}: {seen.reason}")
            continue
        checkpoint = store.at(seen.manifest)
        with reading(store, (seen.step, seen.generation)):
            try:
                _check(checkpoint)
            except CorruptError as error:
                passed.append(str(error))
                continue
            for each in passed:
                print(f"rekindle: skipped {each}", file=sys.stderr)
            yield checkpoint
            return
    which = "" if step is None else f" of step {step}"
    why = "".join(f"\n  {each}" for each in passed)
    raise CheckpointError(f"{store.location} has no intact checkpoint{which}{why}")


def _check(checkpoint: Checkpoint) -> None:
    manifest = checkpoint.manifest
    with progress(f"verify step {manifest.step}", bytes_of(manifest)) as told:
        check_intact(checkpoint, told)


def of_steps(
    seen: list[CheckpointInfo], steps: Sequence[int], store: CheckpointStore
) -> list[CheckpointInfo]:
    """Return the checkpoints of these steps; without steps all.

    Raises UsageError: a step has none.
    """
    missing = sorted(set(steps) - {each.step for each in seen})
    if missing:
        raise UsageError(f"{store.location} has no checkpoint of step {missing[0]}")
    return [each for each in seen if not steps or each.step in steps]
