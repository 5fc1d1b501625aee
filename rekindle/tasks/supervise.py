"""Step 2 of the train flow: steer the job until it ends, and tell what happens to it.

The stream of the job's events is never kept waiting for Prefect: what concerns Prefect goes through
`rekindle.tasks.prefect_api.notifier`.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
from typing import Any
from uuid import UUID

import msgspec
from prefect import get_run_logger, runtime, task
from prefect.cache_policies import NO_CACHE
from prefect.context import FlowRunContext

from rekindle import names
from rekindle.engines.base import MOST_REVIVALS, Engine
from rekindle.engines.client import EventStream
from rekindle.errors import JobError, LeaseHeldError, UsageError
from rekindle.job.spec import Endpoint
from rekindle.profiling.findings import Slow
from rekindle.recovery.faults.fault import Fault
from rekindle.recovery.faults.stragglers import Slowed
from rekindle.recovery.journal import attempts, journal
from rekindle.recovery.journal.journal import (
    Answered,
    AnyEvent,
    CheckpointFailed,
    CheckpointLeftOut,
    CheckpointSkipped,
    CheckpointsPruned,
    Decided,
    Ended,
    FaultSeen,
    FirstStep,
    Formed,
    Isolated,
    NodeChecked,
    NodeWanted,
    Progress,
    Restored,
)
from rekindle.reporting.event_text import incident_row, sentence
from rekindle.reporting.run_state import AWAITING_APPROVAL, RUNNING, shown
from rekindle.tasks import job_access as jobs
from rekindle.tasks.prefect_api.approval_form import Question
from rekindle.tasks.prefect_api.log import Log
from rekindle.tasks.prefect_api.notifier import Notices
from rekindle.tasks.restore import restore, resumes


@task(name="supervise", cache_policy=NO_CACHE)
def supervise(job_id: str, *, adopted: bool) -> Ended:
    """Follow the job to its end under the lease, and bring the nodes that it wants.

    A coordinator that dies is replaced by another one. Raises LeaseHeldError: another process
    steers the job, which is left alone. Raises JobError: no coordinator stays alive.
    """
    log = get_run_logger()
    history = jobs.history_of(job_id)
    endpoint = jobs.coordinator_of(job_id)
    if endpoint is None and attempts.end_of(jobs.history_of(job_id)) is not None:
        return _end(job_id)
    engine = jobs.engine_of(job_id)
    if endpoint is None:  # it died just now
        endpoint = _next_coordinator(job_id, engine, log)
    with _notices(job_id) as notices, contextlib.ExitStack() as closing:
        supervisor = Supervisor(job_id, history, engine=engine, notices=notices, log=log)
        closing.callback(supervisor.close)
        supervisor.learn_history()
        closing.enter_context(engine.watch(jobs.client_of(job_id, endpoint).report, log.warning))
        for revivals in itertools.count():
            try:
                _steer(supervisor, endpoint, job_id, adopting=adopted and not revivals)
                break
            except LeaseHeldError:
                raise
            except JobError as error:
                log.warning("The job's events broke off: %s", error)
                if attempts.end_of(jobs.history_of(job_id)) or revivals == MOST_REVIVALS:
                    break
            endpoint = _next_coordinator(job_id, engine, log)
    return _end(job_id)


def _next_coordinator(job_id: str, engine: Engine, log: Log) -> Endpoint:
    """Put another coordinator in the place of one that died; one that was only slow goes on.

    Raises JobError: it neither answers nor ends.
    """
    try:
        endpoint = engine.revive()
    except UsageError as error:  # it has its port still
        slow = jobs.coordinator_of(job_id)
        if slow is None:
            raise JobError(f"the coordinator of job {job_id} does not answer: {error}") from error
        return slow
    log.warning("The coordinator of job %s died; another one takes its place", job_id)
    return endpoint


def _steer(supervisor: Supervisor, endpoint: Endpoint, job_id: str, *, adopting: bool) -> None:
    """Hold the lease and follow the job to its end. Raises JobError: its coordinator died."""
    client = jobs.client_of(job_id, endpoint)
    since = supervisor.history[-1].seq if supervisor.history else 0
    with client.steer(holder=holder_name(), since=since) as events:
        if adopting:
            supervisor.adopt()
        supervisor.name_state()
        _follow(supervisor, events, job_id)


def _notices(job_id: str) -> Notices:
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        raise JobError(f"job {job_id} can be supervised inside a flow run only")
    run = context.flow_run
    return Notices(
        job_id=job_id,
        flow_run_id=run.id,
        flow_run_name=run.name,
        told=jobs.directory_of(job_id).path / TOLD_FILE,
        log=get_run_logger(),
    )


def holder_name() -> str:
    """Return how this process is named to others that would steer the job."""
    run = f"flow run {runtime.flow_run.name} ({runtime.flow_run.id})"
    return f"{run}, process {os.getpid()} on {socket.gethostname()}"


class Supervisor:
    """What this flow run knows of its job and does about it.

    history: the ledger so far; all of it is told to Prefect, for the process that should have told
    it may have been killed.
    """

    def __init__(
        self,
        job_id: str,
        history: list[AnyEvent],
        *,
        engine: Engine,
        notices: Notices,
        log: Log,
    ) -> None:
        self.history: list[AnyEvent] = []
        self._job_id = job_id
        self._engine = engine
        self._notices = notices
        self._log = log
        self._state = RUNNING
        self._question: Question | None = None
        self._progress: Progress | None = None
        for event in history:
            self._remember(event)

    def close(self) -> None:
        """Wait for no answer any more."""
        if self._question is not None:
            self._question.close()
            self._question = None

    def adopt(self) -> None:
        """Take the place of a flow process that was killed, once the lease is held."""
        self._notices.survivor(UUID(runtime.task_run.id))
        self.bring(attempts.nodes_missing(self.history))  # it may not have brought all

    def learn_history(self) -> None:
        """Note what happened before: whoever heard it may have been killed before it was noted."""
        for event in self.history:
            self._learn(event)

    def _learn(self, event: AnyEvent) -> None:
        """Note what it says of hosts; where that cannot be written, training goes on."""
        try:
            self._engine.learn(event)
        except JobError as error:
            self._log.error("%s", error)

    def take(self, event: AnyEvent) -> None:
        """Act on a new event of the job."""
        if isinstance(event, Progress):
            self._progress = event
            self._notices.progress(event)
            return
        self._learn(event)
        if isinstance(event, NodeWanted):
            self.bring([event.node])
        if isinstance(event, Ended) and self._progress is not None:
            last = msgspec.structs.replace(self._progress, finished=event.finished)
            self._notices.progress(last)
        self._log.log(_level(event), "%s", sentence(event))
        self._remember(event)
        self.name_state()

    def bring(self, nodes: list[int]) -> None:
        """Start an agent for each of these nodes, or spares."""
        for node in nodes:
            what = "A spare" if node == names.SPARE else f"Node {node}"
            self._log.warning("%s is missing; a new agent is started for it", what)
            try:
                self._engine.replace(node)
            except JobError as error:  # the job goes on without it, or gives up in its own time
                self._log.warning("%s cannot be replaced: %s", what, error)

    def _remember(self, event: AnyEvent) -> None:
        self.history.append(event)
        for step in incident_steps(event, self.history):
            self._notices.incident(step, event, self._payload(event))

    def _payload(self, event: AnyEvent) -> dict[str, Any]:
        number = getattr(event, "incident", 0)
        incident = next(i for i in journal.incidents(self.history) if i.number == number)
        return {**incident_row(incident), "message": sentence(event)}

    def name_state(self) -> None:
        """Have Prefect show where the job is, if that is news."""
        name, message = shown(self.history)
        if name == self._state:
            return
        self._state = name
        self.close()
        if name == AWAITING_APPROVAL:
            self._question = self._ask()
        self._notices.state(name, message, self._question)

    def _ask(self) -> Question:
        """Look for a person's answer from now on; the form itself is a notice like others."""
        waiting = journal.waits_for_approval(self.history)
        assert waiting is not None
        run = UUID(runtime.flow_run.id)
        question = Question(waiting, job_id=self._job_id, flow_run_id=run, log=self._log)
        question.open()
        return question


