"""Read MindCluster's own recovery of a job from the ConfigMap `reset-config-<job>`. Pure.

ClusterD writes it for the starter of the processes, and the device plugin for resets of chips. It
has the failed ranks, whether more faults may follow, and the number of restarts of all processes.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from rekindle.engines.kubernetes.client.api import Object
from rekindle.engines.kubernetes.client.api_errors import DamagedError
from rekindle.engines.kubernetes.mindcluster.reports import check, decode, name_of, text_of
from rekindle.recovery.policy.dialect import PROCESS_RECOVER

# The device plugin's actions, as texts for users.
_POLICIES = {
    "ignore": "ignores the fault",
    "restart_request": "restarts its request",
    "restart": "restarts training",
    "free_reset": "resets its chip once it is idle",
    "reset": "resets its chip",
    "isolate": "isolates its chip",
}

_RESULT = "ProcessRecoverStatus"  # annotation: <strategy>-success, <strategy>-failed
_RESULTS = {"success": "with success", "failed": "without success"}
_SWITCHED = {
    "on": "continues its recovery of processes",
    "pause": "pauses its recovery of processes, to place the job again",
    "off": "no longer recovers processes",
}


class RankState(msgspec.Struct, frozen=True, rename="pascal"):
    """One failed rank. rank_id: its number for MindCluster.

    status: fault (of a process), unrecovered, recovered, failed. policy: "": none, as for a
    process. error_code_hex: codes with commas between them, or "".
    """

    rank_id: int
    status: str = ""
    policy: str = ""
    error_code_hex: str = ""


class ResetInfo(msgspec.Struct, frozen=True, rename="pascal"):
    """The content of reset.json. retry_time: the number of restarts of all processes."""

    rank_list: list[RankState] | None = None
    retry_time: int = 0
    fault_flushing: bool = False
    graceful_exit: int = 0
    restart_fault_process: bool = False

    @property
    def ranks(self) -> dict[int, RankState]:
        """Return the failed ranks, by their number."""
        return {one.rank_id: one for one in self.rank_list or ()}


def read_reset(configmap: Object) -> ResetInfo:
    """Read a reset-config; an unused one has no check code. Raises DamagedError."""
    what = f"{name_of(configmap)}: reset.json"
    text = text_of(configmap, "reset.json")
    if text is None:
        raise DamagedError(f"{what} is missing")
    found = decode(text, ResetInfo, what)
    code = text_of(configmap, "checkCode")
    if code:
        check(text.encode(), code, what)
    elif found != ResetInfo():
        raise DamagedError(f"{what} has no check code")
    return found


def progress(before: ResetInfo, now: ResetInfo) -> Iterator[str]:
    """Yield the changes of the recovery between two states, one sentence each."""
    if now.fault_flushing and not before.fault_flushing:
        yield "has detected a fault, and waits for other faults"
    if now.graceful_exit and not before.graceful_exit:
        yield "ends all processes"
    for number, rank in now.ranks.items():
        if before.ranks.get(number) != rank:
            yield _rank_in_words(rank)
    if now.restart_fault_process and not before.restart_fault_process:
        yield "restarts the failed processes on their nodes"
    if now.retry_time > before.retry_time:
        yield f"restarts all processes, for the {_times(now.retry_time)}"
    if before.ranks and not now.ranks:
        yield "no longer lists a failed rank"


def _rank_in_words(rank: RankState) -> str:
    codes = f", {rank.error_code_hex[:200]}" if rank.error_code_hex else ""
    policy = _POLICIES.get(rank.policy, rank.policy and f"does {rank.policy!r}")
    done = f"; it {policy}" if policy else ""
    return f"lists rank {rank.rank_id}: {rank.status or 'no status'}{codes}{done}"


def _times(number: int) -> str:
    return {1: "first time", 2: "second time", 3: "third time"}.get(number, f"{number}th time")


class _Group(msgspec.Struct, frozen=True):
    """The state of a PodGroup; ClusterD switches its recovery by a label there."""

    result: str = ""
    switch: str = "on"


class ResetProcess:
    """The known state of a recovery. reset: its steps. damage: why they are unreadable, or ""."""

    def __init__(self, workload: str) -> None:
        self.reset = ResetInfo()
        self.damage = ""
        self._workload = workload
        self._groups: dict[str, _Group] = {}  # by uid

    def take_reset(self, configmap: Object, *, there: bool) -> list[str]:
        """Take the current reset-config; return the changes as sentences."""
        self.damage = ""
        try:
            now = read_reset(configmap) if there else ResetInfo()
        except DamagedError as error:
            self.damage = str(error)
            return []
        before, self.reset = self.reset, now
        return [f"MindCluster {text}" for text in progress(before, now)]

    def take_group(self, group: Object, *, there: bool) -> list[str]:
        """Take a PodGroup, if it belongs to the job; return the changes as sentences."""
        metadata = group["metadata"]
        owners = {one["name"] for one in metadata.get("ownerReferences") or ()}
        if self._workload not in owners:
            return []
        before = self._groups.pop(metadata["uid"], _Group())
        if not there:
            return []
        now = _Group(
            (metadata.get("annotations") or {}).get(_RESULT, ""),
            (metadata.get("labels") or {}).get(PROCESS_RECOVER, "on"),
        )
        self._groups[metadata["uid"]] = now
        return [f"MindCluster {text}" for text in _changes(before, now)]


def _changes(before: _Group, now: _Group) -> Iterator[str]:
    if now.result and now.result != before.result:
        strategy, _, outcome = now.result.rpartition("-")
        if now.result == "exit-completed":
            yield "has ended the processes, because it had no strategy left"
        else:
            yield f"has tried {strategy or now.result}, {_RESULTS.get(outcome, outcome)}"
    if now.switch != before.switch:
        yield _SWITCHED.get(
            now.switch, f"reports the state {now.switch!r} of its recovery of processes"
        )
