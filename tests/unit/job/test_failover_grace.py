"""The variable of ModelArts that limits the wait for old pods of a reschedule (document 004)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jobs.driver import Driver, spec_of
from jobs.trained import trained

from rekindle import names
from rekindle.engines.kubernetes.manifests.settings import KubernetesSettings
from rekindle.errors import UsageError
from rekindle.job.spec import JobDirectory, check
from rekindle.protocol import agent as p
from rekindle.recovery.policy.policy import ALLOWABLE, INNER, Policy

OUTER_ONLY = tuple(strategy for strategy in ALLOWABLE if strategy not in INNER)
PLACED_ANEW = Policy(strategies=OUTER_ONLY, max_restarts=0, max_reschedules=1)
POD = Policy(strategies=OUTER_ONLY, max_restarts=0, max_pod_reschedules=1)
GRACE_S = 600


def graces(job: Driver) -> set[float]:
    """Return the grace periods of the Kill messages that the coordinator sent."""
    return {kill.grace_s for kill in job.sent_by_node(p.Kill).values()}


@pytest.mark.parametrize("policy", [PLACED_ANEW, POD])
@pytest.mark.parametrize("text", ["-1", "3", "60"])
def test_it_never_shortens_the_end_of_ranks(policy: Policy, text: str) -> None:
    """Ranks have their usual time to end, and the final checkpoint follows it."""
    job = trained(5, nodes=2, policy=policy, environment={names.ENV_FAILOVER_GRACE: text})
    if policy is POD:
        job.lose(1)
    else:
        job.exits(1, code=3)
    assert graces(job) == {10.0}


def pod(uid: str) -> dict[str, Any]:
    """Return a pod that ends, with the grace of a final checkpoint."""
    times = {"deletionTimestamp": "2026-01-02T03:04:04Z", "deletionGracePeriodSeconds": GRACE_S}
    metadata = {"name": uid, "uid": uid, **times}
    return {"metadata": metadata, "status": {"phase": "Running"}}


@pytest.mark.parametrize(("text", "after_s"), [("", 10.0), ("-1", 10.0), ("3", 3.0), ("60", 60.0)])
def test_an_old_pod_is_waited_for_so_long_after_its_grace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, after_s: float
) -> None:
    """The engine removes a pod by force after its whole grace and this time, and not earlier."""
    from rekindle.engines.kubernetes.placement.placement import Placement
    from rekindle.engines.kubernetes.watchers.job_watcher import JobWatcher

    directory = JobDirectory(tmp_path / "job")
    given = {names.ENV_FAILOVER_GRACE: text} if text else {}
    directory.create(spec_of(nodes=1, processes=1, environment=given), logs=False)
    place = Placement(
        directory, KubernetesSettings(image="i"), SimpleNamespace(), SimpleNamespace()
    )
    ended: list[str] = []
    monkeypatch.setattr(place, "end_pod", lambda pod, grace_s: ended.append(pod["metadata"]["uid"]))
    watcher = JobWatcher.__new__(JobWatcher)
    watcher._place = place
    monkeypatch.setattr(watcher, "pods", lambda: [pod("old")], raising=False)
    since = watcher._end_overdue({}, 1000.0)
    since = watcher._end_overdue(since, 1000.0 + GRACE_S + after_s)
    assert ended == []
    watcher._end_overdue(since, 1000.0 + GRACE_S + after_s + 0.1)
    assert ended == ["old"]
    assert place.overdue_s == after_s


@pytest.mark.parametrize("text", ["0", "-2", "ten", "", "1.5", "9" * 12])
def test_what_is_no_number_of_seconds_is_refused(text: str) -> None:
    """check() refuses an invalid number of seconds before the job starts, with the valid values."""
    spec = spec_of(nodes=1, processes=1, environment={names.ENV_FAILOVER_GRACE: text})
    with pytest.raises(UsageError, match="whole number of seconds, at least 1, or -1"):
        check(spec)
