"""Run a plan: start each attempt, and act when the faults of a row occur."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from rekindle.recovery.journal import journal
from training_jobs.ended import Ended, EndedOf
from training_jobs.job import Job
from training_jobs.plans import Attempt, Plan


def run_plan(folder: Path, plan: Plan) -> Ended:
    """Run the attempts of a plan. Keep an error of the job for the tests of its rows."""
    of_plan = {"variant": plan.variant, "processes": plan.ranks, "steps": plan.steps}
    job = Job(folder, **of_plan, **plan.settings)
    ended = Ended(job, plan.attempts)
    known = []  # the number of events before each attempt
    try:
        for attempt in plan.attempts:
            known.append(len(job.events()))
            _meet(ended, attempt)
    except Exception as error:
        ended.error, ended.story = error, job.story()
    finally:
        job.__exit__()
    events = job.events()
    ended.journals = [events[a:b] for a, b in itertools.pairwise([*known, len(events)])]
    return ended


def _meet(ended: Ended, attempt: Attempt) -> None:
    """Run the next attempt through its rows."""
    job = ended.job
    number = job.plan_more(*(fault for row in attempt.rows for fault in row.faults))
    for row in attempt.rows:
        ended.numbers[row] = number
        number += len(row.faults)
    job.replaces = attempt.replaces
    job.start(**(attempt.settings(job) if callable(attempt.settings) else attempt.settings))
    for row in attempt.rows:
        if row.act is not None:
            ended.seen[row.name] = row.act(job, ended.numbers[row])
    ended.ends.append(job.end())
    ended.left += job.leftovers()
    assert len(job.events_of(journal.Ended)) == len(ended.ends), "it ended more than once"
    assert ended.ends[-1].outcome == attempt.outcome, f"{ended.ends[-1]}"
    if attempt.after is not None:
        ended.after[attempt.name] = attempt.after(job)


@pytest.fixture(scope="session")
def ended_of(tmp_path_factory: pytest.TempPathFactory) -> EndedOf:
    """Return a function that runs a plan once for each test worker.

    It does not repeat a failed run.
    """
    known: dict[Plan, Ended] = {}
    begun: set[Plan] = set()

    def run(plan: Plan) -> Ended:
        if plan not in known:
            assert plan not in begun, f"plan {plan} was broken off in an earlier test"
            begun.add(plan)
            known[plan] = run_plan(tmp_path_factory.mktemp("plan"), plan)
        return known[plan]

    return run
