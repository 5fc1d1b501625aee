"""Obey the state of the flow run while its job runs: a run that ends for good stops its job.

A thread reads the states of the flow run, and of its parents in the same process.
`rekindle.tasks.prefect_api.run_states` has the meaning of each state. The process then waits for
the final checkpoint of the job, and leaves the state of the run as it is.

| how the flow's function ends | the job |
|---|---|
| a state demands it | stops |
| a time limit of the flow, a parent or a task | stops |
| SIGTERM, and a state demands it | stops |
| SIGTERM otherwise, an error, an interrupt | continues |
"""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
from asyncio import CancelledError
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import ParamSpec, TypeVar, cast
from uuid import UUID

import httpx
from prefect import get_run_logger
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.context import SettingsContext, get_settings_context
from prefect.exceptions import Abort, ObjectNotFound, Pause, PrefectException, TerminationSignal
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES
from prefect.states import Cancelled

from rekindle.blocks.job import TrainingJob
from rekindle.errors import JobError, RekindleError
from rekindle.reporting.event_text import capital
from rekindle.tasks import job_access as jobs
from rekindle.tasks.hooks.cancellation import order_stop, stop_for
from rekindle.tasks.identity import is_launched, recorded_job
from rekindle.tasks.prefect_api import Log
from rekindle.tasks.prefect_api.run_states import (
    SKIPPED,
    AnyState,
    demand,
    is_suspended,
    is_writable,
    replace,
    superseded_by,
)

P = ParamSpec("P")
R = TypeVar("R")

_LOOK_S = 2.0  # pause between two readings of the states
_CLOSE_S = 10.0  # limit for a reading that has begun
_UNREACHABLE = (httpx.HTTPError, PrefectException, OSError)  # another reading may succeed


@dataclass(frozen=True, slots=True)
class Verdict:
    """The flow run whose state ends the job: this run, or a parent. state: None if deleted."""

    run: UUID
    state: AnyState | None
    by: str


