"""The last step of the check-nodes flow: what was found, as a table."""

from __future__ import annotations

from typing import Any

from prefect import get_run_logger, task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE

from rekindle.recovery.journal.journal import NodeChecked
from rekindle.recovery.node_check.evidence import Part
from rekindle.recovery.node_check.verdicts import SICK
from rekindle.tasks import job_access as jobs

ARTIFACT = "checked-nodes"


@task(name="report-nodes", cache_policy=NO_CACHE)
def report_nodes(job_id: str) -> list[dict[str, Any]]:
    """Show how each node is, sick ones first; return the same as plain values, times in ms."""
    checks = [event for event in jobs.history_of(job_id) if isinstance(event, NodeChecked)]
    checks.sort(key=lambda each: (each.verdict.health not in SICK, each.host))
    rows = [_row(check) for check in checks]
    if rows:
        sick = sum(each.verdict.health in SICK for each in checks)
        said = f"{len(rows)} nodes were checked by job {job_id}; {sick} are sick"
        create_table_artifact(rows, key=ARTIFACT, description=said)
        (get_run_logger().warning if sick else get_run_logger().info)(said)
    return rows


def _row(check: NodeChecked) -> dict[str, Any]:
    verdict = check.verdict
    row: dict[str, Any] = {
        "host": check.host or check.address,
        "verdict": verdict.health.value,
        "why": verdict.reason,
        "isolated": check.fault is not None,
    }
    for part in Part:
        if part in verdict.seconds:
            row[f"{part.value} (ms)"] = round(verdict.seconds[part] * 1e3, 3)
    return row
