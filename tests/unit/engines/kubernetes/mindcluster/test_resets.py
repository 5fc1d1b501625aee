"""Messages about MindCluster's own recovery, and the nodes that they concern."""

from __future__ import annotations

from typing import Any

import pytest
from mindcluster import RESOURCE, rank, reset_config

pytest.importorskip("kubernetes.client")
from rekindle.engines.kubernetes.client.api_errors import DamagedError
from rekindle.engines.kubernetes.manifests.ascend import reset_config as skeleton
from rekindle.engines.kubernetes.mindcluster.reports import ActiveCode, Report
from rekindle.engines.kubernetes.mindcluster.resets import (
    ResetInfo,
    ResetProcess,
    progress,
    read_reset,
)
from rekindle.engines.kubernetes.mindcluster.watch import (
    Placed,
    health_events,
    placed,
    recovery_events,
    remarks,
)
from rekindle.recovery.faults.classification import EventSource, HealthEvent, verdict_of
from rekindle.recovery.faults.tables.tables import Tables
from rekindle.recovery.faults.tables.verdict import FaultOrigin, Severity, Urgency


def texts_of(before: ResetInfo, **now: Any) -> list[str]:
    return list(progress(before, read_reset(reset_config("job", **now))))


def test_the_skeleton_is_what_mindcluster_begins_with() -> None:
    """The reset-config that Rekindle creates is readable and empty."""
    assert read_reset(skeleton("job", "default")) == ResetInfo()
    assert list(progress(ResetInfo(), ResetInfo())) == []


def test_a_recovery_from_its_beginning_to_its_end() -> None:
    """Each phase of a recovery has one message, in order."""
    phases: list[dict[str, Any]] = [
        {"FaultFlushing": True},
        {"RankList": [rank(5)], "RestartFaultProcess": True},
        {"RankList": [rank(5)], "RestartFaultProcess": True, "UpdateTime": 9},
        {"RankList": [rank(5, "unrecovered", "reset", "80E01801")], "GracefulExit": 1},
        {"RankList": [rank(5, "recovered", "reset", "80E01801")]},
        {"RetryTime": 2},
    ]
    story, before = [], ResetInfo()
    for phase in phases:
        story.append(texts_of(before, **phase))
        before = read_reset(reset_config("job", **phase))
    assert story == [
        ["has detected a fault, and waits for other faults"],
        ["lists rank 5: fault", "restarts the failed processes on their nodes"],
        [],
        ["ends all processes", "lists rank 5: unrecovered, 80E01801; it resets its chip"],
        ["lists rank 5: recovered, 80E01801; it resets its chip"],
        ["restarts all processes, for the second time", "no longer lists a failed rank"],
    ]


def test_words_that_are_not_known() -> None:
    """A message has an unknown status or policy unchanged."""
    assert texts_of(ResetInfo(), RankList=[rank(0, "frozen", "thaw")]) == [
        "lists rank 0: frozen; it does 'thaw'"
    ]


def with_data(**data: Any) -> dict[str, Any]:
    thing = reset_config("job", RankList=[rank(1)])
    return thing | {"data": thing["data"] | data}


@pytest.mark.parametrize(
    "data",
    [
        *({"reset.json": text} for text in ("", "{", "[]", "null", "\ud800", "[" * 100_000)),
        {"reset.json": None},
        {"reset.json": '{"RankList":[{"RankId":"one"}]}'},
        {"checkCode": "0" * 64},
        {"checkCode": ""},  # although reset.json has content
        {"reset.json": '{"RankList":[],"RetryTime":7}'},
    ],
    ids=range(11),
)
def test_what_is_damaged_is_refused(data: dict[str, Any]) -> None:
    """read_reset() refuses a truncated, changed or unknown text, and the error names it."""
    with pytest.raises(DamagedError, match=r"reset-config-job: reset\.json"):
        read_reset(with_data(**data))


def pod(**changed: Any) -> dict[str, Any]:
    notes = {"huawei.com/AscendReal": "Ascend910-6,Ascend910-4", "hccl/rankIndex": "1"}
    return {
        "metadata": {
            "name": "p",
            "uid": "u",
            "labels": {"rekindle.dev/role": changed.pop("role", "worker")},
            "annotations": notes | changed.pop("annotations", {}),
        },
        "spec": {"nodeName": "a"},
        "status": {"phase": "Running", "podIP": "10.0.0.1"} | changed,
    }


def test_pods_with_ranks() -> None:
    """placed() returns the chips and the index of a pod, or unknown values without annotations."""
    assert placed(pod(), RESOURCE) == Placed("u", "a", "10.0.0.1", (4, 6), 1)
    bare = pod(annotations={"huawei.com/AscendReal": "", "hccl/rankIndex": "x", RESOURCE: "npu-2"})
    assert placed(bare, RESOURCE) == Placed("u", "a", "10.0.0.1", (2,), -1)
    for other in (pod(phase="Failed"), pod(podIP=""), pod(role="coordinator")):
        assert placed(other, RESOURCE) is None