class OverruledError(RekindleError):
    """The job ends, because the state of its flow run, or of a parent, demands it."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(f"{verdict.by} ends the job")
        self.verdict = verdict


class SupersededError(RekindleError):
    """This flow run does not train, because a newer run of its deployment is due."""


class RunWatch:
    """Reads the states, and stops the job once one of them demands it. Use it as a context.

    Leaving it raises OverruledError if the job was stopped, unless the process ends anyway.
    """

    def __init__(self, flow_run: FlowRun, log: Log) -> None:
        self._flow_run = flow_run
        self._log = log
        self._lineage: Sequence[UUID] = ()
        self._verdict: Verdict | None = None
        self._stopped_attempt = 0
        self._closed = threading.Event()
        # A daemon thread: a server that hangs must not keep the flow's process from ending.
        self._thread = threading.Thread(
            target=self._run, args=(get_settings_context(),), name="rekindle-run-watch", daemon=True
        )

    def __enter__(self) -> RunWatch:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closed.set()
        self._thread.join(_CLOSE_S)
        if error is None or isinstance(error, Exception):
            if self._verdict is not None:
                raise OverruledError(self._verdict) from error
            return
        by = self._demanded_by_end(error)
        if by:
            # The process ends. The job writes its final checkpoint without it.
            with contextlib.suppress(RekindleError, ValueError):  # it has logged them
                stop_for(self._flow_run, by, self._log)

    def check(self) -> None:
        """Raise OverruledError if a state demands the end of the job."""
        if self._verdict is not None:
            raise OverruledError(self._verdict)

    def wait(self, seconds: float) -> None:
        """Wait. Raises OverruledError as check() does, at most _LOOK_S after the state came."""
        self._closed.wait(seconds)
        self.check()

    def _demanded_by_end(self, error: BaseException) -> str:
        """Return what of the run demands the end of the job, if this error ends the process."""
        own = f"flow run {self._flow_run.name} ({self._flow_run.id})"
        if isinstance(error, Pause):
            return f"the suspension of {own}"
        if isinstance(error, CancelledError) and _is_time_limit(self._flow_run):
            return f"the time limit of {own}, or of its caller"
        if isinstance(error, TerminationSignal):
            with contextlib.suppress(*_UNREACHABLE), _client(get_settings_context()) as client:
                self._look(client)
        return self._verdict.by if self._verdict is not None else ""

    def _run(self, settings: SettingsContext) -> None:
        while not self._closed.wait(_LOOK_S):
            try:
                with _client(settings) as client:
                    while self._verdict is None and not self._closed.wait(_LOOK_S):
                        self._look(client)
                if self._verdict is not None and not self._closed.is_set():
                    self._stop(self._verdict)
            except (*_UNREACHABLE, RekindleError, ValueError) as error:
                self._log.debug("The state of this flow run: %r", error)

    def _look(self, client: SyncPrefectClient) -> None:
        self._lineage = self._lineage or lineage(client, self._flow_run)
        self._verdict = verdict_of(client, self._lineage)

    def _stop(self, verdict: Verdict) -> None:
        """Stop each attempt once. The follower in the main thread replaces a coordinator."""
        job_id = recorded_job(self._flow_run)
        endpoint = jobs.coordinator_of(job_id)
        if endpoint is not None and endpoint.attempt != self._stopped_attempt:
            order_stop(job_id, self._flow_run, endpoint, by=verdict.by, log=self._log)
            self._stopped_attempt = endpoint.attempt


def lineage(client: SyncPrefectClient, flow_run: FlowRun) -> list[UUID]:
    """Return the ids of a flow run and of its parents in the same process, from the inside out."""
    found = [flow_run.id]
    # A run of a deployment has a process of its own. A parent that was deleted has no task run.
    with _missing(client):
        while flow_run.deployment_id is None and flow_run.parent_task_run_id is not None:
            parent = client.read_task_run(flow_run.parent_task_run_id).flow_run_id
            if parent is None:
                break
            found.append(parent)
            flow_run = client.read_flow_run(parent)
    return found


def verdict_of(client: SyncPrefectClient, runs: Sequence[UUID]) -> Verdict | None:
    """Return the first of these runs whose state ends the job. The first run has the job.

    A parent that has completed without waiting for the run does not end it.
    """
    for run in runs:
        name, state = "", None
        with _missing(client):
            found = client.read_flow_run(run)
            name, state = found.name, found.state
            if state is None or (run != runs[0] and state.is_completed()):
                continue
        why = demand(state)
        if why:
            return Verdict(run, state, f"{why} of flow run {name or run} ({run})")
    return None


@contextlib.contextmanager
def _missing(client: SyncPrefectClient) -> Iterator[None]:
    """Suppress the error for a run that was deleted.

    Raises httpx.HTTPStatusError: a proxy without a server has given the answer.
    """
    try:
        yield
    except ObjectNotFound:
        client.hello().raise_for_status()


def refuse_superseded(job: TrainingJob, job_id: str) -> None:
    """Raise SupersededError if the job wants only the newest run, and this one has not launched."""
    if not job.only_newest or is_launched(job_id):
        return
    with get_client(sync_client=True) as client:
        newer = superseded_by(client, jobs.this_flow_run(job_id))
    if newer is not None:
        raise SupersededError(f"flow run {newer.name} ({newer.id}) is newer, and trains")


def obeying(run: Callable[P, R]) -> Callable[P, R]:
    """Make the function of a flow keep a state that ends its run. Use it below `@flow`.

    Prefect's engine would replace the state with the result of the function.
    """

    @functools.wraps(run)
    def obey(*args: P.args, **kwargs: P.kwargs) -> R:
        error: Exception | None = None
        try:
            result = run(*args, **kwargs)
        except OverruledError as overruled:
            return cast("R", _leave(overruled.verdict))
        except SupersededError as superseded:
            return cast("R", Cancelled(name=SKIPPED, message=capital(str(superseded))))
        except Exception as raised:
            error = raised
        flow_run = jobs.this_flow_run(run.__name__)
        verdict = None
        with contextlib.suppress(*_UNREACHABLE), get_client(sync_client=True) as client:
            verdict = verdict_of(client, lineage(client, flow_run))
        if verdict is not None:
            if error is not None:
                get_run_logger().warning("%s", error)
            return cast("R", _leave(verdict))
        if error is not None:
            raise error
        return result

    return obey


def _leave(verdict: Verdict) -> AnyState:
    """End the flow's function without a change to the state that ended the job.

    The engine sets the returned state, which is the same one. It sets none after an exception of
    Prefect, which also ends the parents in this process. Raises JobError: the run was deleted.
    """
    flow_run, state = jobs.this_flow_run("of a run that has ended"), verdict.state
    get_run_logger().info("%s ended the job; the run keeps its state", verdict.by)
    if state is not None and is_suspended(state):
        raise Pause(state=state)
    own = verdict.run == flow_run.id
    ended: AnyState = Cancelled(message=f"{verdict.by} has ended this run")
    if own and state is not None and state.is_cancelling():
        state = ended
        if flow_run.deployment_id is not None:  # its runner may be gone
            _write(flow_run.id, ended, State.is_cancelling)
    if not own:
        _write(flow_run.id, ended, is_writable)
    if not own or flow_run.deployment_id is not None:
        raise Abort(verdict.by)
    if state is None:
        raise JobError(f"{verdict.by} has ended the job")
    # Prefect would count a state of a run as one of several results.
    return State(type=state.type, name=state.name, message=state.message)


def _write(flow_run_id: UUID, state: AnyState, allowed: Callable[[AnyState], bool]) -> None:
    with contextlib.suppress(*_UNREACHABLE), get_client(sync_client=True) as client:
        replace(client, flow_run_id, state, allowed=allowed)


@contextlib.contextmanager
def _client(settings: SettingsContext) -> Iterator[SyncPrefectClient]:
    """Connect to Prefect; a request is not repeated, because another reading follows."""
    patient = settings.settings.copy_with_update(updates={PREFECT_CLIENT_MAX_RETRIES: 0})
    with (
        SettingsContext(profile=settings.profile, settings=patient),
        get_client(sync_client=True) as client,
    ):
        yield client


def _is_time_limit(flow_run: FlowRun) -> bool:
    """Return whether Prefect has cancelled this thread because of a time limit.

    It also does that if the run loses its slot of a concurrency limit, which is an accident. In the
    main thread an alarm has rung at a time limit.
    """
    if threading.current_thread() is threading.main_thread():
        handled = signal.getsignal(signal.SIGALRM) not in (signal.SIG_DFL, signal.SIG_IGN)
        return handled and signal.getitimer(signal.ITIMER_REAL)[0] == 0
    state = flow_run.state
    return state is None or state.state_details.deployment_concurrency_lease_id is None