def incident_steps(event: AnyEvent, history: list[AnyEvent]) -> tuple[str, ...]:
    """Return the steps of an incident that this event, the last of `history`, completes."""
    match event:
        case FaultSeen():
            before = (e for e in history[:-1] if isinstance(e, FaultSeen))
            first = all(e.incident != event.incident for e in before)
            return ("detected",) if first else ()
        case CheckpointFailed() | NodeChecked(fault=Fault()):
            return ("detected", "closed")
        case Decided(approval=asked, lighter=False):
            return ("decided", "awaiting-approval") if asked else ("decided",)
        case Answered():
            return ("answered",)
        case Isolated():
            return ("isolated",)
        case Formed(incident=number) | Restored(incident=number) | FirstStep(incident=number):
            return (_STEPS[type(event)],) if number else ()
        case _:
            return ()


TOLD_FILE = "told"
_STEPS = {Formed: "regrouped", Restored: "restored", FirstStep: "closed"}


def _level(event: AnyEvent) -> int:
    loud = isinstance(event, FaultSeen | CheckpointFailed | CheckpointSkipped | CheckpointLeftOut)
    amiss = isinstance(event, CheckpointsPruned) and bool(event.error)
    slow = isinstance(event, Slowed) and event.finding.kind is not Slow.UNEVEN
    return logging.WARNING if loud or amiss or slow else logging.INFO


def _follow(supervisor: Supervisor, events: EventStream, job_id: str) -> None:
    """Handle the job's events until it has ended. Raises JobError: its coordinator died."""
    formed = False
    for event in events:
        supervisor.take(event)
        if isinstance(event, Formed) and not formed:
            formed = True
            if resumes(attempts.newest(supervisor.history)):
                restore(job_id)


def _end(job_id: str) -> Ended:
    """Return how the job ended. Raises JobError: its ledger does not say."""
    end = attempts.end_of(jobs.history_of(job_id))
    if end is None:
        raise JobError(
            f"the coordinator of job {job_id} died before the job ended, and so did "
            f"{MOST_REVIVALS} that took its place; see coordinator.log in the job's directory"
        )
    return end
