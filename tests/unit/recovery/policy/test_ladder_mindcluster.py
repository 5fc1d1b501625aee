"""The ladder against MindCluster's process-level recovery: any combination of its strategies."""

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

# For each fault what MindCluster's words can do about it, the cheapest first.
ANSWERS = {
    FaultKind.DEVICE_MEMORY: ("retry", "recover-in-place", "recover"),
    FaultKind.LINK: ("retry",),
    FaultKind.PROCESS: ("recover-in-place", "recover"),
    FaultKind.NODE_LOST: ("recover",),
}


def mindcluster(words: tuple[str, ...], **labels: str) -> Policy:
    """The policy of a job with these strategies."""
    given = {a.PROCESS_RECOVER: "on"} | {key.replace("_", "-"): v for key, v in labels.items()}
    return a.from_mindcluster(given, {a.RECOVER_STRATEGY: ",".join(words)})


@pytest.mark.parametrize("kind", ANSWERS)
@pytest.mark.parametrize("words", COMBINATIONS, ids=",".join)
def test_any_combination_of_strategies(words: tuple[str, ...], kind: FaultKind) -> None:
    """The cheapest of those that are named and can help, then the final checkpoint, if named."""
    fault = Fault(kind=kind, message="it broke", rank=2, node=1)
    case = Situation(fault=fault, session=True, formed=True, newest=5, spares=1, final_step=3)
    chosen = decide(mindcluster(words), case)
    helpful = [word for word in ANSWERS[kind] if word in words]
    last = "dump" if "dump" in words else "fail"
    assert chosen.strategy.value == (helpful[0] if helpful else last)


# What is stronger where a strategy has failed: for the memory of a device, a process of its own or
# another node. What has nothing stronger above it is tried again.
@pytest.mark.parametrize("failed", ["retry", "recover-in-place"])
@pytest.mark.parametrize("words", COMBINATIONS, ids=",".join)
def test_a_strategy_that_failed_gives_way_to_the_next(words: tuple[str, ...], failed: str) -> None:
    """The next of those that are named is taken; a rank is started three times in its place."""
    if failed not in words:
        return
    fault = Fault(kind=FaultKind.DEVICE_MEMORY, message="it broke", rank=2, node=1, finished=5)
    times = 3 if failed == "recover-in-place" else 1
    past = (Past(fault=fault, strategy=Strategy(failed), newest=5),) * times
    case = Situation(
        fault=fault, session=True, formed=True, newest=5, spares=1, final_step=3, past=past
    )
    chosen = decide(mindcluster(words), case)
    order = ANSWERS[FaultKind.DEVICE_MEMORY]
    stronger = [word for word in order[order.index(failed) + 1 :] if word in words]
    last = "dump" if "dump" in words else "fail"
    again = "retry" if failed == "retry" else last
    assert chosen.strategy.value == (stronger[0] if stronger else again)


def test_elastic_training_goes_on_with_fewer_nodes() -> None:
    """MindCluster's word for it is another than ours."""
    assert mindcluster(("elastic-training",)).strategies == (Strategy.SHRINK,)


@pytest.mark.parametrize("switch", ["off", "pause"])
def test_the_switch_of_process_level_recovery(switch: str) -> None:
    """Strategies count only while it is on."""
    labels, words = {a.PROCESS_RECOVER: switch}, {a.RECOVER_STRATEGY: "retry,dump"}
    assert a.from_mindcluster(labels, words).strategies == ()
    assert a.from_mindcluster({}, words).strategies == ()


@pytest.mark.parametrize("scheduling", ["grace", "force", "external-grace", "external-force"])
def test_rescheduling_is_unlimited_unless_something_limits_it(scheduling: str) -> None:
    """The retries of the service plane, or the job's back-off limit, bound every reschedule."""
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
    """Retries alone do not switch it on."""
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
    """The error names what was wrong and what it may be; also of strategies not switched on."""
    on = {a.PROCESS_RECOVER: "on"}
    with pytest.raises(UsageError, match=words):
        a.from_mindcluster(on | labels, annotations)


@pytest.mark.parametrize("words", COMBINATIONS, ids=",".join)
def test_labels_and_annotations_are_read_as_they_were_written(words: tuple[str, ...]) -> None:
    """A policy goes to MindCluster and comes back the same."""
    before = mindcluster(
        words, fault_scheduling="force", fault_retry_times="7", pod_rescheduling="on"
    )
    labels, annotations, limit = a.to_mindcluster(before)
    after = a.from_mindcluster(labels, annotations, backoff_limit=limit)
    assert after.strategies == before.strategies
    assert after.max_reschedules == before.max_reschedules == 7
    assert after.max_pod_reschedules == before.max_pod_reschedules == 7
