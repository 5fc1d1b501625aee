"""Follow the job until it ends, and report its events to Prefect: step 2 of the train flow.

The stream of the job's events never waits for Prefect. `rekindle.tasks.prefect_api.notifier` sends
states, progress and incidents from a separate thread, and `restore` runs as a submitted task.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from pathlib import Path
from uuid import UUID

import msgspec
from prefect import get_run_logger, runtime, task
from prefect.cache_policies import NO_CACHE
from prefect.context import TaskRunContext
from prefect.futures import PrefectFuture

from rekindle import names
from rekindle.engines.base import MOST_REVIVALS
from rekindle.engines.follower import JobFollower
from rekindle.errors import JobError, LeaseHeldError
from rekindle.recovery.faults.fault import Fault
from rekindle.recovery.journal import attempts
from rekindle.recovery.journal.journal import (
    Answered,
    AnyEvent,
    CheckpointFailed,
    Decided,
    Ended,
    FaultSeen,
    FirstStep,
    Formed,
    Incident,
    IncidentFold,
    Isolated,
    Moved,
    MoveEnded,
    MoveRequested,
    NodeChecked,
    Progress,
    RanksStarted,
    Restored,
    StepSkipped,
)
from rekindle.reporting.event_text import (
    incident_row,
    level,
    resumed_text,
    resumes,
    sentence,
    skipped_checkpoints,
)
from rekindle.reporting.run_state import AWAITING_APPROVAL, RUNNING, StateFold
from rekindle.supervised import reported_threads
from rekindle.tasks import job_access as jobs
from rekindle.tasks.output import Output
from rekindle.tasks.prefect_api import Log
from rekindle.tasks.prefect_api.approval_form import ApprovalQuestion
from rekindle.tasks.prefect_api.client_metrics import METRICS, JobNumbers
from rekindle.tasks.prefect_api.notifier import PrefectNotifier

_STEPS: dict[type[AnyEvent], tuple[str, ...]] = {
    Answered: ("answered",),
    Isolated: ("isolated",),
    MoveRequested: ("detected",),
    Moved: ("closed",),
    MoveEnded: ("closed",),
    Formed: ("regrouped",),
    Restored: ("restored",),
    FirstStep: ("closed",),
}


@task(name="supervise", cache_policy=NO_CACHE)
def supervise(job_id: str, *, adopted: bool) -> Ended:
    """Follow the job to its end under the lease, and start the agents that it needs.

    Another coordinator replaces a failed one. Raises LeaseHeldError: another process steers the
    job, and this one changes nothing. Raises JobError: no coordinator stays alive.
    """
    log = get_run_logger()
    engine = jobs.engine_of(job_id)
    endpoint = engine.alive()
    history = engine.history()  # read last: it has the end of a job whose coordinator has exited
    if endpoint is None and attempts.end_of(history) is not None:
        return _end(history, job_id)
    directory = jobs.directory_of(job_id)
    logs = Path(directory.spec().log_directory)
    with (
        reported_threads(directory.path, "flow", log.error),
        _notices(job_id) as notices,
        Output(directory.path, logs, _restarts(history), log, adopted=adopted) as output,
        contextlib.ExitStack() as closing,
    ):
        supervisor = Supervisor(job_id, history, notices=notices, output=output, log=log)
        closing.callback(supervisor.close)
        follower = JobFollower(
            engine,
            holder=holder_name(),
            see=supervisor.take,
            say=log.warning,
        )
        closing.enter_context(METRICS.shows(job_id, supervisor.numbers))
        follower.learn(history)  # a signal may have killed the process that received these
        if endpoint is None:  # it failed just now
            endpoint = follower.next_coordinator()
        closing.enter_context(engine.watch(engine.client(endpoint).report, log.warning))

        def held(first: bool) -> None:
            if first and adopted:
                notices.adopted(_flow_run_count())
                follower.bring(attempts.nodes_missing(supervisor.history))
            supervisor.name_state()

        follower.follow(endpoint, history[-1].seq if history else 0, held)
    return _end(engine.history(), job_id)


def _restarts(history: list[AnyEvent]) -> int:
    """Return the number of restarts of all ranks so far, which is that of their log folder."""
    numbers = [
        event.restart for event in attempts.newest(history) if isinstance(event, RanksStarted)
    ]
    return numbers[-1] if numbers else 0


def _flow_run_count() -> int:
    """Return how often the flow run has run, with this process, as Prefect counts it for tasks."""
    context = TaskRunContext.get()
    assert context is not None  # only a task calls this
    return context.task_run.flow_run_run_count


def _notices(job_id: str) -> PrefectNotifier:
    run = jobs.this_flow_run(job_id)
    return PrefectNotifier(
        job_id=job_id,
        flow_run_id=run.id,
        flow_run_name=run.name,
        last_sent_file=jobs.directory_of(job_id).path / names.NOTICES_FILE,
        log=get_run_logger(),
    )


def holder_name() -> str:
    """Return the name of this process in the lease of the job."""
    run = f"flow run {runtime.flow_run.name} ({runtime.flow_run.id})"
    return f"{run}, process {os.getpid()} on {socket.gethostname()}"


def is_this_run(error: LeaseHeldError) -> bool:
    """Return whether the process that has the lease runs the same flow run as this one."""
    return f"({runtime.flow_run.id})" in str(error)


class Supervisor:
    """The state of the job for this flow run, and its reports to Prefect.

    history: the journal so far. All of it goes to the notifier, because the process that should
    have reported it may have been killed.
    """

    def __init__(
        self,
        job_id: str,
        history: list[AnyEvent],
        *,
        notices: PrefectNotifier,
        output: Output,
        log: Log,
    ) -> None:
        self.history: list[AnyEvent] = []
        self._incidents = IncidentFold()
        self.numbers = JobNumbers(self._incidents)
        self._states = StateFold()
        self._job_id = job_id
        self._notices = notices
        self._output = output
        self._log = log
        self._state = RUNNING
        self._question: ApprovalQuestion | None = None
        self._progress: Progress | None = None
        self._formed = False  # in this process
        self._restore: PrefectFuture[str] | None = None
        for event in history:
            self._remember(event)

    def close(self) -> None:
        """Stop waiting for an answer, and wait for the submitted task."""
        self._close_question()
        if self._restore is not None:
            self._restore.wait()

    def take(self, event: AnyEvent) -> None:
        """Act on a new event of the job."""
        if isinstance(event, Progress):
            self._progress = event
            self.numbers.add(event)
            self._notices.progress(event)
            return
        if isinstance(event, Ended) and self._progress is not None:
            last = msgspec.structs.replace(self._progress, finished=event.finished)
            self._notices.progress(last)
        self._log.log(max(level(event), logging.INFO), "%s", sentence(event))
        self._remember(event)
        self.name_state()
        if isinstance(event, FaultSeen) and not event.explained:
            self._show_output(event)
        if isinstance(event, Formed) and not self._formed:
            self._formed = True
            if resumes(attempts.newest(self.history)):
                self._restore = restore.submit([*self.history])

    def _show_output(self, event: FaultSeen) -> None:
        """Log the last output of a lost agent, and of all ranks when an incident begins."""
        fault = event.fault
        begins = len(self._incidents.by_number[event.incident].faults) == 1
        agent = fault.node if fault.rank < 0 <= fault.node else None
        self._output.show(agent=agent, ranks=begins)

    def _remember(self, event: AnyEvent) -> None:
        if isinstance(event, RanksStarted):
            self._output.restarted(event.restart)
        self.history.append(event)
        self._states.add(event)
        self.numbers.add(event)
        incident = self._incidents.add(event)
        if incident is not None:
            for step in incident_steps(event, incident):
                payload = {**incident_row(incident), "message": sentence(event)}
                self._notices.incident(step, event, payload)

    def name_state(self) -> None:
        """Send the job's state to Prefect if it has changed."""
        name, message = self._states.shown()
        if name == self._state:
            return
        self._state = name
        self._close_question()
        if name == AWAITING_APPROVAL:
            self._question = self._ask()
            message = self._question.text()
        self._notices.state(name, message, self._question)

    def _ask(self) -> ApprovalQuestion:
        """Open the question and wait for a person's answer. The notifier attaches the form."""
        waiting = attempts.waits_for_approval(self.history)
        assert waiting is not None
        run = UUID(runtime.flow_run.id)
        question = ApprovalQuestion(waiting, job_id=self._job_id, flow_run_id=run, log=self._log)
        question.open()
        return question

    def _close_question(self) -> None:
        if self._question is not None:
            self._question.close()
            self._question = None


