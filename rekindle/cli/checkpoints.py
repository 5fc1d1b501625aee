"""Implement `rekindle checkpoints`: list, verify, copy, pin, export and import."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rekindle.checkpoints.checkpoint_path import key_of
from rekindle.checkpoints.open_store import open_store
from rekindle.checkpoints.pins import Pin, check_name
from rekindle.checkpoints.publishing import is_reference, resolve
from rekindle.checkpoints.retention import Retention, may_go
from rekindle.checkpoints.store import (
    Checkpoint,
    CheckpointInfo,
    CheckpointStore,
    bytes_of,
    reading,
)
from rekindle.checkpoints.verifying import Damage, check_intact, copy, verify
from rekindle.cli.terminal_output import clock, progress, table
from rekindle.console import say
from rekindle.errors import CheckpointError, CorruptError, UsageError
from rekindle.job.spec import JobDirectory, check_job_id, job_directory
from rekindle.states import StateId
from rekindle.words import size

MOST_HOURS = 24 * 3660  # ten years; a pin without an end lasts longer
_INTERRUPTED = 130  # the exit status of a shell after Ctrl-C


def pin(options: argparse.Namespace) -> None:
    """Protect the newest complete checkpoint of a step against pruning."""
    check_name(options.name)
    if options.hours is not None and not 0 < options.hours <= MOST_HOURS:
        raise UsageError(f"--hours {options.hours}: give a number above 0 and at most {MOST_HOURS}")
    store = open_at(options.store, exists=True)
    checkpoints = of_steps(store.survey(), [options.step], store)
    for each in checkpoints:
        if not each.reason and not each.unfinished:
            until = None
            if options.hours is not None:
                until = math.ceil(time.time() + options.hours * 3600)
            new = Pin(each.state, options.name, until)
            if store.pin(new):
                for old in store.pins():
                    if (old.key, old.name) == (each.state, options.name) and old != new:
                        store.unpin(old)
                end = "until it is unpinned" if until is None else f"until {clock(until)}"
                print(f"{each.location}: pinned {end} ({options.name})")
                return
    reason = checkpoints[0].reason or "another process pruned it"
    raise CheckpointError(f"Rekindle cannot pin {checkpoints[0].location}: {reason}")


def unpin(options: argparse.Namespace) -> None:
    """Remove the pins of this name from a step."""
    store = open_at(options.store, exists=True)
    found = [
        each for each in store.pins() if (each.key[0], each.name) == (options.step, options.name)
    ]
    if not found:
        raise UsageError(
            f"{store.location}: step {options.step} has no pin with the name {options.name!r}"
        )
    for each in found:
        store.unpin(each)
    print(f"step {options.step}: no longer pinned ({options.name})")


def export_state(options: argparse.Namespace) -> None:
    """Write a checkpoint's state for torch."""
    from rekindle.training.torch.convert import unsharded

    out = Path(options.out).absolute()
    unsharded.check_out(out)
    with chosen(options.store, options.step) as checkpoint:
        step = checkpoint.manifest.step
        states, skeleton = unsharded.read_states(checkpoint, options.only or ())
    if options.format == "torch":
        unsharded.save_torch(states, step, out)
    else:
        unsharded.save_dcp(states, step, skeleton, out)
    print(f"step {step}: {', '.join(states)}: {out}")


def import_state(options: argparse.Namespace) -> None:
    """Make a checkpoint from files that torch has written."""
    from rekindle.training.torch.convert import importing

    check_job_id(options.job_id)
    source = Path(options.source).absolute()
    if not source.exists():
        raise UsageError(f"the file or folder {source} does not exist")
    store = open_at(options.store, exists=False)
    take = dict(_pair("--take", each) for each in options.take)
    add = {name: _json(name, text) for name, text in (_pair("--add", e) for e in options.add)}
    imported = importing.read_source(source, take=take, add=add, device=options.device)
    step = imported.step if options.step is None else options.step
    if step is None or step < 0:
        raise UsageError(
            f"{source} does not contain the number of finished steps; give it with --step N"
        )
    written = importing.write(imported, store, job_id=options.job_id, step=step)
    if imported.left_out:
        say(f"left out: {', '.join(imported.left_out)}")
    verb = "existed already" if written.existed else "imported"
    names = ", ".join(imported.tree)
    print(f"step {step}, {size(written.bytes)}: {verb}: {names}: {written.location}")
    usable = [each for each in store.survey() if each.manifest and not each.reason]
    newest = max(usable, key=lambda each: each.state)
    if newest.state > (step, 0):
        say(
            "the store has a newer checkpoint, and a job continues from that one: "
            f"{newest.location}"
        )


