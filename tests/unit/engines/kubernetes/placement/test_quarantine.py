"""Changes of a node's isolation mark, computed from its object alone."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import pytest

pytest.importorskip("kubernetes.client")

from rekindle.engines.kubernetes.labels import ISOLATED
from rekindle.engines.kubernetes.manifests.settings import IsolationMode
from rekindle.engines.kubernetes.placement.quarantine import (
    IsolationMark,
    holds,
    mark_on,
    marking,
    unmarking,
)

Object = dict[str, Any]
OTHERS = {"key": "example.com/keep", "effect": "NoExecute"}
HOWS = pytest.mark.parametrize("how", [IsolationMode.CORDON, IsolationMode.TAINT])


def node(**spec: Any) -> Object:
    metadata = {"name": "n", "resourceVersion": "7", "annotations": {"a": "b"}}
    return {"metadata": metadata, "spec": {"podCIDR": "x", **spec}}


def wanted(
    how: IsolationMode, source: str = "job#1@1.0", namespace: str = "default"
) -> IsolationMark:
    return IsolationMark(
        how=how, by="job", namespace=namespace, reason="XID 79", at=1.0, source=source
    )


def patched(thing: Object, patch: Object | None) -> Object:
    """Return the object after the server merges the patch."""
    new = copy.deepcopy(thing)

    def merge(into: Object, what: Object) -> None:
        for key, value in what.items():
            if value is None:
                into.pop(key, None)
            elif isinstance(value, dict):
                merge(into.setdefault(key, {}), value)
            else:
                into[key] = value

    merge(new, patch or {})
    return new


@HOWS
def test_there_and_back(how: IsolationMode) -> None:
    """A mark has its author and reason, and its removal restores the node."""
    before = node(taints=[OTHERS])
    marked = patched(before, marking(before, wanted(how)))
    mark = mark_on(marked)
    assert mark == wanted(how)
    assert holds(marked, mark)
    assert marking(marked, wanted(how)) is None
    assert OTHERS in marked["spec"]["taints"]
    assert patched(marked, unmarking(marked, "default")) == before


def test_a_taint_alone_leaves_no_list() -> None:
    marked = patched(node(), marking(node(), wanted(IsolationMode.TAINT)))
    (taint,) = marked["spec"]["taints"]
    assert taint == {"key": ISOLATED, "value": "job", "effect": "NoSchedule"}
    assert patched(marked, unmarking(marked, "default")) == node()


def test_what_somebody_else_has_cordoned_stays_so() -> None:
    """The engine marks a node that another user cordoned, and keeps the cordon afterwards."""
    before = node(unschedulable=True)
    marked = patched(before, marking(before, wanted(IsolationMode.CORDON)))
    mark = mark_on(marked)
    assert mark is not None
    assert not mark.ours
    assert mark.done == "cordoned, but not by Rekindle"
    assert patched(marked, unmarking(marked, "default")) == before


@HOWS
def test_what_a_person_has_undone_is_not_done_again(how: IsolationMode) -> None:
    """If a person removed the cordon, the same event does not set it again.

    The engine reads old events again when it adopts the job.
    """
    marked = patched(node(), marking(node(), wanted(how)))
    undone = copy.deepcopy(marked)
    undone["spec"] = node()["spec"]
    assert marking(undone, wanted(how)) is None
    again = patched(undone, marking(undone, wanted(how, source="job#9@9.0")))
    mark = mark_on(again)
    assert mark is not None
    assert holds(again, mark)
    assert (mark.source, mark.ours) == ("job#9@9.0", True)
    assert patched(undone, unmarking(undone, "default")) == node()


def test_a_second_reason_changes_nothing() -> None:
    """A second event, mode or namespace does not change the mark of an isolated node."""
    marked = patched(node(), marking(node(), wanted(IsolationMode.CORDON)))
    for other in (
        wanted(IsolationMode.CORDON, source="job#2@2.0"),
        wanted(IsolationMode.TAINT, source="job#2@2.0"),
        wanted(IsolationMode.CORDON, source="x#2@2.0", namespace="other"),
    ):
        assert marking(marked, other) is None
    assert unmarking(marked, "other") is None


def test_a_node_without_a_mark_is_left_alone() -> None:
    """The engine does not change a node without a mark.

    This holds also for a cordoned node, and for a new node with the name of a marked one.
    """
    assert unmarking(node(), "default") is None
    assert unmarking(node(unschedulable=True), "default") is None


@pytest.mark.parametrize("text", ["", "{}", "[1]", "true", '{"how": "shoot"}'])
def test_an_annotation_that_cannot_be_read(text: str) -> None:
    """If the mark is unreadable, the engine keeps a cordon, and removes only its own taint."""
    cordoned = node(unschedulable=True)
    cordoned["metadata"]["annotations"][ISOLATED] = text
    assert patched(cordoned, unmarking(cordoned, "x")) == node(unschedulable=True)
    ours = {"key": ISOLATED, "effect": "NoSchedule"}
    tainted = node(taints=[OTHERS, ours])
    tainted["metadata"]["annotations"][ISOLATED] = text
    assert patched(tainted, unmarking(tainted, "x")) == node(taints=[OTHERS])


def test_a_change_names_the_version_that_was_seen() -> None:
    """The patch has the node's version, so the server refuses it if the node has changed."""
    assert (marking(node(), wanted(IsolationMode.CORDON)) or {})["metadata"][
        "resourceVersion"
    ] == "7"


def test_a_mark_is_readable() -> None:
    """The mark is JSON that a person can read with kubectl describe."""
    patch = marking(node(), wanted(IsolationMode.CORDON)) or {}
    recorded = msgspec.json.decode(patch["metadata"]["annotations"][ISOLATED])
    assert recorded == {
        "how": "cordon",
        "by": "job",
        "namespace": "default",
        "reason": "XID 79",
        "at": 1.0,
        "source": "job#1@1.0",
        "ours": True,
    }
