"""Faults that tests inject, and the log of requests to the server."""

from __future__ import annotations

import re
import time
from collections import Counter, deque

import msgspec


class Fault(msgspec.Struct):
    """A fault of the next matching requests. It has an effect only with code, delay or cut."""

    verb: str = ".*"
    resource: str = ".*"  # such as pods, pods/log, services/proxy, jobs.batch
    user: str = ".*"
    count: int = 1
    code: int = 0
    retry_after: int | None = None
    delay: float = 0.0
    cut: bool = False  # cuts the connection; a watch or log at its next piece
    after: int = 0  # pieces of a watch or log before the cut

    def is_for(self, verb: str, resources: tuple[str, ...], user: str) -> bool:
        return (
            self.count > 0
            and bool(re.fullmatch(self.verb, verb))
            and any(re.fullmatch(self.resource, each) for each in resources)
            and bool(re.fullmatch(self.user, user))
        )


class Call(msgspec.Struct):
    """One request to the server."""

    at: float
    user: str
    verb: str
    resource: str
    namespace: str
    name: str
    code: int = 0


class Faults:
    """The faults that requests have not yet met, and all requests so far."""

    def __init__(self) -> None:
        self.waiting: list[Fault] = []
        self.calls: deque[Call] = deque(maxlen=100_000)

    def next(self, verb: str, resources: tuple[str, ...], user: str) -> Fault | None:
        """Return the fault that this request meets, or None, and count it."""
        for fault in self.waiting:
            if fault.is_for(verb, resources, user):
                fault.count -= 1
                if not fault.count:
                    self.waiting.remove(fault)
                return fault
        return None

    def note(self, call: Call) -> Call:
        self.calls.append(call)
        return call

    def counted(self, since: float = 0.0) -> dict[str, dict[str, int]]:
        """Return the number of requests by user, and by verb and resource."""
        found: dict[str, Counter[str]] = {}
        for call in self.calls:
            if call.at >= since:
                found.setdefault(call.user, Counter())[f"{call.verb} {call.resource}"] += 1
        return {user: dict(counter) for user, counter in found.items()}


def moment() -> float:
    return time.time()
