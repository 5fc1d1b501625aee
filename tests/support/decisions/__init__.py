"""Faults, and the recovery decisions about them."""

from __future__ import annotations

from typing import Any

from rekindle.recovery.faults.fault import Fault, FaultKind
from rekindle.recovery.policy.decide import Decision, decide
from rekindle.recovery.policy.history import Past, Situation
from rekindle.recovery.policy.policy import Policy, Strategy


def fault(kind: FaultKind, rank: int = 0, finished: int = 5, signature: str = "E") -> Fault:
    text = f"{kind.value} of rank {rank}"
    return Fault(kind=kind, message=text, rank=rank, node=0, finished=finished, signature=signature)


def judge(what: Fault, past: list[tuple[Fault, Strategy]], policy: Policy, **more: Any) -> Decision:
    """Return the decision about a fault. By default, the job trains with a Session."""
    settings = {"session": True, "formed": True, "newest": 5} | more
    before = tuple(Past(fault=seen, strategy=chosen, newest=seen.finished) for seen, chosen in past)
    return decide(policy, Situation(fault=what, past=before, **settings))
