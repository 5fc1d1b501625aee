"""MindCluster's process-level recovery: any combination of its strategies."""

from __future__ import annotations

from itertools import chain, combinations

import pytest

from rekindle.errors import UsageError
from rekindle.recovery.faults.fault import Fault, FaultKind
from rekindle.recovery.policy import annotations as a
from rekindle.recovery.policy.decide import decide
from rekindle.recovery.policy.history import Past, Situation
from rekindle.recovery.policy.policy import Policy, Strategy

WORDS = ("retry", "recover-in-place", "recover", "dump", "exit")
COMBINATIONS = tuple(chain.from_iterable(combinations(WORDS, n) for n in range(len(WORDS) + 1)))

# The strategies of MindCluster that help against each fault, cheapest first.
ANSWERS = {
    FaultKind.DEVICE_MEMORY: ("retry", "recover-in-place", "recover"),
    FaultKind.LINK: ("retry",),
    FaultKind.PROCESS: ("recover-in-place", "recover"),
    FaultKind.NODE_LOST: ("recover",),
}


def mindcluster(words: tuple[str, ...], **labels: str) -> Policy:
    """Return the policy of a job with these strategies."""
    given = {a.PROCESS_RECOVER: "on"} | {key.replace("_", "-"): v for key, v in labels.items()}
    return a.from_mindcluster(given, {a.RECOVER_STRATEGY: ",".join(words)})


@pytest.mark.parametrize("kind", ANSWERS)
@pytest.mark.parametrize("words", COMBINATIONS, ids=",".join)
def test_any_combination_of_strategies(words: tuple[str, ...], kind: FaultKind) -> None:
    """The job takes the cheapest named strategy that helps, or the final checkpoint, if named."""
    fault = Fault(kind=kind, message="it broke", rank=2, node=1)
    situation = Situation(fault=fault, session=True, formed=True, newest=5, spares=1, final_step=3)
    chosen = decide(mindcluster(words), situation)
    helpful = [word for word in ANSWERS[kind] if word in words]
    last = "dump" if "dump" in words else "fail"
    assert chosen.strategy.value == (helpful[0] if helpful else last)


# If retry fails to repair device memory, a new process is the next strategy, then another node.
# Without a further strategy, retry repeats, but a new process does not.
@pytest.mark.parametrize("failed", ["retry", "recover-in-place"])
@pytest.mark.parametrize("words", COMBINATIONS, ids=",".join)
def test_a_strategy_that_failed_gives_way_to_the_next(words: tuple[str, ...], failed: str) -> None:
    """After a failure, the next named strategy follows.

    A rank first restarts three times in place.
    """
    if failed not in words:
        return
    fault = Fault(kind=FaultKind.DEVICE_MEMORY, message="it broke", rank=2, node=1, finished=5)
    times = 3 if failed == "recover-in-place" else 1
    past = (Past(fault=fault, strategy=Strategy(failed), newest=5),) * times
    situation = Situation(
        fault=fault, session=True, formed=True, newest=5, spares=1, final_step=3, past=past
    )
    chosen = decide(mindcluster(words), situation)
    order = ANSWERS[FaultKind.DEVICE_MEMORY]
    stronger = [word for word in order[order.index(failed) + 1 :] if word in words]
    last = "dump" if "dump" in words else "fail"
    again = "retry" if failed == "retry" else last
    assert chosen.strategy.value == (stronger[0] if stronger else again)


def test_elastic_training_goes_on_with_fewer_nodes() -> None:
    """MindCluster calls shrink "elastic-training"."""
    assert mindcluster(("elastic-training",)).strategies == (Strategy.SHRINK,)


@pytest.mark.parametrize("switch", ["off", "pause"])
def test_the_switch_of_process_level_recovery(switch: str) -> None:
    """The strategies apply only while process-level recovery is on."""
    labels, words = {a.PROCESS_RECOVER: switch}, {a.RECOVER_STRATEGY: "retry,dump"}
    assert a.from_mindcluster(labels, words).strategies == ()
    on = (Strategy.RETRY, Strategy.DUMP)  # without the label, as in MindCluster 7.2
    assert a.from_mindcluster({}, words).strategies == on


@pytest.mark.parametrize("scheduling", ["grace", "force", "external-grace", "external-force"])
def test_rescheduling_is_unlimited_unless_something_limits_it(scheduling: str) -> None:
    """MindCluster's retries or the job's back-off limit restrict every reschedule."""
    on = {a.FAULT_SCHEDULING: scheduling}
    free = a.from_mindcluster(on, {})
    assert (free.max_reschedules, free.unconditional) == (a.UNLIMITED, False)
    some = a.from_mindcluster(on | {a.FAULT_RETRY_TIMES: "5"}, {})
    assert (some.max_reschedules, some.unconditional) == (5, True)
    less = a.from_mindcluster(on | {a.FAULT_RETRY_TIMES: "5"}, {}, backoff_limit=2)
    assert (less.max_reschedules, less.unconditional) == (2, True)
    assert Strategy.RESCHEDULE_POD not in some.strategies
    pods = a.from_mindcluster(on | {a.POD_RESCHEDULING: "on"}, {}, backoff_limit=4)
    assert Strategy.RESCHEDULE_POD in pods.strategies
    assert pods.max_pod_reschedules == 4


def test_without_fault_scheduling_nothing_is_placed_anew() -> None:
    """Without fault scheduling, labels for retries and pods allow no reschedule."""
    off = a.from_mindcluster({a.FAULT_RETRY_TIMES: "5", a.POD_RESCHEDULING: "on"}, {})
    assert (off.strategies, off.max_reschedules, off.max_pod_reschedules) == ((), 0, 0)


@pytest.mark.parametrize(
    ("labels", "annotations", "words"),
    [
        ({}, {a.RECOVER_STRATEGY: "retry,hope"}, "has 'hope'; use retry, recover"),
        ({}, {a.WAIT_RESCHEDULE: "29"}, "from 30 to 270"),
        ({}, {a.WAIT_RESCHEDULE: "271"}, "from 30 to 270"),
        ({a.PROCESS_RECOVER: "yes"}, {}, "on, pause, off"),
        ({a.FAULT_SCHEDULING: "gracefully"}, {}, "grace, force, off"),
        ({a.FAULT_RETRY_TIMES: "101"}, {}, "from 0 to 100"),
        ({a.FAULT_RETRY_TIMES: "-1"}, {}, "from 0 to 100"),
    ],
)
def test_bad_labels_and_annotations_are_refused(
    labels: dict[str, str], annotations: dict[str, str], words: str
) -> None:
    """The error names the wrong value and the allowed values."""
    on = {a.PROCESS_RECOVER: "on"}
    with pytest.raises(UsageError, match=words):
        a.from_mindcluster(on | labels, annotations)


@pytest.mark.parametrize("words", COMBINATIONS, ids=",".join)
def test_labels_and_annotations_are_read_as_they_were_written(words: tuple[str, ...]) -> None:
    """A policy that is written for MindCluster and read again keeps its strategies and limits."""
    before = mindcluster(
        words, fault_scheduling="force", fault_retry_times="7", pod_rescheduling="on"
    )
    labels, annotations, limit = a.to_mindcluster(before)
    after = a.from_mindcluster(labels, annotations, backoff_limit=limit)
    assert after.strategies == before.strategies
    assert after.max_reschedules == before.max_reschedules == 7
    assert after.max_pod_reschedules == before.max_pod_reschedules == 7
