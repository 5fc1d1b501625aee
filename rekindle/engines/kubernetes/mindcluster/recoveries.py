"""How MindCluster's own recovery of a job goes, folded from what it writes. Pure.

Its steps are in the job's reset-config; which strategy it has tried, and whether that has helped,
ClusterD notes at the job's PodGroup. ClusterD's signals say more, but to one listener alone, which
is the job's TaskD.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from rekindle.engines.kubernetes.client.api import Object
from rekindle.engines.kubernetes.client.errors import DamagedError
from rekindle.engines.kubernetes.mindcluster.resets import ResetInfo, progress, read_reset
from rekindle.recovery.policy.annotations import PROCESS_RECOVER

_RESULT = "ProcessRecoverStatus"  # annotation: <strategy>-success, <strategy>-failed
_RESULTS = {"success": "which has helped", "failed": "which has not helped"}
_SWITCHED = {
    "on": "goes on with its recovery of processes",
    "pause": "pauses its recovery of processes, to place the job anew",
    "off": "recovers processes no longer",
}


class _Group(msgspec.Struct, frozen=True):
    """What a PodGroup says; ClusterD switches its recovery by a label there."""

    result: str = ""
    switch: str = "on"


class Recovery:
    """What of it is known. reset: its steps; damage: why they cannot be read, if so."""

    def __init__(self, workload: str) -> None:
        self.reset = ResetInfo()
        self.damage = ""
        self._workload = workload
        self._groups: dict[str, _Group] = {}  # by uid

    def take_reset(self, configmap: Object, *, there: bool) -> list[str]:
        """Take the reset-config as it is now; return what is new, in sentences."""
        self.damage = ""
        try:
            now = read_reset(configmap) if there else ResetInfo()
        except DamagedError as error:
            self.damage = str(error)
            return []
        before, self.reset = self.reset, now
        return [f"MindCluster {text}" for text in progress(before, now)]

    def take_group(self, group: Object, *, there: bool) -> list[str]:
        """Take a PodGroup, if it is the job's; return what is new, in sentences."""
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
            yield "has ended the processes: it had nothing left to try"
        else:
            yield f"has tried {strategy or now.result}, {_RESULTS.get(outcome, outcome)}"
    if now.switch != before.switch:
        yield _SWITCHED.get(now.switch, f"says of its recovery of processes: {now.switch!r}")
