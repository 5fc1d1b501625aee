"""`rekindle checkpoints`: what is in a store, whether it is intact, and copies of it."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rekindle.checkpoints.copying import check_intact, copy
from rekindle.checkpoints.opening import open_store
from rekindle.checkpoints.place import Key, key_of
from rekindle.checkpoints.pruning import may_go
from rekindle.checkpoints.retention import Retention
from rekindle.checkpoints.store import Checkpoint, Seen, Store, bytes_of
from rekindle.checkpoints.verifying import Damage, verify
from rekindle.commands.progress import progress
from rekindle.errors import CheckpointError, CorruptError, UsageError
from rekindle.runtime.spec import JobDirectory, job_directory
from rekindle.table import clock, size, table

_INTERRUPTED = 130  # what a shell makes of Ctrl-C


def run(options: argparse.Namespace) -> int:
    """Carry out one of the sub-commands; its exit status."""
    if options.action in ("export", "import"):
        from rekindle.commands import exchange  # torch takes a second to import

        act = exchange.export_state if options.action == "export" else exchange.import_state
    else:
        act = {"ls": _ls, "verify": _verify, "prune": _prune}.get(options.action, _copy)
    try:
        return act(options)
    except KeyboardInterrupt:
        print("\nrekindle: interrupted; nothing was left half valid", file=sys.stderr)
        return _INTERRUPTED


def open_at(text: str, *, exists: bool) -> Store:
    """The store at a folder, an s3:// location, or of the job of this id.

    exists: the folder has to be there. Raises UsageError: there is nothing of that name.
    """
    if "://" in text:
        return open_store(text)
    path = Path(text).absolute()
    job = JobDirectory(job_directory(text)) if "/" not in text and text not in (".", "..") else None
    if job is not None and job.path.is_dir():
        if path.exists():
            raise UsageError(f"{text!r} is a job and a folder: write ./{text}, or {job.path}")
        return open_store(job.spec().checkpoint_store, os.environ | job.spec().environment)
    if exists and not path.is_dir():
        raise UsageError(f"there is no folder {path}, and no job {text!r} on this machine")
    if key_of(path.name):
        raise UsageError(f"{path} is one checkpoint: give the folder that it is in, and --step")
    return open_store(str(path))


def chosen(store: Store, step: int | None) -> Checkpoint:
    """The newest intact checkpoint, of all or of this step; those passed over for it are told of.

    Raises CheckpointError: there is none.
    """
    passed: list[str] = []
    for seen in store.survey() if step is None else _of_steps(store.survey(), [step], store):
        try:
            if seen.manifest is None or seen.reason:
                raise CorruptError(f"{seen.location}: {seen.reason}")
            checkpoint = store.at(seen.manifest)
            with progress(f"verify step {seen.step}", _bytes([checkpoint])) as told:
                check_intact(checkpoint, told)
        except CorruptError as error:
            passed.append(str(error))
        else:
            for each in passed:
                print(f"rekindle: passed over {each}", file=sys.stderr)
            return checkpoint
    which = "" if step is None else f" of step {step}"
    why = "".join(f"\n  {each}" for each in passed)
    raise CheckpointError(f"{store.location} has no intact checkpoint{which}{why}")


def _ls(options: argparse.Namespace) -> int:
    store = open_at(options.store, exists=True)
    seen = store.survey()
    if options.json:
        print(json.dumps([_told(each) for each in seen]))
        return 0
    head = ("step", "generation", "when", "size", "files", "framework", "world size", "state")
    rows = [(each.step, each.generation, *_facts(each), _state(each)) for each in seen]
    if rows:
        table(head, rows)
    else:
        print(f"no checkpoints in {store.location}")
    return 0


def _verify(options: argparse.Namespace) -> int:
    store = open_at(options.store, exists=True)
    seen = _of_steps(store.survey(), options.steps, store)
    checkpoints = [store.at(each.manifest) for each in seen if each.manifest]
    damages: dict[str, tuple[Damage, ...]] = {}
    if checkpoints:
        with progress(f"verify {len(checkpoints)} checkpoints", _bytes(checkpoints)) as told:
            damages = {each.location: verify(each, told) for each in checkpoints}
    bad = [each for each in seen if not each.unfinished and _is_bad(each, damages)]
    if options.json:
        told_of = [_told(each) | _verdict(each, damages) for each in seen]
        print(json.dumps(told_of))
    elif seen:
        table(
            ("step", "generation", "size", "files", "state"),
            [
                (s.step, s.generation, *_facts(s)[1:3], _verdict(s, damages)["verdict"])
                for s in seen
            ],
        )
        _show_damages(bad, damages)
    else:
        print(f"no checkpoints in {store.location}")
    return 1 if bad else 0


def _copy(options: argparse.Namespace) -> int:
    source = open_at(options.source, exists=True)
    target = open_at(options.target, exists=False)
    checkpoint = chosen(source, options.step)
    step, total = checkpoint.manifest.step, _bytes([checkpoint])
    with progress(f"copy step {step}", total) as told:
        written = copy(checkpoint, target, told)
    verb = "was there already" if written.existed else "copied"
    print(f"step {step}, {size(total)}: {verb}: {written.location}")
    return 0


def _prune(options: argparse.Namespace) -> int:
    if options.keep < 1:
        raise UsageError(f"--keep {options.keep}: at least 1 checkpoint must be kept")
    store = open_at(options.store, exists=True)
    seen = store.survey()
    keep = Retention(last=options.keep)
    going = _would_go(store, seen, keep) if options.dry_run else store.prune(keep)
    rows = [
        (s.step, s.generation, *_facts(s)[:2], s.location)
        for s in seen
        if (s.step, s.generation) in going
    ]
    if rows:
        table(
            ("step", "generation", "when", "size", "would go" if options.dry_run else "gone"), rows
        )
    else:
        print(f"nothing goes: the newest valid ones ({options.keep}) and what is newer stay")
    return 0


def _would_go(store: Store, seen: Sequence[Seen], retention: Retention) -> tuple[Key, ...]:
    """What Store.prune() would remove of those that are finished."""
    manifests = {(s.step, s.generation): s.manifest for s in seen if s.manifest}
    usable = {(s.step, s.generation) for s in seen if s.manifest and not s.reason}

    def is_valid(key: Key) -> bool:
        if key not in usable:
            return False
        checkpoint = store.at(manifests[key])
        with progress(f"verify step {key[0]}", _bytes([checkpoint])) as told:
            return not verify(checkpoint, told)

    return may_go(
        list(manifests),
        retention,
        is_valid=is_valid,
        manifest_of=manifests.__getitem__,
        pins=store.pins(),
        now=time.time(),
    )


def _of_steps(seen: list[Seen], steps: Sequence[int], store: Store) -> list[Seen]:
    missing = sorted(set(steps) - {each.step for each in seen})
    if missing:
        raise UsageError(f"{store.location} has no checkpoint of step {missing[0]}")
    return [each for each in seen if not steps or each.step in steps]


def _bytes(checkpoints: Sequence[Checkpoint]) -> int:
    return sum(bytes_of(each.manifest) for each in checkpoints)


def _facts(seen: Seen) -> tuple[object, ...]:
    """When, size, files, framework, world size, as far as they are known."""
    found = seen.manifest
    if found is None:
        return ("-",) * 5
    about = (found.framework or "-", found.world_size)
    return (clock(found.created), size(bytes_of(found)), len(found.files), *about)


def _state(seen: Seen) -> str:
    if seen.unfinished:
        return "unfinished"
    return f"cannot be used: {seen.reason}" if seen.reason else "complete"


def _told(seen: Seen) -> dict[str, object]:
    """A row as JSON has it."""
    manifest: dict[str, object] = msgspec.to_builtins(seen.manifest) if seen.manifest else {}
    about = {"step": seen.step, "generation": seen.generation, "location": seen.location}
    state = "unfinished" if seen.unfinished else "unusable" if seen.reason else "complete"
    size_of = {"bytes": bytes_of(seen.manifest)} if seen.manifest else {}
    return manifest | about | size_of | {"state": state, "reason": seen.reason}


def _verdict(seen: Seen, damages: dict[str, tuple[Damage, ...]]) -> dict[str, object]:
    found = damages.get(seen.location, ())
    verdict = "damaged" if _is_bad(seen, damages) else "intact"
    return {
        "verdict": "unfinished" if seen.unfinished else verdict,
        "damages": msgspec.to_builtins(found),
    }


def _is_bad(seen: Seen, damages: dict[str, tuple[Damage, ...]]) -> bool:
    return bool(seen.manifest is None or damages.get(seen.location) or seen.reason)


def _show_damages(bad: Sequence[Seen], damages: dict[str, tuple[Damage, ...]]) -> None:
    if not bad:
        return
    rows: list[tuple[object, ...]] = []
    for each in bad:
        found = damages.get(each.location, ())
        rows += [(each.step, each.generation, d.file, d.what, d.where) for d in found]
        if not found:
            rows.append((each.step, each.generation, "manifest.json", "unusable", each.reason))
    print()
    table(("step", "generation", "file", "is", "what is wrong"), rows)
