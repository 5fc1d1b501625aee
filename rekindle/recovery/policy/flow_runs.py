"""A flow run or task run that ended as a whole: which fault that was, and what to do. Pure.

The ladder that decides about ranks decides here, too. It is told of every end since somebody last
began the run by hand, so its budgets need no counter, and outlive every process.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from rekindle.errors import (
    CheckpointError,
    JobError,
    JobFailedError,
    RejectedError,
    UsageError,
)
from rekindle.recovery.faults.fault import Exit, Fault, FaultKind
from rekindle.recovery.faults.tables.rows import unlisted
from rekindle.recovery.faults.tables.tables import Tables
from rekindle.recovery.faults.tables.verdict import Verdict
from rekindle.recovery.policy.decide import Decision, decide
from rekindle.recovery.policy.history import Past, Situation
from rekindle.recovery.policy.policy import Policy, Strategy

# A run that is run again is another process, wherever that is started; nothing is isolated.
AGAIN = (Strategy.RESTART, Strategy.RESCHEDULE_JOB_ISOLATED, Strategy.RESCHEDULE_JOB)

# What another run of the same cannot change, and what a person has to know.
_FINAL = {
    JobFailedError.__name__: "the job has ended by its own policy",
    RejectedError.__name__: "what was trained is not good enough",
    CheckpointError.__name__: "there is no checkpoint that can be used",
}
# What is hardly better another time: like an error of the script, it is tried once more.
_HARDLY = (UsageError.__name__, JobError.__name__)
_INTERRUPTED = "Execution was aborted by an interrupt signal"
_INVALID = "Validation of flow parameters failed with error:"

# Prefect's words before the exception (3.8: flow_engine.py, task_engine.py).
_BEFORE_EXCEPTION = re.compile(r"(?:Flow|Task) run encountered an (?:unexpected )?exception:?\s+")
_ERROR = re.compile(r"(?:\w{1,64}\.){0,8}(\w{1,64})\b")
_STATUS = re.compile(r"status code:? (-?\d{1,4})\b")

# What Prefect says of runs that crashed (3.8: states.py, runner), where nothing of the run itself
# is at fault. SIGTERM is how a platform takes a place away; a person cancels.
_CRASHES = {
    "aborted by a termination signal": FaultKind.EVICTION,
    # A CancelledError, which Prefect raises in a run whose concurrency slot is gone: it counts.
    "cancelled by the runtime environment": FaultKind.PROCESS,
    "contact the server": FaultKind.TRANSIENT,
    "Request to ": FaultKind.TRANSIENT,
    "could not start": FaultKind.SCHEDULING,
    "could not be started": FaultKind.SCHEDULING,
    "aborted by Python system exit call": FaultKind.USER_CODE,
}
_TERMINATED = (Exit(signal=15), Exit(code=143))  # SIGTERM, also as shells and containers have it


class RunEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended: the message of its state; crashed: not by an exception in it.

    at: seconds since the epoch.
    """

    message: str
    crashed: bool = False
    at: float = 0.0


def decide_run(policy: Policy, ends: Sequence[RunEnd], tables: Tables) -> Decision:
    """Decide what is done about the last of these ends; after all others it was run again.

    A strategy of `AGAIN` means: once more. Any other: leave it as it ended.
    """
    past: list[Past] = []
    for number, end in enumerate(ends[:-1], start=1):
        fault = fault_of(end, tables)
        strategy = _judge(policy, fault, past, number).strategy
        # The policy may have been another one then; that it was run again is certain.
        strategy = strategy if strategy in AGAIN else Strategy.RESCHEDULE_JOB
        past.append(Past(fault=fault, strategy=strategy, incident=number))
    return _final(ends[-1]) or _last(policy, fault_of(ends[-1], tables), past, len(ends))


def fault_of(end: RunEnd, tables: Tables) -> Fault:
    """Say what went wrong, as far as the message of the run's state tells."""
    text = _own_words(end.message)
    first, error = text.partition("\n")[0], _ERROR.match(text)
    if error and error[1] in _HARDLY and not end.crashed:
        # Its message may name a process, and differ each time.
        return Fault(kind=FaultKind.USER_CODE, message=first, signature=error[1], at=end.at)
    verdict = (_of_crash(text, tables) if end.crashed else None) or tables.text(text)
    return Fault(
        kind=verdict.kind,
        message=f"{first} ({verdict.explanation})" if verdict.listed else first,
        signature=first,
        at=end.at,
        code=verdict.code,
        user_caused=verdict.user_caused,
        reset_helps=verdict.reset_helps,
        counts=verdict.counts and verdict.kind is not FaultKind.EVICTION,
    )


def _last(policy: Policy, fault: Fault, past: Sequence[Past], number: int) -> Decision:
    decision = _judge(policy, fault, past, number)
    if decision.strategy not in AGAIN:
        return decision
    # The ladder speaks of ranks and nodes; of a whole run it is enough to say why, and what counts.
    said = f"{fault.message}; {decision.strategy.value}"
    return msgspec.structs.replace(decision, reason=said)


def _judge(policy: Policy, fault: Fault, past: Sequence[Past], number: int) -> Decision:
    case = Situation(
        fault=fault,
        session=False,
        formed=False,
        newest=0,
        engine=AGAIN[1:],
        incident=number,
        past=tuple(past),
    )
    return decide(policy, case)


def _final(end: RunEnd) -> Decision | None:
    """Leave alone what ended for good."""
    text = _own_words(end.message)
    if text.startswith(_INTERRUPTED):
        return Decision(strategy=Strategy.FAIL, reason="a person at the terminal interrupted it")
    if text.startswith(_INVALID):
        return Decision(strategy=Strategy.FAIL, reason=text)
    error = _ERROR.match(text)
    why = _FINAL.get(error[1]) if error and not end.crashed else None
    return Decision(strategy=Strategy.FAIL, reason=f"{why}: {text}") if why else None


def _own_words(message: str) -> str:
    """Return what the run itself said, without Prefect's words before it."""
    return _BEFORE_EXCEPTION.sub("", message.strip(), count=1)


def _of_crash(text: str, tables: Tables) -> Verdict | None:
    """Judge how the run's process ended, if the message tells."""
    status = _STATUS.search(text)
    exit_ = Exit.of(int(status[1])) if status else None
    if exit_ in _TERMINATED:
        return unlisted(FaultKind.EVICTION, "asked to end from outside")
    if exit_ is not None:
        return tables.exit(exit_)
    kind = next((kind for words, kind in _CRASHES.items() if words in text), None)
    return unlisted(kind, text) if kind else None