def incident_steps(event: AnyEvent, incident: Incident) -> tuple[str, ...]:
    """Return the steps of the incident that this event, its newest, completes."""
    match event:
        case FaultSeen():
            return ("detected",) if not event.explained and len(incident.faults) == 1 else ()
        case CheckpointFailed() | StepSkipped() | NodeChecked(fault=Fault()):
            return ("detected", "closed")
        case Decided(approval=asked, outweighed=False):
            return ("decided", "awaiting-approval") if asked else ("decided",)
    return _STEPS.get(type(event), ())


def _end(history: list[AnyEvent], job_id: str) -> Ended:
    """Return how the job ended. Raises JobError: its journal has no end."""
    end = attempts.end_of(history)
    if end is None:
        raise JobError(
            f"the coordinator of job {job_id} ended before the job did, and so did "
            f"{MOST_REVIVALS} coordinators that replaced it; see coordinator.log in the job's "
            "directory"
        )
    return end


@task(name="restore", cache_policy=NO_CACHE)
def restore(history: list[AnyEvent]) -> str:
    """Log the checkpoint from which the newest attempt resumes, and the skipped ones."""
    log = get_run_logger()
    for skipped in skipped_checkpoints(attempts.newest(history)):
        log.warning("The restart skips checkpoint %s: %s", skipped.path, skipped.reason)
    text = resumed_text(history)
    log.info("%s", text)
    return text
