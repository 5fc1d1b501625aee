"""Implement `rekindle checkpoints`: list, verify, copy, pin, export and import."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from rekindle.checkpoints.checkpoint_path import Key
from rekindle.checkpoints.pins import Pin, check_name, reading
from rekindle.checkpoints.retention import Retention, may_go
from rekindle.checkpoints.store import Checkpoint, CheckpointInfo, CheckpointStore, bytes_of
from rekindle.checkpoints.verifying import Damage, copy, verify
from rekindle.cli.open_store import chosen, of_steps, open_at
from rekindle.cli.terminal_output import clock, progress, table
from rekindle.errors import CheckpointError, UsageError
from rekindle.job.spec import check_job_id
from rekindle.words import size

MOST_HOURS = 24 * 3660  # ten years; a pin without an end lasts longer


def pin(options: argparse.Namespace) -> int:
    """Protect the newest complete checkpoint of a step against pruning."""
    check_name(options.name)
    if options.hours is not None and not 0 < options.hours <= MOST_HOURS:
        raise UsageError(f"--hours {options.hours}: give a number above 0 and at most {MOST_HOURS}")
    store = open_at(options.store, exists=True)
    seen = of_steps(store.survey(), [options.step], store)
    for each in seen:
        if not each.reason and not each.unfinished:
            until = None
            if options.hours is not None:
                until = math.ceil(time.time() + options.hours * 3600)
            key = (each.step, each.generation)
            new = Pin(key, options.name, until)
            if store.pin(new):
                for old in store.pins():
                    if (old.key, old.name) == (key, options.name) and old != new:
                        store.unpin(old)
                end = "until it is unpinned" if until is None else f"until {clock(until)}"
                print(f"{each.location}: pinned {end} ({options.name})")
                return 0
    reason = seen[0].reason or "another process pruned it"
    raise CheckpointError(f"Rekindle cannot pin {seen[0].location}: {reason}")


def unpin(options: argparse.Namespace) -> int:
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
    return 0


def pins_of(seen: CheckpointInfo, pins: list[Pin], now: float) -> list[str]:
    """Return the names of the pins that protect a checkpoint now."""
    key: Key = (seen.step, seen.generation)
    return sorted({each.name for each in pins if each.key == key and each.holds(now)})


def export_state(options: argparse.Namespace) -> int:
    """Write a checkpoint's state for torch."""
    from rekindle.training.torch.convert import whole

    out = Path(options.out).absolute()
    whole.check_out(out)
    with chosen(options.store, options.step) as checkpoint:
        step = checkpoint.manifest.step
        states, skeleton = whole.read_states(checkpoint, options.only or ())
    if options.format == "torch":
        whole.save_torch(states, step, out)
    else:
        whole.save_dcp(states, step, skeleton, out)
    print(f"step {step}: {', '.join(states)}: {out}")
    return 0


def import_state(options: argparse.Namespace) -> int:
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
        print(f"rekindle: left out: {', '.join(imported.left_out)}", file=sys.stderr)
    verb = "existed already" if written.existed else "imported"
    names = ", ".join(imported.tree)
    print(f"step {step}, {size(written.bytes)}: {verb}: {names}: {written.location}")
    return 0


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


_INTERRUPTED = 130  # the exit status of a shell after Ctrl-C


def run(options: argparse.Namespace) -> int:
    """Run one of the sub-commands; return its exit status."""
    try:
        return _ACTIONS[options.action](options)
    except KeyboardInterrupt:
        print("\nrekindle: interrupted; the command left no incomplete checkpoint", file=sys.stderr)
        return _INTERRUPTED


def _ls(options: argparse.Namespace) -> int:
    store = open_at(options.store, exists=True)
    seen = store.survey()
    found, now = store.pins(), time.time()
    pins = {each.location: pins_of(each, found, now) for each in seen}
    if options.json:
        print(json.dumps([_told(each) | {"pins": pins[each.location]} for each in seen]))
        return 0
    head = ("step", "generation", "when", "size", "files", "framework", "world size", "state")
    rows = [(s.step, s.generation, *_facts(s), _state(s, pins[s.location])) for s in seen]
    if rows:
        table(head, rows)
    else:
        print(f"no checkpoints in {store.location}")
    return 0


