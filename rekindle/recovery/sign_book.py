"""What was reported of each device: answered once, and counted where it repeats. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from rekindle.recovery import journal
from rekindle.recovery.classification import Judge, Sign, Source, gravest
from rekindle.recovery.codes.escalation import Change
from rekindle.recovery.codes.verdict import Verdict
from rekindle.recovery.fault import Fault

_Place = tuple[str, int]  # a host and the number of its device


class SignBook:
    """The signs of all devices, as the journal has them.

    unmet: faults that signs have told of, and no rank yet.
    """

    def __init__(self, seen: Iterable[journal.SignSeen] = ()) -> None:
        self._present: dict[_Place, set[tuple[Source, str]]] = {}
        self._changes: dict[_Place, list[Change]] = {}  # of Ascend codes
        self.unmet: list[Fault] = []
        self._answered: dict[_Place, set[tuple[str, str]]] = {}
        for event in seen:
            self.note(event.sign, event.host, event.at)

    def note(self, sign: Sign, host: str, at: float) -> bool:
        """Take a sign down; False: it is no news."""
        place, name = (host, sign.device), (sign.source, sign.what)
        present = self._present.setdefault(place, set())
        if (name in present) is not sign.gone:
            return False
        (present.discard if sign.gone else present.add)(name)
        if sign.source is Source.ASCEND:
            change = Change(sign.what, at, present=not sign.gone)
            self._changes.setdefault(place, []).append(change)
        if not sign.gone:
            self._answered.pop(place, None)
        return True

    def worse(self, judge: Judge, now: float) -> list[tuple[str, int, Verdict]]:
        """Return devices (host, number) whose codes come too often or stay too long, once each."""
        found = []
        for place, changes in self._changes.items():
            verdicts = judge.escalated(changes, now)
            if verdicts and self.answer(*place, verdict := gravest(verdicts)):
                found.append((*place, verdict))
        return found

    def answer(self, host: str, device: int, verdict: Verdict) -> bool:
        """Whether this verdict is to be answered: not again while nothing new was reported."""
        answered = self._answered.setdefault((host, device), set())
        name = verdict.code, verdict.urgency.value
        if name in answered:
            return False
        answered.add(name)
        return True

    @property
    def waits(self) -> bool:
        """Whether an Ascend code is present, which may yet stay too long."""
        return any(source is Source.ASCEND for s in self._present.values() for source, _ in s)
