"""Decide about a flow run or task run that has ended: its fault, and the action. Pure.

The same ladder decides about ranks and runs. Its input is every end since a person last started the
run by hand. Therefore its budgets do not depend on a counter or on a process.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from rekindle.errors import (
    CheckpointError,
    HopelessError,
    JobError,
    JobFailedError,
    LeaseHeldError,
    OtherJobError,
    OtherVersionError,
    RecordLostError,
    RejectedError,
    UsageError,
)
from rekindle.recovery.faults.fault import Exit, Fault, FaultKind
from rekindle.recovery.faults.tables.tables import Tables
from rekindle.recovery.faults.tables.verdict import Verdict, unlisted
from rekindle.recovery.policy.decide import Decision, decide
from rekindle.recovery.policy.history import Past, Situation
from rekindle.recovery.policy.policy import JOBS, Policy, Strategy

# A repeated run is another process, on any node; nothing is isolated.
AGAIN = (Strategy.RESTART, *JOBS)

# The beginning of the message of a run that a mistake in its parameters or blocks has ended.
CANNOT_START = "The job cannot start: "

# Another run cannot change these ends, and a person must know about them.
_FINAL = {
    JobFailedError.__name__: "the job has ended by its own policy",
    HopelessError.__name__: "the pods of the job cannot run as described",
    LeaseHeldError.__name__: "another flow run or command steers the job",
    RecordLostError.__name__: "the job has succeeded, and its record is not here",
    OtherJobError.__name__: "the id belongs to another job",
    OtherVersionError.__name__: "another version of Rekindle has started the job",
    RejectedError.__name__: "the trained model is not good enough",
    CheckpointError.__name__: "there is no usable checkpoint",
}
# Another run hardly helps; it is tried once, as for an error of the script.
_HARDLY = (UsageError.__name__, JobError.__name__)
_INTERRUPTED = "Execution was aborted by an interrupt signal"
_INVALID = "Validation of flow parameters failed with error:"

# The text of Prefect before the exception (3.8: flow_engine.py, task_engine.py).
_BEFORE_EXCEPTION = re.compile(r"(?:Flow|Task) run encountered an (?:unexpected )?exception:?\s+")
_ERROR = re.compile(r"(?:\w{1,64}\.){0,8}(\w{1,64})\b")
_STATUS = re.compile(r"status code:? (-?\d{1,4})\b")

# Prefect's texts for crashed runs (3.8: states.py, runner) in which the run itself has no fault. A
# platform removes a place with SIGTERM; a person cancels.
_CRASHES = {
    "aborted by a termination signal": FaultKind.EVICTION,
    # Prefect raises a CancelledError in a run that has lost its concurrency slot; it counts.
    "cancelled by the runtime environment": FaultKind.PROCESS,
    "contact the server": FaultKind.TRANSIENT,
    "Request to ": FaultKind.TRANSIENT,
    "could not start": FaultKind.SCHEDULING,
    "could not be started": FaultKind.SCHEDULING,
    "aborted by Python system exit call": FaultKind.USER_CODE,
}
_TERMINATED = (Exit(signal=15), Exit(code=143))  # SIGTERM, also as shells and containers report it


class RunEnd(msgspec.Struct, frozen=True, kw_only=True):
    """Describe the end of a run.

    `message` is the message of its state. `crashed` means that the run did not end by an exception
    of its own. `at` is seconds since the epoch.
    """

    message: str
    crashed: bool = False
    at: float = 0.0


def decide_run(policy: Policy, ends: Sequence[RunEnd], tables: Tables) -> Decision:
    """Decide about the last of these ends; the run was repeated after all the others.

    A strategy of `AGAIN` repeats the run. Any other strategy leaves the run as it ended.
    """
    past: list[Past] = []
    for number, end in enumerate(ends[:-1], start=1):
        fault = fault_of(end, tables)
        strategy = _judge(policy, fault, past, number).strategy
        # The policy may have been different then, but the run certainly was repeated.
        strategy = strategy if strategy in AGAIN else Strategy.RESCHEDULE_JOB
        past.append(Past(fault=fault, strategy=strategy, incident=number))
    return _final(ends[-1]) or _last(policy, fault_of(ends[-1], tables), past, len(ends))


def fault_of(end: RunEnd, tables: Tables) -> Fault:
    """Return the fault that the message of the run's state describes."""
    text = _own_words(end.message)
    first, error = text.partition("\n")[0], _ERROR.match(text)
    if error and error[1] in _HARDLY and not end.crashed:
        # The message may name a process, and therefore varies.
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
        restart_heals=verdict.restart_heals,
        counts=verdict.counts and verdict.kind is not FaultKind.EVICTION,
    )


def _last(policy: Policy, fault: Fault, past: Sequence[Past], number: int) -> Decision:
    decision = _judge(policy, fault, past, number)
    if decision.strategy not in AGAIN:
        return decision
    # The ladder describes ranks and nodes; for a whole run the cause and the strategy are enough.
    reason = f"{fault.message}; {decision.strategy.value}"
    return msgspec.structs.replace(decision, reason=reason)


def _judge(policy: Policy, fault: Fault, past: Sequence[Past], number: int) -> Decision:
    situation = Situation(
        fault=fault,
        session=False,
        formed=False,
        newest=0,
        engine=JOBS,
        incident=number,
        past=tuple(past),
    )
    return decide(policy, situation)


def _final(end: RunEnd) -> Decision | None:
    """Return the decision to leave a run that has ended for good, or None."""
    text = _own_words(end.message)
    if text.startswith(_INTERRUPTED):
        return Decision(strategy=Strategy.FAIL, reason="a person at the terminal interrupted it")
    if text.startswith((_INVALID, CANNOT_START)):
        return Decision(strategy=Strategy.FAIL, reason=text)
    error = _ERROR.match(text)
    why = _FINAL.get(error[1]) if error and not end.crashed else None
    return Decision(strategy=Strategy.FAIL, reason=f"{why}: {text}") if why else None


def _own_words(message: str) -> str:
    """Return the run's own message, without the text of Prefect before it."""
    return _BEFORE_EXCEPTION.sub("", message.strip(), count=1)


def _of_crash(text: str, tables: Tables) -> Verdict | None:
    """Return the verdict on the end of the run's process, if the message contains it."""
    status = _STATUS.search(text)
    exit_ = Exit.of(int(status[1])) if status else None
    if exit_ in _TERMINATED:
        return unlisted(FaultKind.EVICTION, "another process asked it to end")
    if exit_ is not None:
        return tables.exit(exit_)
    kind = next((kind for words, kind in _CRASHES.items() if words in text), None)
    return unlisted(kind, text) if kind else None
