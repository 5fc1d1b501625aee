"""Pins as objects of a store in S3. There is no lock, so order is all.

Whoever pins puts the pin first and looks for the manifest then. Whoever prunes removes the manifest
first and looks for pins then, and puts it back where one has come. So one of them sees the other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from rekindle.checkpoints.checkpoint_path import Key
from rekindle.checkpoints.pins import PINS, Pin, expired, in_use, pin_of
from rekindle.checkpoints.s3.body import Body
from rekindle.checkpoints.s3.client import Bucket
from rekindle.checkpoints.s3.place import S3Place


def listed(bucket: Bucket) -> list[Pin]:
    """All pins of this store, also those that have expired."""
    root = _root(bucket)
    names = sorted(found.key.removeprefix(root) for found in bucket.objects(root))
    return [pin for name in names if (pin := pin_of(name))]


def add(bucket: Bucket, pin: Pin) -> bool:
    """Pin a checkpoint; False: it is not there."""
    place = S3Place(bucket, pin.key)
    if not bucket.size(place.manifest_key):
        return False
    bucket.put(_root(bucket) + pin.marker, Body([]).slice(0, 0))
    if not bucket.size(place.manifest_key):
        remove(bucket, pin)
        return False
    return True


def remove(bucket: Bucket, pin: Pin) -> None:
    """Remove a pin, if it is there."""
    bucket.delete(_root(bucket) + pin.marker)


def revoke(bucket: Bucket, key: Key, now: float) -> bool:
    """Make a checkpoint count no more, unless somebody has pinned it meanwhile."""
    manifest = S3Place(bucket, key).manifest_key
    if not bucket.size(manifest):
        return True
    if key in in_use(listed(bucket), now):
        return False
    data = bucket.get(manifest)
    bucket.delete(manifest)
    if key not in in_use(listed(bucket), now):
        return True
    bucket.put(manifest, Body([data]).slice(0, len(data)))
    return False


def sweep(bucket: Bucket, finished: Callable[[], Collection[Key]], now: float) -> None:
    """Remove the pins that nobody needs.

    finished: asked after the pins were listed: what was pinned by then was finished by then.
    """
    pins = listed(bucket)
    if pins:
        for pin in expired(pins, finished(), now):
            remove(bucket, pin)


def _root(bucket: Bucket) -> str:
    return f"{bucket.location.root}{PINS}/"