def _verify(options: argparse.Namespace) -> int:
    store = open_at(options.store, exists=True)
    seen = of_steps(store.survey(), options.steps, store)
    checkpoints = [store.at(each.manifest) for each in seen if each.manifest]
    damages: dict[str, tuple[Damage, ...]] = {}
    if checkpoints:
        with progress(f"verify {len(checkpoints)} checkpoints", _bytes(checkpoints)) as told:
            for each in checkpoints:
                try:
                    with reading(store, (each.manifest.step, each.manifest.generation)):
                        damages[each.location] = verify(each, told)
                except CheckpointError as error:
                    print(f"rekindle: not verified: {error}", file=sys.stderr)
                    seen = [one for one in seen if one.location != each.location]
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
    target = open_at(options.target, exists=False)
    with chosen(options.source, options.step) as checkpoint:
        step, total = checkpoint.manifest.step, _bytes([checkpoint])
        with progress(f"copy step {step}", total) as told:
            written = copy(checkpoint, target, told)
    verb = "existed already" if written.existed else "copied"
    print(f"step {step}, {size(total)}: {verb}: {written.location}")
    return 0


def _prune(options: argparse.Namespace) -> int:
    if options.keep < 1:
        raise UsageError(f"--keep {options.keep}: give at least 1")
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
    return 0


def _would_go(
    store: CheckpointStore, seen: Sequence[CheckpointInfo], retention: Retention
) -> tuple[Key, ...]:
    """Return the finished checkpoints that CheckpointStore.prune() would remove."""
    finished = [(s.step, s.generation) for s in seen if not s.unfinished]
    manifests = {(s.step, s.generation): s.manifest for s in seen if s.manifest}
    usable = {(s.step, s.generation) for s in seen if s.manifest and not s.reason}

    def is_valid(key: Key) -> bool:
        if key not in usable:
            return False
        checkpoint = store.at(manifests[key])
        with progress(f"verify step {key[0]}", _bytes([checkpoint])) as told:
            return not verify(checkpoint, told)

    going = may_go(
        finished,
        retention,
        is_valid=is_valid,
        manifest_of=manifests.__getitem__,  # with --keep the function reads no manifest
        pins=store.pins(),
        now=time.time(),
    )
    newer = {(s.step, s.generation) for s in seen if s.newer}
    return tuple(key for key in going if key not in newer)


def _bytes(checkpoints: Sequence[Checkpoint]) -> int:
    return sum(bytes_of(each.manifest) for each in checkpoints)


def _facts(seen: CheckpointInfo) -> tuple[object, ...]:
    """Return date, size, number of files, framework and world size, or "-" if unknown."""
    found = seen.manifest
    if found is None:
        return ("-",) * 5
    about = (found.framework or "-", found.world_size)
    return (clock(found.created), size(bytes_of(found)), len(found.files), *about)


def _state(seen: CheckpointInfo, pins: Sequence[str]) -> str:
    if seen.unfinished:
        return "unfinished"
    state = f"cannot be used: {seen.reason}" if seen.reason else "complete"
    return f"{state}, pinned ({', '.join(pins)})" if pins else state


def _told(seen: CheckpointInfo) -> dict[str, object]:
    """Return the JSON form of a row."""
    manifest: dict[str, object] = msgspec.to_builtins(seen.manifest) if seen.manifest else {}
    about = {"step": seen.step, "generation": seen.generation, "location": seen.location}
    state = "unfinished" if seen.unfinished else "unusable" if seen.reason else "complete"
    size_of = {"bytes": bytes_of(seen.manifest)} if seen.manifest else {}
    return manifest | about | size_of | {"state": state, "reason": seen.reason}


def _verdict(seen: CheckpointInfo, damages: dict[str, tuple[Damage, ...]]) -> dict[str, object]:
    found = damages.get(seen.location, ())
    verdict = "damaged" if _is_bad(seen, damages) else "intact"
    return {
        "verdict": "unfinished" if seen.unfinished else verdict,
        "damages": msgspec.to_builtins(found),
    }


def _is_bad(seen: CheckpointInfo, damages: dict[str, tuple[Damage, ...]]) -> bool:
    return bool(seen.manifest is None or damages.get(seen.location) or seen.reason)


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


_ACTIONS = {
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
