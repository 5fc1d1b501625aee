"""Times in the formats of Kubernetes objects."""

from __future__ import annotations

import datetime


def now() -> datetime.datetime:
    return datetime.datetime.now(datetime.timezone.utc)


def stamp(at: datetime.datetime | None = None) -> str:
    """Return a time in whole seconds."""
    return (at or now()).strftime("%Y-%m-%dT%H:%M:%SZ")


def micro(at: datetime.datetime | None = None) -> str:
    """Return a time in microseconds, the format of leases and events."""
    return (at or now()).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def read(text: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(text.replace("Z", "+00:00"))


def since(text: str) -> float:
    """Return the seconds since this time."""
    return (now() - read(text)).total_seconds()