def _pair(option: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals or not value:
        raise UsageError(f"{option} {text!r}: give NAME=..., such as model=net")
    return name, value


def _json(name: str, text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.MsgspecError as error:
        raise UsageError(f"--add {name}={text}: the value is not JSON ({error})") from error


def run(options: argparse.Namespace) -> int | None:
    """Run one of the sub-commands; return its exit status, or None for 0."""
    try:
        return _ACTIONS[options.action](options)
    except KeyboardInterrupt:
        print(file=sys.stderr, flush=True)  # ends the line with ^C, or a bar of progress
        say("interrupted; the command left no incomplete checkpoint")
        return _INTERRUPTED


def _ls(options: argparse.Namespace) -> None:
    store = open_at(options.store, exists=True)
    checkpoints = store.survey()
    found, now = store.pins(), time.time()
    pins = {
        s.location: sorted({p.name for p in found if p.key == s.state and p.holds(now)})
        for s in checkpoints
    }
    if options.json:
        print(json.dumps([_row(each) | {"pins": pins[each.location]} for each in checkpoints]))
    elif checkpoints:
        table(
            ("step", "generation", "when", "size", "files", "framework", "world size", "state"),
            [(s.step, s.generation, *_facts(s), _state(s, pins[s.location])) for s in checkpoints],
        )
    else:
        print(f"no checkpoints in {store.location}")


def _verify(options: argparse.Namespace) -> int:
    store = open_at(options.store, exists=True)
    infos = of_steps(store.survey(), options.steps, store)
    checkpoints = [store.at(each.manifest) for each in infos if each.manifest]
    damages: dict[str, tuple[Damage, ...]] = {}
    if checkpoints:
        with progress(f"verify {len(checkpoints)} checkpoints", _bytes(checkpoints)) as on_bytes:
            for each in checkpoints:
                try:
                    with reading(store, each.manifest.state):
                        damages[each.location] = verify(each, on_bytes)
                except CheckpointError as error:
                    say(f"not verified: {error}")
                    infos = [one for one in infos if one.location != each.location]
    bad = [each for each in infos if not each.unfinished and _is_bad(each, damages)]
    if options.json:
        rows = [_row(each) | _verdict(each, damages) for each in infos]
        print(json.dumps(rows))
    elif infos:
        table(
            ("step", "generation", "size", "files", "state"),
            [
                (s.step, s.generation, *_facts(s)[1:3], _verdict(s, damages)["verdict"])
                for s in infos
            ],
        )
        _show_damages(bad, damages)
    else:
        print(f"no checkpoints in {store.location}")
    return 1 if bad else 0


def _copy(options: argparse.Namespace) -> None:
    target = open_at(options.target, exists=False)
    with chosen(options.source, options.step) as checkpoint:
        print(copy_to(target, checkpoint))


def copy_to(target: CheckpointStore, checkpoint: Checkpoint, *, job_id: str = "") -> str:
    """Copy a checkpoint with a progress bar; return the result in words.

    job_id: as for rekindle.checkpoints.verifying.copy(), which also has the errors.
    """
    step, total = checkpoint.manifest.step, _bytes([checkpoint])
    with progress(f"copy step {step}", total) as on_bytes:
        written = copy(checkpoint, target, on_bytes, job_id=job_id)
    verb = "existed already" if written.existed else "copied"
    return f"step {step}, {size(total)}: {verb}: {written.location}"


def _prune(options: argparse.Namespace) -> None:
    if options.keep < 1:
        raise UsageError(f"--keep {options.keep}: give at least 1")
    store = open_at(options.store, exists=True)
    checkpoints = store.survey()
    keep = Retention(last=options.keep)
    going = _would_go(store, checkpoints, keep) if options.dry_run else store.prune(keep)
    rows = [
        (s.step, s.generation, *_facts(s)[:2], s.location) for s in checkpoints if s.state in going
    ]
    if rows:
        table(
            (
                "step",
                "generation",
                "when",
                "size",
                "would be removed" if options.dry_run else "removed",
            ),
            rows,
        )
    else:
        print(
            "there is nothing to remove: the store keeps the newest valid checkpoints "
            f"({options.keep}) and all newer ones"
        )


def _would_go(
    store: CheckpointStore, checkpoints: Sequence[CheckpointInfo], retention: Retention
) -> tuple[StateId, ...]:
    """Return the finished checkpoints that CheckpointStore.prune() would remove."""
    finished = [s.state for s in checkpoints if not s.unfinished]
    manifests = {s.state: s.manifest for s in checkpoints if s.manifest}
    usable = {s.state for s in checkpoints if s.manifest and not s.reason}

    def is_valid(key: StateId) -> bool:
        if key not in usable:
            return False
        checkpoint = store.at(manifests[key])
        with progress(f"verify step {key.step}", _bytes([checkpoint])) as on_bytes:
            return not verify(checkpoint, on_bytes)

    going = may_go(
        finished,
        retention,
        is_valid=is_valid,
        manifest_of=manifests.__getitem__,  # with --keep the function reads no manifest
        pins=store.pins(),
        now=time.time(),
    )
    newer = {s.state for s in checkpoints if s.newer}
    return tuple(key for key in going if key not in newer)


def _bytes(checkpoints: Sequence[Checkpoint]) -> int:
    return sum(bytes_of(each.manifest) for each in checkpoints)


def _facts(info: CheckpointInfo) -> tuple[object, ...]:
    """Return date, size, number of files, framework and world size, or "-" if unknown."""
    found = info.manifest
    if found is None:
        return ("-",) * 5
    about = (found.framework or "-", found.world_size)
    return (clock(found.created), size(bytes_of(found)), len(found.files), *about)


def _state(info: CheckpointInfo, pins: Sequence[str]) -> str:
    if info.unfinished:
        return "unfinished"
    state = f"cannot be used: {info.reason}" if info.reason else "complete"
    return f"{state}, pinned ({', '.join(pins)})" if pins else state


def _row(info: CheckpointInfo) -> dict[str, object]:
    """Return the JSON form of a row."""
    manifest: dict[str, object] = msgspec.to_builtins(info.manifest) if info.manifest else {}
    about = {"step": info.step, "generation": info.generation, "location": info.location}
    state = "unfinished" if info.unfinished else "unusable" if info.reason else "complete"
    size_of = {"bytes": bytes_of(info.manifest)} if info.manifest else {}
    return manifest | about | size_of | {"state": state, "reason": info.reason}


def _verdict(info: CheckpointInfo, damages: dict[str, tuple[Damage, ...]]) -> dict[str, object]:
    found = damages.get(info.location, ())
    verdict = "damaged" if _is_bad(info, damages) else "intact"
    return {
        "verdict": "unfinished" if info.unfinished else verdict,
        "damages": msgspec.to_builtins(found),
    }


def _is_bad(info: CheckpointInfo, damages: dict[str, tuple[Damage, ...]]) -> bool:
    return bool(info.manifest is None or damages.get(info.location) or info.reason)


def _show_damages(bad: Sequence[CheckpointInfo], damages: dict[str, tuple[Damage, ...]]) -> None:
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


# ---- the store and the checkpoints that arguments name


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
            raise UsageError(
                f"{text!r} is a job and a folder; write ./{text} for the folder, or "
                f"{job.spec().checkpoint_store} for the store of the job"
            )
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
    skipped: list[str] = []
    for info in store.survey() if step is None else of_steps(store.survey(), [step], store):
        if info.manifest is None or info.reason:
            skipped.append(f"{info.location}: {info.reason}")
            continue
        checkpoint = store.at(info.manifest)
        with reading(store, info.state):
            try:
                _check(checkpoint)
            except CorruptError as error:
                skipped.append(str(error))
                continue
            for each in skipped:
                say(f"skipped {each}")
            yield checkpoint
            return
    which = "" if step is None else f" of step {step}"
    why = "".join(f"\n  {each}" for each in skipped)
    raise CheckpointError(f"{store.location} has no intact checkpoint{which}{why}")


def _check(checkpoint: Checkpoint) -> None:
    manifest = checkpoint.manifest
    with progress(f"verify step {manifest.step}", bytes_of(manifest)) as on_bytes:
        check_intact(checkpoint, on_bytes)


def of_steps(
    checkpoints: list[CheckpointInfo], steps: Sequence[int], store: CheckpointStore
) -> list[CheckpointInfo]:
    """Return the checkpoints of these steps; without steps all.

    Raises UsageError: a step has none.
    """
    missing = sorted(set(steps) - {each.step for each in checkpoints})
    if missing:
        raise UsageError(f"{store.location} has no checkpoint of step {missing[0]}")
    return [each for each in checkpoints if not steps or each.step in steps]


_ACTIONS: dict[str, Callable[[argparse.Namespace], int | None]] = {
    "ls": _ls,
    "verify": _verify,
    "pull": _copy,
    "push": _copy,
    "prune": _prune,
    "pin": pin,
    "unpin": unpin,
    "export": export_state,
    "import": import_state,
}
