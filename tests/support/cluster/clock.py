"""Times as objects have them."""

from __future__ import annotations

import datetime


def now() -> datetime.datetime:
    return datetime.datetime.now(datetime.timezone.utc)


def stamp(at: datetime.datetime | None = None) -> str:
    """Whole seconds."""
    return (at or now()).strftime("%Y-%m-%dT%H:%M:%SZ")


def micro(at: datetime.datetime | None = None) -> str:
    """As leases and events have them."""
    return (at or now()).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def read(text: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(text.replace("Z", "+00:00"))


def since(text: str) -> float:
    """Seconds from then until now."""
    return (now() - read(text)).total_seconds()
