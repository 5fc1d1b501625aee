"""A fault that an incident has to get over: what is known of it, and whether it is over. Pure."""

from __future__ import annotations

import random

import msgspec

from rekindle.recovery.faults.fault import Fault, Kind
from rekindle.recovery.policy.policy import Strategy
from rekindle.simulation.costs import StrategyRow
from rekindle.simulation.trace import Cause, Strike

ENDS = (Strategy.DUMP, Strategy.FAIL)
GONE = (Kind.NODE_LOST, Kind.EVICTION)
_OF_NODES = (*GONE, Kind.NODE)


class Broken(msgspec.Struct, kw_only=True):
    """A strike on one node.

    finished: steps that the job had finished. moved: its node was left for another. missed: that
    did not come in time. again: the fault comes again, for what was done left its cause alone.
    """

    strike: Strike
    node: int
    finished: int
    moved: bool = False
    missed: bool = False
    again: bool = False
    chance: random.Random | None = None

    @property
    def is_gone(self) -> bool:
        """Whether its node is not there any more, and nobody was asked to take its place."""
        return self.strike.row.kind in GONE and not self.moved

    def needs_to_move(self, strategy: Strategy) -> bool:
        """Whether a strategy that can leave its place does: a person only if that is to blame."""
        return strategy not in ENDS or (self.strike.cause is Cause.PLACE and not self.moved)

    def fault(self, *, at: float, host: str, per_node: int) -> Fault:
        """Return it as Rekindle would see it now."""
        row = self.strike.row
        if self.missed:
            text = f"no node came as node {self.node} in time"
            return Fault(kind=Kind.SCHEDULING, message=text, finished=self.finished, at=at)
        revealed = self.again and row.becomes is not None and self.strike.cause is Cause.PLACE
        kind = row.becomes if revealed and row.becomes else row.kind
        of_node = kind in _OF_NODES
        return Fault(
            kind=kind,
            message=row.name,
            rank=-1 if of_node else self.node * per_node + self.strike.device,
            node=self.node,
            finished=self.finished,
            signature=row.name,
            at=at,
            host=host,
            device=-1 if of_node else self.strike.device,
            code=(row.code or row.name) if revealed else row.code,
            user_caused=row.user_caused or kind is Kind.USER_CODE,
            self_heal=row.self_heal and not revealed,
        )

    def answer(self, row: StrategyRow) -> None:
        """Note whether a strategy gets over it. Chance is that of the strike, whatever is tried."""
        if row.strategy in ENDS:  # whoever begins the job again has looked at it
            self.again = False
            return
        cause = self.strike.cause
        helps = cause is Cause.NOTHING or (cause is Cause.PLACE and self.moved)
        if row.succeeds < 1:
            self.chance = self.chance or random.Random(self.strike.seed + self.node)
            helps = self.chance.random() < row.succeeds and helps
        self.again = not helps
