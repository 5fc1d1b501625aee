"""Read the state of a pod from its object. Pure.

`recovery/faults/tables/data/kubernetes_pods.toml` has entries for these names of reasons.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator

import msgspec

from rekindle.engines.kubernetes.client.api import Object
from rekindle.engines.kubernetes.labels import ROLE

_ENDED = "Error"
# These reasons add nothing to the exit status.
_SAY_NOTHING = {"", _ENDED, "Completed", "ContainerCreating", "PodInitializing"}


class Reason(msgspec.Struct, frozen=True):
    """The reason why a pod does not run: Kubernetes' word, and its sentence."""

    word: str
    sentence: str = ""


class PodStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one pod.

    `ip`, `host`: "" if it has none yet. `waits`: it has no node, or cannot start. `exit_code`: of
    its container, if that has ended. `ending`: its deletion was requested, with `grace_s` seconds.
    `started`: when its running container started. `restarts`: of its containers. Times are in
    seconds since the epoch; the cluster rounds them down to seconds.
    """

    name: str
    uid: str
    phase: str
    role: str = ""
    ip: str = ""
    host: str = ""
    waits: bool = False
    ending: bool = False
    grace_s: int = 0
    created: float = 0.0
    started: float = 0.0
    restarts: int = 0
    exit_code: int | None = None
    reasons: tuple[Reason, ...] = ()

    @property
    def is_over(self) -> bool:
        """Return whether all of its containers have ended for good."""
        return self.phase in ("Succeeded", "Failed")

    @property
    def has_run(self) -> bool:
        """Return whether its container ever started."""
        return self.started > 0 or self.exit_code is not None or self.restarts > 0

    @property
    def stays(self) -> bool:
        """Return whether it has no order to end, so that its kubelet restarts its container."""
        return not self.ending and not self.is_over

    def ran(self, at: float) -> bool:
        """Return whether its container has run since that time or earlier, without an end."""
        return 0 < self.started <= at

    def in_words(self) -> str:
        """Return a sentence about the cause of its wait or its end."""
        why = "; ".join(f"{r.word}: {r.sentence}" if r.sentence else r.word for r in self.reasons)
        if not why and self.exit_code is not None:
            why = f"its container ended with status {self.exit_code}"
        return f"pod {self.name} is {self.phase}" + (f" ({why})" if why else "")


def pod_status(pod: Object) -> PodStatus:
    """Read a pod's object."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    containers = status.get("containerStatuses") or []
    ended = [
        c["state"]["terminated"] for c in containers if (c.get("state") or {}).get("terminated")
    ]
    reasons = tuple(dict.fromkeys(_reasons(status)))
    exit_code = ended[0].get("exitCode") if ended else None
    if exit_code and not reasons:
        # Kubernetes' word for any exit status but 0
        reasons = (Reason(_ENDED, f"its container ended with status {exit_code}"),)
    return PodStatus(
        name=metadata["name"],
        uid=metadata["uid"],
        phase=status.get("phase", "Pending"),
        role=(metadata.get("labels") or {}).get(ROLE, ""),
        ip=status.get("podIP") or "",
        host=(pod.get("spec") or {}).get("nodeName") or "",
        waits=status.get("phase", "Pending") == "Pending" and bool(reasons),
        ending=bool(metadata.get("deletionTimestamp")),
        grace_s=metadata.get("deletionGracePeriodSeconds") or 0,
        created=_seconds(metadata.get("creationTimestamp")),
        started=max((_seconds(since) for since in _running_since(containers)), default=0.0),
        restarts=sum(c.get("restartCount", 0) for c in containers),
        exit_code=exit_code,
        reasons=reasons,
    )


def _running_since(containers: list[Object]) -> Iterator[str | None]:
    for container in containers:
        if running := (container.get("state") or {}).get("running"):
            yield running.get("startedAt")


def _seconds(stamp: str | None) -> float:
    # Python before 3.11 does not read the Z for UTC.
    stamp = (stamp or "").replace("Z", "+00:00")
    return datetime.datetime.fromisoformat(stamp).timestamp() if stamp else 0.0


def _reasons(status: Object) -> Iterator[Reason]:
    """Yield every reason, the most specific first."""
    for condition in status.get("conditions") or []:
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            yield from _reason_in(condition)
    yield from _reason_in(status)
    every = (status.get("initContainerStatuses") or []) + (status.get("containerStatuses") or [])
    for container in every:
        state = container.get("state") or {}
        yield from _reason_in(state.get("terminated") or state.get("waiting") or {})
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            yield from _reason_in(condition)


def _reason_in(where: Object) -> Iterator[Reason]:
    word = where.get("reason") or ""
    if word not in _SAY_NOTHING:
        yield Reason(word, " ".join((where.get("message") or "").split())[:300])
