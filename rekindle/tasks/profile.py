"""Show the results of a job's records of light profiling as an artifact."""

from __future__ import annotations

import base64
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from prefect import get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from rekindle import names
from rekindle.errors import UsageError
from rekindle.profiling.findings import in_words, nodes_of
from rekindle.profiling.reading import (
    HEADS,
    WHAT,
    Task,
    breakdown,
    diagnose,
    read_task,
    remarks,
    steps_with_collectives,
)
from rekindle.tasks import job_access as jobs

MOST_RANKS = 64  # in the table
MOST_STEPS = 500  # in the picture: the newest steps


@task(name="report-profile", cache_policy=NO_CACHE)
def report_profile(job_id: str) -> list[dict[str, Any]]:
    """Show the slow ranks and a picture; return the slow ranks as plain values.

    The task reads the records on this machine. Ranks in pods write theirs into the pods.
    """
    directory = jobs.directory_of(job_id)
    log = get_run_logger()
    try:
        found = read_task(directory.path / names.PROFILING_DIRECTORY)
    except UsageError as error:
        log.info("There are no profiling results yet: %s", error)
        return []
    per_node = directory.spec().processes_per_node
    _, now = diagnose(found, per_node=per_node)
    lines = [f"- **{each.kind.value}**: {in_words(each, nodes_of(each, per_node))}" for each in now]
    if not lines and steps_with_collectives(found):
        lines = ["No rank is slow."]
    lines += [f"- {remark}" for remark in remarks(found, per_node=per_node)]
    steps = list(found.steps)
    text = "\n".join(
        [
            f"Steps {steps[0]} to {steps[-1]} of {len(found.ranks)} ranks",
            "",
            *lines,
            "",
            f"![Compute](data:image/png;base64,{_picture(found, steps[-MOST_STEPS:])})",
            "",
            *_table(found, steps[-MOST_STEPS:]),
        ]
    )
    create_markdown_artifact(
        text,
        key=f"{job_id}-profile",
        description=f"The table shows how the ranks of job {job_id} spend their time",
    )
    for each in now:
        log.warning("%s: %s", each.kind.value, in_words(each, nodes_of(each, per_node)))
    return [msgspec.to_builtins(each) for each in now]


def _table(found: Task, steps: list[int]) -> list[str]:
    """Return a table of the time of each rank in Markdown, of at most MOST_RANKS ranks."""
    rows = [HEADS, ["---:"] * len(HEADS), *breakdown(found, steps)[:MOST_RANKS]]
    more = len(found.ranks) - MOST_RANKS
    note = f"{WHAT}; {more} more ranks: `rekindle diagnose`" if more > 0 else WHAT
    return [*(f"| {' | '.join(map(str, row))} |" for row in rows), "", note]


def _picture(found: Task, steps: list[int]) -> str:
    from rekindle.reporting.heat_map import draw  # matplotlib is slow to import

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "compute.png"
        draw(found, steps, path)
        return base64.b64encode(path.read_bytes()).decode()
