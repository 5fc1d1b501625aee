"""The ranks that repair each other, in MindIO's terms."""

from __future__ import annotations

from typing import Any

import pytest

from rekindle.errors import SessionError
from rekindle.training.mindio.enums import RepairType
from rekindle.training.mindio.repairs import RepairRequest, repair_of, replicas_of


def info(
    kind: RepairType, pairs: list[tuple[int, int]], ranks: list[int], types: int = 1
) -> dict[str, Any]:
    """Return MindIO's description of a repair."""
    return {
        "type": [number for number in range(types) for _ in pairs],
        "repair_type": kind.value,
        "src": [source for source, _ in pairs] * types,
        "dst": [target for _, target in pairs] * types,
        "rank_list": ranks,
    }


def test_who_sends_and_who_takes_hear_the_same_of_each_other() -> None:
    """Senders and receivers get calls that match: their own pairs, and all ranks in any pair."""
    requests = [RepairRequest(((0, 2),)), RepairRequest(((0, 5),)), RepairRequest(((1, 3),))]
    ranks = [0, 1, 2, 3, 5]
    sends = repair_of(0, 9, requests, rebuild=False, types=1)
    assert sends == (9, False, [2, 5], info(RepairType.RT_SEND, [(0, 2), (0, 5)], ranks))
    damaged = repair_of(2, 9, requests, rebuild=True, types=1)
    assert damaged == (9, True, [2], info(RepairType.RT_UCE_HIGHLEVEL, [(0, 2)], ranks))
    torn = repair_of(3, 9, requests, rebuild=False, types=1)
    assert torn == (9, False, [3], info(RepairType.RT_RECV_REPAIR, [(1, 3)], ranks))
    assert repair_of(4, 9, requests, rebuild=False, types=1) is None
    assert repair_of(0, 9, [], rebuild=False, types=1) is None


def test_each_optimizer_is_repaired() -> None:
    """With two optimizers, such as attention and experts, the call has each pair twice."""
    call = repair_of(0, 9, [RepairRequest(((0, 2),))], rebuild=False, types=2)
    assert call is not None
    assert call.repair_info == info(RepairType.RT_SEND, [(0, 2)], [0, 2], types=2)


def test_one_that_asks_for_a_checkpoint_has_all_load_it() -> None:
    """If one rank requests a checkpoint, all ranks load it.

    A rank with damaged memory also rebuilds its model.
    """
    requests = [RepairRequest(loads=True), RepairRequest(((0, 2),))]
    call = repair_of(1, 9, requests, rebuild=False, types=1)
    assert call == (9, False, [1], info(RepairType.RT_LOAD_CKPT, [(1, 1)], [1]))
    call = repair_of(2, 9, requests, rebuild=True, types=1)
    assert call == (9, True, [2], info(RepairType.RT_LOAD_REBUILD, [(2, 2)], [2]))


@pytest.mark.parametrize(
    ("rank", "same"), [(0, {0, 16}), (8, {8, 24}), (16, {0, 16}), (24, {8, 24})]
)
def test_replicas_of_a_sharded_optimizer_mirror_each_other(rank: int, same: set[int]) -> None:
    """In MindIO's example of four ranks and two replicas, 0 and 16 hold the same, and 8 and 24."""
    group = {"rank_list": [0, 8, 16, 24], "replica_cnt": 2, "replica_shift": 0}
    assert replicas_of(rank, [group]) == same


def test_replicas_hold_the_same_of_every_optimizer() -> None:
    """With several optimizers, two ranks are replicas only if all their states are equal.

    In MindSpore's group all ranks are replicas.
    """
    whole = {"type": 1, "rank_list": [0, 1, 2, 3], "replica_cnt": 4, "replica_shift": 0}
    assert replicas_of(2, [whole]) == {0, 1, 2, 3}
    experts = {"rank_list": [0, 2], "replica_cnt": 2, "replica_shift": 0}
    assert replicas_of(2, [whole, experts]) == {0, 2}


@pytest.mark.parametrize(
    "group",
    [
        {},
        {"rank_list": [1, 2], "replica_cnt": 2},
        {"rank_list": [0, 1, 2], "replica_cnt": 2},
        {"rank_list": [0, 1], "replica_cnt": 3},
    ],
)
def test_what_is_no_group_of_replicas_is_refused(group: dict[str, Any]) -> None:
    """A group is invalid if it lacks the rank, or if the replicas cannot divide it equally."""
    with pytest.raises(SessionError, match="not a group of replicas with rank 0"):
        replicas_of(0, [group])
    with pytest.raises(SessionError, match="at least one group of replicas"):
        replicas_of(0, [])
