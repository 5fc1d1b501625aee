"""Nodes without free memory for a check are not faulty: alone, in a pair, or next to ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from rekindle.recovery.faults.tables.document import read
from rekindle.recovery.faults.tables.loading import SHIPPED
from rekindle.recovery.node_check.evidence import (
    Alone,
    Evidence,
    Measurement,
    NodeCheckLimits,
    Pair,
    is_held,
    lacks_memory,
)
from rekindle.recovery.node_check.rounds import next_round
from rekindle.recovery.node_check.verdicts import Health, NodeVerdict, verdicts

TEXTS = [entry.values for entry in read(SHIPPED / "texts.toml")]
SHORT = ("device-out-of-memory", "host-out-of-memory")
NO_MEMORY = "OutOfMemoryError: CUDA out of memory. Tried to allocate 1024.00 MiB."
HELD = "RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable"
LIMITS = NodeCheckLimits()


def well(compute: float = 1.0) -> Alone:
    return Alone(seconds={Measurement.COMPUTE: compute, Measurement.MEMORY: 1.0})


def checked(
    alone: dict[int, Iterable[Alone]],
    pairs: dict[tuple[int, int], str] | None = None,
    *,
    beside_ranks: bool = False,
) -> list[NodeVerdict]:
    """Return the verdicts for nodes that give these answers in turn. The last answer repeats."""
    evidence = Evidence(alone, beside_ranks=beside_ranks)
    answers = {node: list(each) for node, each in alone.items()}
    for _ in range(20):
        planned = next_round(evidence, LIMITS)
        if planned is None:
            return verdicts(evidence, LIMITS)
        for node in planned.alone:
            own = answers[node]
            evidence.add(own.pop(0) if len(own) > 1 else own[0], node)
        for edge in planned.pairs:
            evidence.add(Pair(nodes=edge, seconds=1.0, error=(pairs or {}).get(edge, "")))
    raise AssertionError("it never ends")


@pytest.mark.parametrize("row", TEXTS, ids=lambda row: row["says"])
def test_texts_are_those_of_the_tables(row: dict[str, Any]) -> None:
    """The check recognises exactly the texts that the tables list as lack of memory."""
    examples = [text for text in row["examples"] if "DataLoader worker" not in text]
    assert {lacks_memory(text) for text in examples} <= {row["kind"] in SHORT}
    assert {is_held(text) for text in examples} == {"device(s) is/are busy" in examples[0]}


@pytest.mark.parametrize("beside_ranks", [True, False])
@pytest.mark.parametrize(
    "error",
    [
        NO_MEMORY,
        "MemoryError",
        "RuntimeError: NPU out of memory. Tried to allocate 1 GiB",
        "RuntimeError: Allocate memory failed",  # an error of MindSpore, for example on CPU
    ],
)
def test_want_of_memory_blames_nobody(error: str, beside_ranks: bool) -> None:
    """A lack of memory on all nodes leaves them unmeasured, and the reason states it.

    Ranks may hold the memory.
    """
    found = checked({node: [Alone(error=error)] for node in range(3)}, beside_ranks=beside_ranks)
    assert {each.health for each in found} == {Health.UNKNOWN}
    assert found[0].reason == f"not measured: {error} (2 times)"
    assert found[0].part is None


@pytest.mark.parametrize("beside_ranks", [True, False])
def test_a_device_that_ranks_hold_is_not_measured(beside_ranks: bool) -> None:
    """A device that ranks hold is not measured. If no rank trains, a held device is a fault."""
    found = checked({node: [Alone(error=HELD)] for node in range(3)}, beside_ranks=beside_ranks)
    assert {each.health for each in found} == {Health.UNKNOWN if beside_ranks else Health.FAULTY}


def test_others_are_judged_all_the_same() -> None:
    """One node without memory, one broken and one slow node do not affect the other verdicts."""
    alone = {node: [well()] for node in range(8)}
    alone |= {1: [Alone(error=NO_MEMORY)], 4: [Alone(error="killed")], 6: [well(1.5)]}
    healths = {each.node: each.health for each in checked(alone)}
    assert healths.pop(1) is Health.UNKNOWN
    assert healths.pop(4) is Health.FAULTY
    assert healths.pop(6) is Health.STRAGGLER
    assert set(healths.values()) == {Health.HEALTHY}


@pytest.mark.parametrize(
    ("answers", "health"),
    [
        (["killed", NO_MEMORY, "killed"], Health.FAULTY),
        (["killed", NO_MEMORY], Health.UNKNOWN),
        (["killed", NO_MEMORY, ""], Health.HEALTHY),
        ([NO_MEMORY, ""], Health.HEALTHY),
        (["slow", "killed", ""], Health.HEALTHY),
        (["killed", "slow", ""], Health.HEALTHY),
        (["killed", "slow"], Health.STRAGGLER),
    ],
)
def test_two_of_a_kind_are_wanted(answers: list[str], health: Health) -> None:
    """A verdict needs two failures of one kind. One failure and one other answer are not enough."""
    fields = {"": well(), "slow": well(2.0)}
    own = [fields.get(each) or Alone(error=each) for each in answers]
    assert checked({0: [well()], 1: own, 2: [well()]})[1].health is health


def test_a_pair_without_memory_blames_neither() -> None:
    """A pair without memory leaves both nodes unmeasured, not faulty."""
    found = checked({node: [well()] for node in range(2)}, {(0, 1): NO_MEMORY})
    assert {each.health for each in found} == {Health.UNKNOWN}
    assert found[0].reason == f"not measured with another node: {NO_MEMORY}"


def test_a_node_that_has_memory_with_nobody_is_unknown() -> None:
    """A node that has memory with no partner is unknown. Its partners work with other nodes."""
    pairs = {(node, 3): NO_MEMORY for node in range(3)}
    found = checked({node: [well()] for node in range(4)}, pairs)
    assert [each.health for each in found] == [Health.HEALTHY] * 3 + [Health.UNKNOWN]
