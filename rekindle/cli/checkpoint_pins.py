"""`rekindle checkpoints pin` and `unpin`: what is to stay, whatever the retention says."""

from __future__ import annotations

import argparse
import math
import time

from rekindle.checkpoints.checkpoint_path import Key
from rekindle.checkpoints.pins import Pin, check_name
from rekindle.checkpoints.store import Seen
from rekindle.cli.open_store import of_steps, open_at
from rekindle.cli.table import clock
from rekindle.errors import CheckpointError, UsageError

MOST_HOURS = 24 * 3660  # ten years; for longer there is a pin without an end


def pin(options: argparse.Namespace) -> int:
    """Keep the newest complete checkpoint of a step from being pruned."""
    check_name(options.name)
    if options.hours is not None and not 0 < options.hours <= MOST_HOURS:
        raise UsageError(f"--hours {options.hours}: give a number above 0, {MOST_HOURS} at most")
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
    reason = seen[0].reason or "it was pruned meanwhile"
    raise CheckpointError(f"{seen[0].location} cannot be pinned: {reason}")


def unpin(options: argparse.Namespace) -> int:
    """Remove the pins of this name from a step."""
    store = open_at(options.store, exists=True)
    found = [
        each for each in store.pins() if (each.key[0], each.name) == (options.step, options.name)
    ]
    if not found:
        raise UsageError(
            f"{store.location}: step {options.step} has no pin of the name {options.name!r}"
        )
    for each in found:
        store.unpin(each)
    print(f"step {options.step}: no longer pinned ({options.name})")
    return 0


def pins_of(seen: Seen, pins: list[Pin], now: float) -> list[str]:
    """The names of the pins that keep a checkpoint."""
    key: Key = (seen.step, seen.generation)
    return sorted({each.name for each in pins if each.key == key and each.holds(now)})