def codes_of(place: Placed, *faults: ActiveCode, ranks: int = 2) -> list[tuple[str, int]]:
    found = health_events(place, [Report(faults)], 3, ranks)
    assert {one.node for one in found} <= {3}
    return [(one.what, one.device) for one in found]


def test_chips_of_other_pods_are_none_of_our_business() -> None:
    """A faulty chip of the pod has its device number; chips of other pods have no event.

    A fault of the board concerns all devices.
    """
    place = Placed("u", "a", "10.0.0.1", (4, 6))
    chip = FaultOrigin.CHIP
    faults = [ActiveCode("80E01801", number, chip) for number in (0, 4, 6)]
    assert codes_of(place, *faults) == [("80E01801", 0), ("80E01801", 1)]
    assert codes_of(place, ActiveCode("2C000031", -1, FaultOrigin.NODE)) == [("2C000031", -1)]
    assert codes_of(place, faults[2], ranks=1) == [("80E01801", -1)]  # a rank with two chips


def test_a_pod_whose_chips_are_not_known() -> None:
    """If the chips of a pod are unknown, a fault of a chip leads to a remark, not to an event.

    The chip may belong to another pod.
    """
    unknown = Placed("u", "a", "10.0.0.1")
    faults = (
        ActiveCode("80E01801", 0, FaultOrigin.CHIP),
        ActiveCode("2C000031", -1, FaultOrigin.NODE),
    )
    assert codes_of(unknown, *faults) == [("2C000031", -1)]
    (remark,) = remarks(unknown, [Report(faults)])
    assert "host a, chip 0: has fault 80E01801" in remark
    assert remarks(Placed("u", "a", "10.0.0.1", (0,)), [Report(faults)]) == []


def test_codes_that_no_table_lists() -> None:
    """A code without a table entry has the severity of MindCluster's level."""
    place, tables = Placed("u", "a", "10.0.0.1", (0, 1)), Tables.load()
    mild = ActiveCode("80999999", 0, FaultOrigin.CHIP, Severity.NOTICE)
    grave = ActiveCode("80999999", 1, FaultOrigin.CHIP, Severity.CRITICAL)
    found = health_events(place, [Report((mild, grave))], 0, 2)
    urgencies = [verdict_of(tables, one).urgency for one in found]
    assert urgencies == [Urgency.NONE, Urgency.NOW]


def test_ranks_that_mindcluster_lists() -> None:
    """A rank of MindCluster's list is an event of the node with the same pod index."""
    info = ResetInfo(rank_list=read_reset(with_data()).rank_list)
    place = Placed("u", "a", "10.0.0.1", (4, 6), index=0)
    (event,) = recovery_events(place, info, node=3, ranks=2)
    expected = HealthEvent(
        source=EventSource.MINDCLUSTER, what="fault", node=3, device=1, by="mindcluster", host="a"
    )
    assert event == expected
    assert verdict_of(Tables.load(), event).urgency is Urgency.WATCH
    for index in (1, -1):
        other = Placed("u", "a", "10.0.0.1", (4, 6), index=index)
        assert recovery_events(other, info, node=3, ranks=2) == []


def group(result: str = "", switch: str = "on", owner: str = "job") -> dict[str, Any]:
    return {
        "metadata": {
            "uid": "u",
            "ownerReferences": [{"name": owner}],
            "annotations": {"ProcessRecoverStatus": result} if result else None,
            "labels": {"process-recover-enable": switch},
        }
    }


def test_what_clusterd_notes_at_the_pod_group() -> None:
    """The messages have each strategy with its result, and pauses, without those of other jobs."""
    recovery = ResetProcess("job")
    story = [
        recovery.take_group(one, there=True)
        for one in (
            group(),
            group("retry-failed"),
            group("retry-failed", "pause"),
            group("retry-failed"),
            group("recover-success"),
            group("recover-success"),
            group("dump-failed", owner="other"),
            group("exit-completed", "off"),
            group("odd", "new"),
        )
    ]
    assert [[text.removeprefix("MindCluster ") for text in texts] for texts in story] == [
        [],
        ["has tried retry, without success"],
        ["pauses its recovery of processes, to place the job again"],
        ["continues its recovery of processes"],
        ["has tried recover, with success"],
        *([], []),
        [
            "has ended the processes, because it had no strategy left",
            "no longer recovers processes",
        ],
        ["has tried odd, odd", "reports the state 'new' of its recovery of processes"],
    ]
    assert recovery.take_group(group("odd"), there=False) == []


def test_damage_leaves_the_recovery_as_it_was() -> None:
    """A damaged reset-config is reported, and the list of ranks stays."""
    recovery = ResetProcess("job")
    assert recovery.take_reset(with_data(), there=True)
    assert recovery.take_reset(with_data(checkCode="x"), there=True) == []
    assert "check code" in recovery.damage
    assert list(recovery.reset.ranks) == [1]
    assert recovery.take_reset(with_data(), there=False) == [
        "MindCluster no longer lists a failed rank"
    ]
    assert recovery.damage == ""
