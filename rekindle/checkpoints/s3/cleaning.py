"""Pins in S3, and the removal of objects. S3 does not have locks, so the order protects."""

from __future__ import annotations

from collections.abc import Callable, Collection

from rekindle.checkpoints.manifest import MANIFEST_FILE
from rekindle.checkpoints.pins import PINS, Pin, expired, in_use, pin_of
from rekindle.checkpoints.s3.client import Bucket, Slice, Upload
from rekindle.checkpoints.s3.parallel_transfer import in_parallel
from rekindle.checkpoints.s3.place import (
    ABANDONED,
    Inventory,
    Objects,
    S3Place,
    is_finished,
    outdated,
    step_of,
    unreferenced,
)
from rekindle.checkpoints.s3.request_failures import S3Error, S3ErrorKind
from rekindle.errors import CorruptError, NewerFormatError
from rekindle.states import StateId


def listed(bucket: Bucket) -> list[Pin]:
    """Return all pins of this store, also expired ones."""
    root = _root(bucket)
    names = sorted(found.key.removeprefix(root) for found in bucket.objects(root))
    return [pin for name in names if (pin := pin_of(name))]


def add(bucket: Bucket, pin: Pin) -> bool:
    """Pin a checkpoint. Return False if it does not exist."""
    place = S3Place(bucket, pin.key)
    if not bucket.size(place.manifest_key):
        return False
    bucket.put(_root(bucket) + pin.marker, Slice([]))
    if not bucket.size(place.manifest_key):
        remove(bucket, pin)
        return False
    return True


def remove(bucket: Bucket, pin: Pin) -> None:
    """Remove a pin, if it exists."""
    bucket.delete(_root(bucket) + pin.marker)


def revoke(bucket: Bucket, key: StateId, now: float) -> bool:
    """Remove the manifest of a checkpoint. Return False, without a change, if it is pinned.

    The function lists the pins again after the removal. If a process has pinned the checkpoint in
    between, the function restores the manifest.
    """
    manifest = S3Place(bucket, key).manifest_key
    if not bucket.size(manifest):
        return True
    if key in in_use(listed(bucket), now):
        return False
    data = bucket.get(manifest)
    bucket.delete(manifest)
    if key not in in_use(listed(bucket), now):
        return True
    bucket.put(manifest, Slice([data]))
    return False


def sweep(bucket: Bucket, finished: Callable[[], Collection[StateId]], now: float) -> None:
    """Remove expired pins, and pins of checkpoints that do not exist.

    finished: called after the pins were listed, so it contains the checkpoint of each valid pin.
    """
    pins = listed(bucket)
    if pins:
        for pin in expired(pins, finished(), now):
            remove(bucket, pin)


def _root(bucket: Bucket) -> str:
    return f"{bucket.location.root}{PINS}/"


def remove_checkpoint(bucket: Bucket, objects: Objects) -> None:
    """Remove all objects, the manifest first: an incomplete checkpoint must not be valid."""
    keys = [found.key for name, found in objects.items() if name != MANIFEST_FILE]
    if MANIFEST_FILE in objects:
        bucket.delete(objects[MANIFEST_FILE].key)
    in_parallel(bucket.delete, keys)


def remove_left_over(bucket: Bucket, inventory: Inventory, tidy: Inventory) -> None:
    """Remove the objects of writers that were killed, after a newer checkpoint is finished.

    Before a newer checkpoint is finished, a writer may still be writing such objects. The function
    takes removed objects out of the inventory. tidy: checkpoints without such objects. The function
    does not list the objects of these again while they are unchanged, and it updates `tidy`.
    """
    for key in outdated(inventory, list(inventory)):
        place, objects = S3Place(bucket, key), inventory[key]
        if not is_finished(objects):
            left = place.abandon()
            mark = left.pop(ABANDONED, None)
            if mark is None:
                continue  # it was committed, or another process is removing it
            remove_checkpoint(bucket, left)
            bucket.delete(mark.key)  # last: the mark prevents a commit of the rest
            del inventory[key]
        elif tidy.get(key) != objects:
            try:
                spare = unreferenced(objects, place.manifest())
            except (CorruptError, NewerFormatError):
                continue  # a damaged checkpoint stays as evidence until it is pruned
            in_parallel(bucket.delete, [found.key for found in spare])
            inventory[key] = {name: found for name, found in objects.items() if found not in spare}
            tidy[key] = inventory[key]
    for key in set(tidy).difference(inventory):
        del tidy[key]
    _abort_uploads(bucket, inventory)


def _abort_uploads(bucket: Bucket, inventory: Inventory) -> None:
    root = bucket.location.root
    try:
        uploads = bucket.uploads(f"{root}step-")
    except S3Error as error:
        if error.kind is S3ErrorKind.UNSUPPORTED:
            return  # such a server aborts uploads itself
        raise
    steps = {found: of[0] for found in uploads if (of := step_of(root, found.key))}
    old = set(outdated(inventory, steps.values()))
    for found, step in steps.items():
        if step in old:
            _abort(bucket, found)


def _abort(bucket: Bucket, found: Upload) -> None:
    try:
        bucket.abort(found)
    except S3Error as error:
        if error.kind is not S3ErrorKind.NO_UPLOAD:  # another process has aborted it
            raise
