"""Which of MindCluster's words about a host concern a job's node there, and its devices. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from rekindle.engines.kubernetes.client.api import Object
from rekindle.engines.kubernetes.client.pod_status import look_at
from rekindle.engines.kubernetes.labels import ROLE, Role
from rekindle.engines.kubernetes.mindcluster.reports import ActiveCode, Report, chip_numbers
from rekindle.engines.kubernetes.mindcluster.resets import RankState, ResetInfo
from rekindle.recovery.faults.classification import Sign, Source
from rekindle.recovery.journal.journal import AnyEvent, SignSeen

BY = "mindcluster"
_LONGEST = 200  # characters of what is put down about a rank
_ALLOCATED = "huawei.com/AscendReal"  # by the device plugin, once it has given a pod its chips
_RANK_INDEX = "hccl/rankIndex"  # what MindCluster calls a node's rank


class Placed(msgspec.Struct, frozen=True):
    """A pod that runs on a host.

    ip: by which its node is known. chips: their numbers on the host, in the order of the pod's
    devices; none: it is not known which. index: its rank among the pods, to MindCluster; -1: none.
    """

    uid: str
    host: str
    ip: str
    chips: tuple[int, ...] = ()
    index: int = -1


def placed(pod: Object, device: str) -> Placed | None:
    """Read a pod; None: it runs nowhere, or no ranks. device: the resource that it asks for."""
    seen, metadata = look_at(pod), pod["metadata"]
    has_ranks = (metadata.get("labels") or {}).get(ROLE) == Role.WORKER.value
    if not has_ranks or seen.is_over or not (seen.host and seen.ip):
        return None
    said = metadata.get("annotations") or {}
    index = said.get(_RANK_INDEX, "")
    return Placed(
        uid=seen.uid,
        host=seen.host,
        ip=seen.ip,
        chips=chip_numbers(said.get(_ALLOCATED) or said.get(device) or ""),
        index=int(index) if index.isascii() and index.isdigit() and len(index) < 10 else -1,
    )


def signs(place: Placed, reports: Iterable[Report], node: int, ranks: int) -> list[Sign]:
    """Return what a node is to be told of its host. ranks: how many it has.

    A chip that another pod has is none of its business.
    """
    faults = [fault for report in reports for fault in report.faults]
    return [_of_host(place, one, node, ranks) for one in faults if is_ours(place, one.chip)]


def is_ours(place: Placed, chip: int) -> bool:
    """Whether a chip is the pod's; -1, what is of no chip, concerns everybody on the host."""
    return chip < 0 or chip in place.chips


def remarks(place: Placed, reports: Iterable[Report]) -> list[str]:
    """Return what people are to be told of a host: what has no code, or is of an unknown chip."""
    found = []
    for report in reports:
        told = [(chip, text) for chip, text in report.remarks if is_ours(place, chip)]
        if not place.chips:
            told += [
                (
                    fault.chip,
                    f"has fault {fault.code}; whether it is the pod's is not known, "
                    f"which has no annotation {_ALLOCATED}",
                )
                for fault in report.faults
                if fault.chip >= 0
            ]
        found += [f"host {place.host}{_chip(chip)}: {text}" for chip, text in told]
    return found


def _chip(number: int) -> str:
    return f", chip {number}" if number >= 0 else ""


def _of_host(place: Placed, fault: ActiveCode, node: int, ranks: int) -> Sign:
    """Where a rank has several chips, the node is told."""
    named = fault.chip >= 0 and len(place.chips) == ranks
    return Sign(
        source=Source.ASCEND,
        what=fault.code,
        node=node,
        device=place.chips.index(fault.chip) if named else -1,
        by=BY,
        severity=fault.severity,
        origin=fault.origin,
        host=place.host,  # another pod, elsewhere, may be the node by now
    )


def recovery_signs(place: Placed, info: ResetInfo, node: int, ranks: int) -> list[Sign]:
    """Return what a node is to be told of MindCluster's recovery: which of its ranks it lists."""
    devices = len(place.chips) or ranks
    if place.index < 0:
        return []
    return [
        Sign(
            source=Source.MINDCLUSTER,
            what=_listed(rank),
            node=node,
            device=number % devices if devices == ranks else -1,
            by=BY,
            host=place.host,
        )
        for number, rank in info.ranks.items()
        if number // devices == place.index
    ]


def _listed(rank: RankState) -> str:
    words = (rank.status or "listed", rank.policy, rank.error_code_hex)
    return " ".join(filter(None, words))[:_LONGEST]


def reported_before(events: Iterable[AnyEvent]) -> dict[str, list[Sign]]:
    """Return the signs that whoever steered the job before has reported, and not as over; by host.

    events: of the job's journal.
    """
    found: dict[tuple[str, Source, str, int], Sign] = {}
    for event in events:
        if isinstance(event, SignSeen):
            sign = event.sign
            name = event.host, sign.source, sign.what, sign.device
            if sign.gone:
                found.pop(name, None)
            elif sign.by == BY:
                found[name] = sign
    hosts: dict[str, list[Sign]] = {}
    for (host, *_), sign in found.items():
        hosts.setdefault(host, []).append(sign)
    return hosts
