"""Run the demo: a run without faults, the same run with three faults, and the comparison."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from typing import Any

import place
import screen
from job_side import Target, ending_jobs, leftovers
from prefect_side import Served, served, server, until
from verdict import Plan, incident_entry, judge

from rekindle import TrainingJob
from rekindle.reporting.step_records import read_records
from rekindle.reporting.timeline import Mark, draw
from rekindle.tasks.job_access import history_of, job_id_of

_RUN_S = 420.0
SNAPSHOT_EVERY = 5


class Run:
    """One flow run and its job."""

    def __init__(self, plan: Plan, prefect: Served, name: str) -> None:
        self.plan = plan
        self.prefect = prefect
        job = TrainingJob(
            name=name,
            script=str(place.SCRIPT),
            arguments=plan.arguments(place.OUTPUT / "results" / name),
            nodes=plan.nodes,
            processes_per_node=plan.processes_per_node,
            environment={"OMP_NUM_THREADS": "1"},
            snapshot_every=SNAPSHOT_EVERY,
        )
        self.flow_run_id = prefect.start(job, name)
        self.target = Target(job_id_of(self.flow_run_id, name))

    def until_begun(self) -> None:
        """Wait for the first step."""
        until(lambda: self.target.has_begun() or self.failed(), "the job has begun", _RUN_S)

    def failed(self) -> bool:
        """Return False. Raises RuntimeError: the flow run has failed, crashed or was cancelled."""
        state = self.prefect.state(self.flow_run_id)
        if state.is_failed() or state.is_crashed() or state.is_cancelled():
            raise RuntimeError(f"flow run {self.target.job_id}: {state.name}: {state.message}")
        return False

    def until_step(self, step: int, steps: screen.Steps) -> None:
        """Wait until a number of steps is finished."""
        until(lambda: steps.show() >= step, f"step {step} is finished", _RUN_S)

    def until_recovered(self, count: int) -> None:
        """Wait until `count` incidents are over."""

        def over() -> bool:
            found = self.target.incidents()
            return len(found) >= count and all(incident.closed for incident in found)

        until(over, f"incident {count} is over", _RUN_S)

    def until_completed(self, steps: screen.Steps) -> None:
        """Wait until the flow run is completed."""

        def completed() -> bool:
            steps.show()
            time.sleep(0.2)
            self.failed()
            return self.prefect.state(self.flow_run_id).is_completed()

        until(completed, "the flow run is completed", _RUN_S)


def undisturbed(plan: Plan, prefect: Served) -> Run:
    """Train without any fault."""
    screen.say("\n[bold]1. Undisturbed[/bold]")
    run = Run(plan, prefect, "undisturbed")
    run.until_begun()
    with screen.progress_of(run.target, plan.steps) as steps:
        run.until_completed(steps)
    return run


def disturbed(plan: Plan, prefect: Served) -> tuple[Run, list[Mark]]:
    """Train again, and kill a rank, a node and the flow's process at fixed steps."""
    screen.say("\n[bold]2. Disturbed[/bold]")
    run = Run(plan, prefect, "disturbed")
    run.until_begun()
    marks = []
    with screen.progress_of(run.target, plan.steps) as steps:
        faults: list[tuple[str, float, Callable[[], float]]] = [
            ("rank 3", 0.1, lambda: run.target.kill_rank(3)),
            ("node 1", 0.25, lambda: run.target.kill_node(1)),
        ]
        for number, (what, share, kill) in enumerate(faults, start=1):
            run.until_step(int(plan.steps * share), steps)
            marks.append(Mark(kill(), f"kill -9 {what}"))
            screen.say(f"  [red]kill -9[/red] {what} after step {steps.show()}")
            run.until_recovered(number)
            incident = run.target.incidents()[-1]
            took = (incident.first_step - marks[-1].at) * 1000
            screen.say(f"  [green]trains again[/green] {took:.0f} ms after the kill")
        run.until_step(int(plan.steps * 0.4), steps)
        marks += kill_flow(run, steps)
        run.until_completed(steps)
    return run, marks


def kill_flow(run: Run, steps: screen.Steps) -> list[Mark]:
    """Kill the process of the flow run; Prefect's hooks then start the flow run again."""
    pid = until(run.target.steered_by, "a flow process steers the job", _RUN_S)
    killed = Mark(time.time(), "kill -9 the flow")
    os.kill(pid, signal.SIGKILL)
    screen.say(f"  [red]kill -9[/red] the flow's process after step {steps.show()}")
    state = until(lambda: _noticed(run, steps), "Prefect has noticed", _RUN_S)
    screen.say(f"  Prefect calls the flow run {state}; the job goes on, at step {steps.show()}")
    new = until(lambda: _taken_up(run, pid, steps), "the job is adopted", _RUN_S)
    screen.say(f"  [green]taken up[/green] by the rerun, {new}, at step {steps.show()}")
    return [killed, Mark(time.time(), "adopted by its rerun")]


def _noticed(run: Run, steps: screen.Steps) -> str:
    """Return the state's name if Prefect has scheduled the run again, otherwise ""."""
    steps.show()
    state = run.prefect.state(run.flow_run_id)
    return state.name or "" if state.is_scheduled() or state.is_pending() else ""


def _taken_up(run: Run, before: int, steps: screen.Steps) -> str:
    """Return the new process that holds the job's lease; "" while there is none."""
    if steps.show() >= run.plan.steps:
        return "after the last step"  # on a fast machine
    now = run.target.steered_by()
    return f"process {now}" if now not in (0, before) else ""


def conclude(plan: Plan, calm: Run, rough: Run, marks: list[Mark]) -> bool:
    """Compare the runs, and report on screen and in files; return whether all checks pass."""
    until(lambda: not leftovers(), "the last process has ended", 20.0)
    timeline = place.OUTPUT / "timeline.png"
    records = read_records(rough.target.directory)
    draw(history_of(rough.target.job_id), records, timeline, marks=marks)
    verdict = judge(plan, calm.target, rough.target)
    found = rough.target.incidents()
    killed = [(mark.label.removeprefix("kill -9 "), mark.at) for mark in marks[: len(found)]]
    reruns = sum(mark.label == "kill -9 the flow" for mark in marks)
    report: dict[str, Any] = {
        "loss_identical": verdict.loss_identical,
        "steps": plan.steps,
        "samples_lost": verdict.samples_lost,
        "samples_repeated": verdict.samples_repeated,
        "incidents": [incident_entry(one, at) for one, (_, at) in zip(found, killed, strict=True)],
        "flow_reruns": reruns,
        "leftover_processes": len(verdict.leftover),
    }
    written = place.OUTPUT / place.REPORT
    written.write_text(json.dumps(report, indent=2) + "\n")
    shutil.copyfile(written, place.ROOT / place.REPORT)
    screen.show_incidents(found, killed)
    screen.show_verdict(verdict, reruns)
    screen.show_places(timeline, str(rough.flow_run_id))
    return (
        verdict.loss_identical
        and verdict.samples_lost == verdict.samples_repeated == len(verdict.leftover) == 0
        and [one.cause.kind.value for one in found] == ["process", "node-lost"]
        and rough.target.attempts() == reruns == 1
    )


def play(plan: Plan) -> bool:
    """Run the demo; return whether all checks pass."""
    begun = time.monotonic()
    screen.say("Starting a Prefect server, and serving the train flow")
    with server(), ending_jobs(), served() as prefect:
        calm = undisturbed(plan, prefect)
        rough, marks = disturbed(plan, prefect)
        good = conclude(plan, calm, rough, marks)
    screen.say(f"\nThe demo took {time.monotonic() - begun:.0f} s")
    return good
