"""Decide which rank repairs which, in MindIO's terms. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from rekindle.errors import SessionError
from rekindle.training.mindio.enums import RepairType
from rekindle.training.mindio.handlers import RepairCall

Pair = tuple[int, int]  # the rank that sends its state, and the rank that receives it


class RepairRequest(msgspec.Struct, frozen=True, array_like=True):
    """The values that a rank sends to all others before a repair.

    pairs: the pairs in which it receives a state. loads: it requests that all ranks load a
    checkpoint.
    is_new: its process is new.
    """

    pairs: tuple[Pair, ...] = ()
    loads: bool = False
    is_new: bool = False


def joined(requests: Collection[RepairRequest]) -> list[int]:
    """Return the ranks whose processes are new."""
    return sorted(target for request in requests if request.is_new for _, target in request.pairs)


def repair_of(
    rank: int, step: int, requests: Collection[RepairRequest], *, rebuild: bool, types: int
) -> RepairCall | None:
    """Return the arguments of a rank's repair handler; None: it has nothing to do.

    rebuild: the memory of its device was damaged. types: the number of optimizers, whose states are
    repaired alike.
    """
    if any(request.loads for request in requests):
        kind = RepairType.RT_LOAD_REBUILD if rebuild else RepairType.RT_LOAD_CKPT
        return _call(kind, step, [(rank, rank)], [rank], types)
    pairs = sorted(pair for request in requests for pair in request.pairs)
    taking_part = sorted({each for pair in pairs for each in pair})
    if sends := [pair for pair in pairs if pair[0] == rank]:
        return _call(RepairType.RT_SEND, step, sends, taking_part, types)
    if takes := [pair for pair in pairs if pair[1] == rank]:
        kind = RepairType.RT_UCE_HIGHLEVEL if rebuild else RepairType.RT_RECV_REPAIR
        return _call(kind, step, takes, taking_part, types)
    return None


def _call(
    kind: RepairType, step: int, pairs: Sequence[Pair], ranks: list[int], types: int
) -> RepairCall:
    each = [(number, *pair) for number in range(types) for pair in pairs]
    targets = [target for _, _, target in each]
    info = {
        "type": [number for number, _, _ in each],
        "repair_type": kind.value,
        "src": [source for _, source, _ in each],
        "dst": targets,
        "rank_list": ranks,
    }
    rebuild = kind in (RepairType.RT_UCE_HIGHLEVEL, RepairType.RT_LOAD_REBUILD)
    return RepairCall(step, rebuild, targets.copy(), info)


def replicas_of(rank: int, replica_info: Sequence[Mapping[str, Any]]) -> frozenset[int]:
    """Return the ranks that hold the same state as this rank, including this rank.

    replica_info: the argument of `tft_set_optimizer_replica`. Each optimizer has the ranks of a
    data-parallel group and the number of replicas of its state. Raises SessionError: it is invalid.
    """
    if not replica_info:
        raise SessionError("tft_set_optimizer_replica() needs at least one group of replicas")
    found: frozenset[int] | None = None
    for group in replica_info:
        ranks, count = list(group.get("rank_list") or ()), int(group.get("replica_cnt") or 0)
        if rank not in ranks or not 1 <= count <= len(ranks) or len(ranks) % count:
            raise SessionError(
                f"tft_set_optimizer_replica(): {dict(group)!r} is not a group of replicas with "
                f"rank {rank}"
            )
        # The group is divided into one piece per replica. Ranks at the same place in their pieces
        # hold the same state.
        apart = len(ranks) // count
        same = frozenset(ranks[ranks.index(rank) % apart :: apart])
        found = same if found is None else found & same
    assert found is not None
    return found
