"""Faults that tests ask for, and the log of what was asked of the server."""

from __future__ import annotations

import re
import time
from collections import Counter, deque

import msgspec


class Fault(msgspec.Struct):
    """What the next requests of a kind meet. Without code, delay and cut it does nothing."""

    verb: str = ".*"
    resource: str = ".*"  # pods, pods/log, services/proxy, jobs.batch
    user: str = ".*"
    count: int = 1
    code: int = 0
    retry_after: int | None = None
    delay: float = 0.0
    cut: bool = False  # the connection; a watch or a log at its next piece
    after: int = 0  # pieces of a watch or a log that still come before the cut

    def is_for(self, verb: str, resources: tuple[str, ...], user: str) -> bool:
        return (
            self.count > 0
            and bool(re.fullmatch(self.verb, verb))
            and any(re.fullmatch(self.resource, each) for each in resources)
            and bool(re.fullmatch(self.user, user))
        )


class Call(msgspec.Struct):
    """One request."""

    at: float
    user: str
    verb: str
    resource: str
    namespace: str
    name: str
    code: int = 0


class Faults:
    """Those that are to come, and all calls so far."""

    def __init__(self) -> None:
        self.waiting: list[Fault] = []
        self.calls: deque[Call] = deque(maxlen=100_000)

    def next(self, verb: str, resources: tuple[str, ...], user: str) -> Fault | None:
        """The fault that this request meets."""
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
        """How often each verb was asked of each resource, by user."""
        found: dict[str, Counter[str]] = {}
        for call in self.calls:
            if call.at >= since:
                found.setdefault(call.user, Counter())[f"{call.verb} {call.resource}"] += 1
        return {user: dict(counter) for user, counter in found.items()}


def moment() -> float:
    return time.time()
