"""ModelArts' "fault recovery of training jobs": a row for each sentence of that document.

Each name begins with the section of the document; "table 1" is its table of the strategies.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rekindle.errors import UsageError
from rekindle.recovery.faults.classification import (
    EventSource,
    HealthEvent,
    explained,
    fault_of_event,
    fault_of_exit,
    verdict_of,
)
from rekindle.recovery.faults.fault import ErrorRecord, Exit, Fault, FaultKind
from rekindle.recovery.faults.tables.tables import Tables
from rekindle.recovery.policy import annotations as a
from rekindle.recovery.policy.decide import Decision, decide
from rekindle.recovery.policy.history import Past, Situation
from rekindle.recovery.policy.policy import Policy, Strategy

HOUR_S = 3600.0
NOW = 100 * HOUR_S
HBM = "80E01801"  # HBM multi-bit ECC
OTHER, THIRD = "80E18005", "80E18000"  # other chip faults that a reset repairs
USER_CODES = ("80C98002", "80CB8002")
TABLES = Tables.load()

RESTART, HANG_RESTART = Strategy.RESTART, Strategy.HANG_RESTART
POD, ISOLATED = Strategy.RESCHEDULE_POD, Strategy.RESCHEDULE_JOB_ISOLATED
JOB, FAIL = Strategy.RESCHEDULE_JOB, Strategy.FAIL


def policy(**given: str) -> Policy:
    """Return the policy of these annotations, without strategies of Rekindle."""
    keys = {f"{a.MODELARTS_PREFIX}{key.replace('_', '-')}": value for key, value in given.items()}
    return a.from_modelarts(keys, Policy(strategies=()))


RETRY_8 = {"job_retry_num": "8"}
AUTO = policy(**RETRY_8)
UNCONDITIONAL = policy(**RETRY_8, job_unconditional_retry="true")
HANG = policy(**RETRY_8, hang_retry="true")
PODS = policy(**RETRY_8, pod_retry_num="3")
ALL = policy(**RETRY_8, job_unconditional_retry="true", hang_retry="true", pod_retry_num="3")
NONE = policy()


def chip(code: str = HBM, hours_ago: float = 0.0, device: int = 3, **more: Any) -> Fault:
    """Return the fault for a reported code of a chip, as the tables judge it."""
    event = HealthEvent(source=EventSource.ASCEND, what=code, node=1, device=device)
    at = NOW - hours_ago * HOUR_S
    fault = fault_of_event(event, verdict_of(TABLES, event), rank=8 + device, finished=5, at=at)
    return msgspec.structs.replace(fault, **({"host": "host-1"} | more))


def crash(hours_ago: float = 0.0, step: int = 5, code: int = 1, error: str = "") -> Fault:
    """Return the fault of a script that exited with a status other than 0.

    error: the text of its exception, if known.
    """
    at = NOW - hours_ago * HOUR_S
    raised = ErrorRecord(message=error) if error else None
    place = {"rank": 11, "node": 1, "finished": step}
    return fault_of_exit(TABLES, Exit(code=code), raised, at=at, **place)


LOST = Fault(kind=FaultKind.NODE_LOST, message="node 1 was lost", node=1, host="host-1", at=NOW)
DEADLOCK = HealthEvent(source=EventSource.NODE_CONDITION, what="KernelDeadlock=True", node=1)
SICK = fault_of_event(DEADLOCK, verdict_of(TABLES, DEADLOCK), rank=-1, finished=5, at=NOW)
URGENT = chip("80E18402")  # SeparateNPU
NOT_RESET = chip(reset_helps=False, reset_failed=True)  # the agent reports a failed reset
ECC = "RuntimeError: HBM MULTI BIT ECC ERROR.time us= 1743054421339124."
HEALS = "its device may heal when no process uses it"  # the code demands no reset
HUNG = Fault(kind=FaultKind.HANG, message="the job hangs", at=NOW)
NO_NODE = Fault(kind=FaultKind.SCHEDULING, message="no node came", at=NOW)


def past(
    *seen: tuple[Fault, Strategy], newest: int = 5, incident: int | None = None
) -> tuple[Past, ...]:
    """Return these earlier faults, by default each with its own incident."""
    return tuple(
        Past(fault=fault, strategy=strategy, newest=newest, incident=incident or number)
        for number, (fault, strategy) in enumerate(seen, 1)
    )


def judge(what: Fault, how: Policy, before: tuple[Past, ...] = (), **more: Any) -> Decision:
    """Decide for a script without a Session, as ModelArts does."""
    settings = {"session": False, "formed": True, "newest": 5, "incident": 99} | more
    return decide(how, Situation(fault=what, past=before, **settings))


TABLE = {
    # section: sentence -> (policy, fault, past, strategy, isolated, words of the reason)
    "table 1, in place: a healable chip fault restarts the job in its containers": (
        AUTO, chip(), (), RESTART, False, f"{HEALS}, and the job restarts all ranks",
    ),
    "table 1, unconditional: an exit status other than 0 places the whole job anew": (
        UNCONDITIONAL, crash(), (), JOB, False, "the platform places the whole job again",
    ),
    "table 1, isolated: a node's fault isolates the node first": (
        AUTO, SICK, (), ISOLATED, True, "without that node",
    ),
    "table 1, isolated: a chip fault that cannot reset isolates its node": (
        AUTO, URGENT, (), ISOLATED, True, "without that node",
    ),
    "table 1, pod: a node's fault places only its pod anew, after the node is isolated": (
        PODS, SICK, (), POD, True, "the platform places only its pod again",
    ),
    "table 1, pod: so does a chip fault that cannot reset": (
        PODS, URGENT, (), POD, True, "the platform places only its pod again",
    ),
    "table 1, hang: processes are stopped and started in the same containers": (
        HANG, HUNG, (), HANG_RESTART, False, "on their nodes",
    ),
    "enabling: a job without annotations is not restarted": (
        NONE, crash(), (), FAIL, False, "restart is not allowed",
    ),
    "enabling: in-place recovery does not use up the most restarts": (
        policy(job_retry_num="1"), chip(OTHER),
        past((LOST, ISOLATED), (chip(THIRD), RESTART)), RESTART, False, "reset",
    ),
    "enabling: in-place recoveries leave the restarts to others": (
        policy(job_retry_num="1"), SICK,
        past((chip(OTHER), RESTART), (chip(THIRD), RESTART)), ISOLATED, True, "",
    ),
    "enabling: isolated reschedules use them up": (
        policy(job_retry_num="1"), SICK, past((LOST, ISOLATED)), FAIL, False,
        "1 of 1 reschedules are used",
    ),
    "enabling: automatic restart alone is not unconditional": (
        AUTO, crash(), (), FAIL, False, "no node or device is the cause",
    ),
    "enabling: automatic restart alone restarts no hang": (
        AUTO, HUNG, (), FAIL, False, "hang-restart is not allowed",
    ),
    "enabling: a hang's restart does not use up the most restarts": (
        policy(job_retry_num="1", hang_retry="true"), SICK, past((HUNG, HANG_RESTART)),
        ISOLATED, True, "",
    ),
    "enabling: nor is it bounded by them": (
        policy(job_retry_num="1", hang_retry="true"), HUNG, past((LOST, ISOLATED)),
        HANG_RESTART, False, "",
    ),
    "enabling: without a number for pods no pod is placed anew alone": (
        AUTO, LOST, (), ISOLATED, True, "reschedule-pod is not allowed",
    ),
    "in place: HBM multi-bit ECC, the example, when the rank says it": (
        ALL, crash(error=ECC), (), RESTART, False, HEALS,
    ),
    "in place: and when the chip says it as well": (
        ALL, explained(crash(error=ECC), chip()), (), RESTART, False, HEALS,
    ),
    "in place: a rank that ended with an error, and the chip says why": (
        AUTO, explained(crash(), chip(OTHER)), (), RESTART, False, "the agent resets its device",
    ),
    "in place: or of what its chip's memory has met": (
        AUTO, explained(crash(), chip()), (), RESTART, False, HEALS,
    ),
    "in place, degraded: no code is known, and the chip did not reset": (
        AUTO, msgspec.structs.replace(crash(code=201), reset_helps=False, reset_failed=True), (),
        ISOLATED, True, "without that node",
    ),
    "in place, degraded: what users cause and does not reset isolates nothing": (
        AUTO, chip(USER_CODES[0], reset_helps=False, reset_failed=True), (), JOB, False, "",
    ),
    "in place, degraded: the chip did not reset, so the node is isolated": (
        AUTO, NOT_RESET, past((chip(), RESTART)), ISOLATED, True, "without that node",
    ),
    "in place, degraded: or only its pod is placed anew": (
        PODS, NOT_RESET, past((chip(), RESTART)), POD, True, "only its pod again",
    ),
    "in place, degraded: the third time in 24 hours isolates the node": (
        AUTO, chip(), past((chip(hours_ago=23), RESTART), (chip(hours_ago=2), RESTART)),
        ISOLATED, True, f"this device had code {HBM} in 3 consecutive faults within 24 h",
    ),
    "in place, degraded: the second time does not": (
        AUTO, chip(), past((chip(hours_ago=2), RESTART)), RESTART, False, HEALS,
    ),
    "in place, degraded: nor a third time after more than 24 hours": (
        AUTO, chip(), past((chip(hours_ago=25), RESTART), (chip(hours_ago=2), RESTART)),
        RESTART, False, HEALS,
    ),
    "in place, degraded: three times in one incident are three times": (
        AUTO, chip(),
        past((chip(hours_ago=2), RESTART), (chip(hours_ago=1), RESTART), incident=99),
        ISOLATED, True, "in 3 consecutive faults",
    ),
    "in place, degraded: nor if two decisions were about one of them": (
        AUTO, chip(), past((chip(hours_ago=2), RESTART), (chip(hours_ago=2), RESTART)),
        RESTART, False, HEALS,
    ),
    "in place, degraded: nor another code": (
        AUTO, chip(),
        past((chip(OTHER, 3), RESTART), (chip(OTHER, 2), RESTART)),
        RESTART, False, HEALS,
    ),
    "in place, degraded: nor codes in turn, for then they are not in a row": (
        AUTO, chip(),
        past((chip(hours_ago=3), RESTART), (chip(OTHER, 2), RESTART), (chip(), RESTART)),
        RESTART, False, HEALS,
    ),
    "in place, degraded: nor another chip of the node": (
        AUTO, chip(), past((chip(device=1), RESTART), (chip(device=2), RESTART)),
        RESTART, False, HEALS,
    ),
    "in place, degraded: nor the same chip of another node": (
        AUTO, chip(), past((chip(host="host-2"), RESTART), (chip(host="host-4"), RESTART)),
        RESTART, False, HEALS,
    ),
    **{
        f"in place, degraded: {code}, which users cause, isolates nothing the third time": (
            AUTO, chip(code), past((chip(code, 2), RESTART), (chip(code, 1), RESTART)),
            JOB, False, "the platform places the whole job again",
        )
        for code in USER_CODES
    },
    "in place, degraded: what users cause is reset in place before that": (
        AUTO, chip(USER_CODES[0]), past((chip(USER_CODES[0], 1), RESTART)), RESTART, False, "",
    ),
    "in place, degraded: what users cause moves no single pod either": (
        PODS, chip(USER_CODES[0]),
        past((chip(USER_CODES[0], 2), RESTART), (chip(USER_CODES[0], 1), RESTART)),
        JOB, False, "",
    ),
    "unconditional, degraded: the third time in a row is answered": (
        UNCONDITIONAL, crash(), past((crash(2), JOB), (crash(1), JOB)), JOB, False, "",
    ),
    "unconditional, degraded: the fourth is not": (
        UNCONDITIONAL, crash(), past((crash(3), JOB), (crash(2), JOB), (crash(1), JOB)),
        FAIL, False, "placed the job again 3 consecutive times",
    ),
    "unconditional, degraded: steps done in between do not matter": (
        UNCONDITIONAL, crash(step=50),
        past((crash(3, 1), JOB), (crash(2, 2), JOB), (crash(1, 3), JOB), newest=3),
        FAIL, False, "placed the job again 3 consecutive times",
    ),
    "unconditional, degraded: a node's fault in between begins the count anew": (
        UNCONDITIONAL, crash(),
        past((crash(4), JOB), (crash(3), JOB), (LOST, ISOLATED), (crash(1), JOB)),
        JOB, False, "",
    ),
    "unconditional, degraded: so does a chip fault": (
        UNCONDITIONAL, crash(),
        past((crash(4), JOB), (crash(3), JOB), (chip(), RESTART), (crash(1), JOB)),
        JOB, False, "",
    ),
    "unconditional, degraded: what a user caused is no such fault": (
        UNCONDITIONAL, crash(),
        past(
            (crash(4), JOB), (crash(3), JOB), (crash(2), JOB),
            (chip(USER_CODES[0], 1), Strategy.RECOVER_IN_PLACE),
        ),
        FAIL, False, "consecutive times",
    ),
    "unconditional, degraded: but a reset it in place ends the row": (
        UNCONDITIONAL, crash(),
        past(
            (crash(4), JOB), (crash(3), JOB), (crash(2), JOB), (chip(USER_CODES[0], 1), RESTART),
        ),
        JOB, False, "",
    ),
    "unconditional, degraded: another problem is not the same problem": (
        UNCONDITIONAL, crash(error="KeyError: 7"), past(*[(crash(error="OSError: 5"), JOB)] * 3),
        JOB, False, "",
    ),
    "unconditional, degraded: the same problem need not say the same": (
        UNCONDITIONAL, crash(error="KeyError: 7"), past(*[(crash(error="KeyError: 8"), JOB)] * 3),
        FAIL, False, "consecutive times",
    ),
    "unconditional, degraded: that no place was found is no problem of the script": (
        UNCONDITIONAL, crash(), past(*[(NO_NODE, JOB)] * 3), JOB, False, "",
    ),
    "unconditional: the most restarts hold here too": (
        policy(job_retry_num="2", job_unconditional_retry="true"), crash(),
        past((crash(4), JOB), (LOST, ISOLATED)), FAIL, False, "2 of 2 reschedules are used",
    ),
    "isolated: it is never degraded": (
        AUTO, SICK, past((LOST, ISOLATED), (LOST, ISOLATED), (LOST, ISOLATED)),
        ISOLATED, True, "",
    ),
    "pod, degraded: no node came, so the whole job is placed anew, unconditionally": (
        PODS, NO_NODE, past((LOST, POD), incident=99),
        JOB, False, "the platform places the whole job again",
    ),
    "pod, degraded: its node is isolated already": (
        PODS, NO_NODE, past((LOST, POD), incident=99), JOB, False, "",
    ),
    "pod: another node that breaks in the meantime is isolated as well": (
        PODS, msgspec.structs.replace(LOST, node=2, message="node 2 was lost"),
        past((LOST, POD), incident=99), POD, True, "the platform places only its pod again",
    ),
    "pod: its own number bounds it": (
        policy(**RETRY_8, pod_retry_num="1"), LOST, past((SICK, POD)), ISOLATED, True,
        "1 of 1 pod reschedules are used",
    ),
    "hang, degraded: the third in a row is answered": (
        HANG, HUNG, past((HUNG, HANG_RESTART), (HUNG, HANG_RESTART)), HANG_RESTART, False, "",
    ),
    "hang, degraded: then the job has failed": (
        HANG, HUNG, past(*[(HUNG, HANG_RESTART)] * 3), FAIL, False, "it hung 3 consecutive times",
    ),
    "hang: other problems in between end the row": (
        HANG, HUNG, past(*[(HUNG, HANG_RESTART), (crash(), RESTART)] * 3), HANG_RESTART, False, "",
    ),
    "hang: a fault of a chip in between ends it": (
        HANG, HUNG, past(*[(HUNG, HANG_RESTART)] * 2, (chip(), RESTART), (HUNG, HANG_RESTART)),
        HANG_RESTART, False, "",
    ),
    "hang: only without a fault of the hardware; with one, that is answered": (
        ALL, chip(OTHER), past((HUNG, HANG_RESTART), incident=99), RESTART, False, "reset",
    ),
    "hang: the job cannot be placed anew for it": (
        UNCONDITIONAL, HUNG, (), FAIL, False, "hang-restart is not allowed",
    ),
    "hang: a job with all switches on fails after three, too": (
        ALL, HUNG, past(*[(HUNG, HANG_RESTART)] * 3), FAIL, False, "it hung 3 consecutive times",
    ),
}  # fmt: skip


@pytest.mark.parametrize("sentence", TABLE)
def test_the_ladder_does_as_modelarts(sentence: str) -> None:
    """Each fault has the decision of its sentence. It isolates a node only if the sentence does."""
    how, what, before, strategy, isolated, words = TABLE[sentence]
    decision = judge(what, how, before)
    assert (decision.strategy, decision.isolate) == (strategy, isolated)
    assert decision.reason.startswith(what.message)
    assert words in decision.reason


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"job-retry-num": "0"}, "from 1 to 128"),
        ({"job-retry-num": "129"}, "from 1 to 128"),
        ({"job-retry-num": "eight"}, "from 1 to 128"),
        ({"job-retry-num": "-1"}, "from 1 to 128"),
        ({"job-retry-num": "1_0"}, "from 1 to 128"),
        ({"job-retry-num": "٣"}, "from 1 to 128"),
        ({"job-retry-num": ""}, "from 1 to 128"),
        ({"job-retry-num": "9" * 5000}, "from 1 to 128"),
        ({"job-retry-num": "8", "pod-retry-num": "0"}, "pod-retry-num is '0'"),
        ({"job-retry-num": "8", "hang-retry": "yes"}, "give one of true, false"),
        ({"job-retry-num": "8", "job-unconditional-retry": "True"}, "give one of true, false"),
        ({"hang-retry": "true"}, "also needs the annotation fault-tolerance/job-retry-num"),
        ({"pod-retry-num": "3"}, "also needs the annotation fault-tolerance/job-retry-num"),
        ({"job-retry-nun": "8"}, "job-retry-nun is unknown"),
    ],
)
def test_bad_annotations_are_refused(given: dict[str, str], words: str) -> None:
    """The error names the annotation and its allowed values."""
    with pytest.raises(UsageError, match=words):
        a.from_modelarts({f"{a.MODELARTS_PREFIX}{key}": value for key, value in given.items()})


def test_annotations_of_others_are_no_business_of_ours() -> None:
    """Annotations of other programs are ignored, because a job has many annotations."""
    assert a.from_modelarts({"prefect.io/x": "y"}).max_reschedules == 0


@pytest.mark.parametrize(
    "given",
    [
        {"job-retry-num": "1"},
        {"job-retry-num": "128", "job-unconditional-retry": "true"},
        {"job-retry-num": "8", "hang-retry": "true", "pod-retry-num": "3"},
        {
            "job-retry-num": "8",
            "job-unconditional-retry": "true",
            "hang-retry": "true",
            "pod-retry-num": "3",
        },
    ],
)
def test_annotations_are_written_as_they_were_read(given: dict[str, str]) -> None:
    """Annotations of ModelArts are the same after they are read and written."""
    keys = {f"{a.MODELARTS_PREFIX}{key}": value for key, value in given.items()}
    assert a.to_modelarts(a.from_modelarts(keys)) == keys
