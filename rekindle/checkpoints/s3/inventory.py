"""The objects of a store in S3, by the checkpoint they belong to; and what they tell. No I/O."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from rekindle.checkpoints.checkpoint_path import Key, is_outdated, key_of
from rekindle.checkpoints.manifest import MANIFEST_FILE, Manifest
from rekindle.checkpoints.s3.client import Stored
from rekindle.errors import CorruptError

# The objects of one checkpoint by the rest of their key, and of all checkpoints.
Objects: TypeAlias = dict[str, Stored]
Inventory: TypeAlias = dict[Key, Objects]


def stored_name(name: str, checksum: str) -> str:
    """What a file with these bytes is called: never the same as one with others.

    So no writer can damage what another one has written, or is writing.
    """
    stem, dot, suffix = name.rpartition(".")
    digest = checksum.partition(":")[2][:16]
    return f"{stem}-{digest}.{suffix}" if dot else f"{name}-{digest}"


def step_of(root: str, key: str) -> tuple[Key, str] | None:
    """The checkpoint that this object belongs to, and its name there; None if to none."""
    place, _, name = key.removeprefix(root).partition("/")
    step = key_of(place)
    return (step, name) if step and name else None


def inventory_of(root: str, stored: Iterable[Stored]) -> Inventory:
    """These objects by checkpoint."""
    inventory: Inventory = {}
    for found in stored:
        if step := step_of(root, found.key):
            inventory.setdefault(step[0], {})[step[1]] = found
    return inventory


def is_finished(objects: Objects) -> bool:
    """Whether there is a manifest."""
    return MANIFEST_FILE in objects and objects[MANIFEST_FILE].bytes > 0


def check_sizes(manifest: Manifest, objects: Objects) -> None:
    """Raise CorruptError unless each file is there with the size that the manifest says."""
    for entry in manifest.files:
        if entry.file not in objects:
            raise CorruptError(f"{entry.name} is missing")
        actual = objects[entry.file].bytes
        if actual != entry.bytes:
            raise CorruptError(f"{entry.name} has {actual} bytes, the manifest says {entry.bytes}")


def outdated(inventory: Inventory, places: Iterable[Key]) -> list[Key]:
    """Those of these places that nobody writes any more: something newer is finished."""
    finished = [key for key, objects in inventory.items() if is_finished(objects)]
    return [key for key in places if is_outdated(key, finished)]


def unreferenced(objects: Objects, manifest: Manifest) -> list[Stored]:
    """What another writer, or an earlier attempt, left beside the files of a checkpoint."""
    named = {MANIFEST_FILE, *(entry.file for entry in manifest.files)}
    return [found for name, found in objects.items() if name not in named]
