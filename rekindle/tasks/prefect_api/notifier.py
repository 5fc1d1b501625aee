"""Report a job's events to Prefect from a separate thread; recovery never waits for Prefect.

While the server is down, the notifier keeps all notices, and sends them when the server answers.
The budgets of a job limit their number. Only states and progress that are no longer true are left
out.
Each new state raises the flow run's `run_count`. So that is not the number of its reruns.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import uuid
from collections import deque
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterKey,
    FlowRunFilter,
    FlowRunFilterId,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import Artifact, State, StateType
from prefect.context import SettingsContext, get_settings_context
from prefect.events import emit_event
from prefect.exceptions import PrefectException
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES
from prefect.states import Crashed, Running

from rekindle.job.spec import replace_file
from rekindle.recovery.journal.journal import AnyEvent, Progress
from rekindle.reporting.event_text import percent, progress_in_words
from rekindle.tasks.prefect_api import Log
from rekindle.tasks.prefect_api.approval_form import ApprovalQuestion
from rekindle.tasks.prefect_api.run_states import replace

_PROGRESS_PAUSE_S = 60.0  # Prefect stores an event for each; an incident shows progress at once
_RETRY_PAUSE_S = 1.0
_FLUSH_S = 10.0
_ARRIVES_S = 5.0  # Prefect's own queue of events is lost with the process


@dataclass(frozen=True, slots=True)
class _StateChange:
    name: str
    message: str
    question: ApprovalQuestion | None = None


@dataclass(frozen=True, slots=True)
class _IncidentStep:
    step: str
    event: AnyEvent
    payload: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Adoption:
    flow_run_count: int


_Notice = _StateChange | _IncidentStep | _Adoption


class PrefectNotifier:
    """Sends one flow run's notices about its job to Prefect; use it as a context manager.

    last_sent_file: a file with the number of the last event of the job that Prefect has.
    Automations act again on each repeated event.
    """

    def __init__(
        self,
        *,
        job_id: str,
        flow_run_id: uuid.UUID,
        flow_run_name: str,
        last_sent_file: Path,
        log: Log,
    ) -> None:
        self._job_id = job_id
        self._flow_run_id = flow_run_id
        self._flow_run_name = flow_run_name
        self._last_sent_file = last_sent_file
        self._emitted: deque[tuple[float, int]] = deque()  # time of sending, and the event's number
        self._log = log
        self._file_fails = False  # the warning about the file is in the log
        self._last_sent = self._read_last_sent()
        self._queue: deque[_Notice] = deque()
        self._progress: Progress | None = None
        self._progress_sent_at = -math.inf
        self._telling: _Notice | Progress | None = None
        self._artifact: uuid.UUID | None = None
        self._failing = False
        self._refusing = False
        self._closing = False
        self._changed = threading.Condition()
        # A daemon thread: a server that hangs must not keep the flow's process from ending.
        self._thread = threading.Thread(
            target=self._run, args=(get_settings_context(),), name="rekindle-notices", daemon=True
        )

    def __enter__(self) -> PrefectNotifier:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Send the remaining notices, if Prefect takes them within _FLUSH_S seconds."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(_FLUSH_S)
        if not self._thread.is_alive():
            self._save_last_sent(time.monotonic())
        if self._queue:
            self._log.warning("Prefect did not receive %d notices of this job", len(self._queue))

    def progress(self, event: Progress) -> None:
        """Show the newest progress. A script without a number of steps has none."""
        if not event.total:
            return
        with self._changed:
            self._progress = event
            self._changed.notify()

    def state(self, name: str, message: str, question: ApprovalQuestion | None = None) -> None:
        """Set the name of the flow run's state; its type is Running, or Paused with a question."""
        self._put(_StateChange(name, message, question))

    def incident(self, step: str, event: AnyEvent, payload: dict[str, Any]) -> None:
        """Emit a Prefect event for one step of an incident, unless Prefect has it already."""
        if event.seq > self._last_sent:
            self._progress_sent_at = -math.inf
            self._put(_IncidentStep(step, event, payload))

    def adopted(self, flow_run_count: int) -> None:
        """Close the task runs that earlier processes of the flow run have left open.

        flow_run_count: how often the flow run has run, with this process.
        """
        self._put(_Adoption(flow_run_count))

    def _put(self, notice: _Notice) -> None:
        with self._changed:
            self._queue.append(notice)
            self._changed.notify()

    def _run(self, settings: SettingsContext) -> None:
        # Outside the flow run's context, Prefect sends no further requests when it emits an event.
        # This loop does the retries, not the client.
        patient = settings.settings.copy_with_update(updates={PREFECT_CLIENT_MAX_RETRIES: 0})
        with SettingsContext(profile=settings.profile, settings=patient):
            while self._wait():
                try:
                    with get_client(sync_client=True) as client:
                        self._tell_all(client)
                except Exception as error:  # also of Prefect's client, which may start a server
                    self._failed(error)
                    if self._closing:
                        return

    def _tell_all(self, client: SyncPrefectClient) -> None:
        """Send the notice that waits, and all others until no more follow.

        Raises httpx.HTTPError, PrefectException, OSError: a repetition may succeed.
        """
        more = True
        while more:
            try:
                self._tell(client)
            except (httpx.HTTPError, PrefectException) as error:
                if _may_pass(error):
                    raise
                self._refused(error)
            except OSError:
                raise
            except Exception:  # the other notices must not wait for this one
                self._log.exception("Rekindle leaves out a notice to Prefect, because of a bug")
                self._take_off()
            more = self._wait()

    def _wait(self) -> bool:
        """Wait until there is a notice to send; False: all are sent and no more follow."""
        with self._changed:
            if self._failing and not self._closing:
                self._changed.wait_for(lambda: self._closing, _RETRY_PAUSE_S)
            while not self._queue:
                pause = self._progress_sent_at + _PROGRESS_PAUSE_S - time.monotonic()
                if self._progress is not None and (pause <= 0 or self._closing):
                    return True
                if self._closing:
                    return False
                self._changed.wait(pause if self._progress is not None else None)
            return True

    def _tell(self, client: SyncPrefectClient) -> None:
        """Send the first notice, or else the progress; it stays queued after an error."""
        with self._changed:
            self._telling = self._queue[0] if self._queue else self._progress
        if isinstance(self._telling, Progress):
            self._show(client, self._telling)
            self._progress_sent_at = time.monotonic()
        elif self._telling is not None:
            self._deliver(client, self._telling)
        self._save_last_sent(time.monotonic() - _ARRIVES_S)
        self._take_off()
        if self._failing:
            self._failing = False
            self._log.info("Prefect's API answers again")

    def _save_last_sent(self, until: float) -> None:
        """Save the number of the last event that was emitted until then."""
        number = 0
        while self._emitted and self._emitted[0][0] <= until:
            number = self._emitted.popleft()[1]
        if number:
            try:
                replace_file(self._last_sent_file, str(number).encode())
            except OSError as error:  # the number of a later event replaces this one
                self._warn_of_file(error)

    def _read_last_sent(self) -> int:
        """Return the number in the file; 0: the file is absent, or its writer was killed."""
        try:
            return int(self._last_sent_file.read_text())
        except (FileNotFoundError, ValueError):
            return 0
        except OSError as error:
            self._warn_of_file(error)
            return 0

    def _warn_of_file(self, error: OSError) -> None:
        if not self._file_fails:
            self._file_fails = True
            self._log.warning(
                "A rerun of the flow may report incidents to Prefect again, because a file fails: "
                "%s",
                error,
            )

    def _take_off(self) -> None:
        """Remove the sent notice, unless a newer one has replaced it."""
        with self._changed:
            if self._progress is self._telling:
                self._progress = None
            elif self._queue and self._queue[0] is self._telling:
                self._queue.popleft()

    def _deliver(self, client: SyncPrefectClient, notice: _Notice) -> None:
        match notice:
            case _StateChange():
                self._set_state(client, notice)
            case _IncidentStep():
                self._emit(client, notice)
                self._emitted.append((time.monotonic(), notice.event.seq))
            case _Adoption():
                self._close_earlier(client, notice.flow_run_count)

    def _refused(self, error: Exception) -> None:
        # Only the first refusal is a warning: Prefect refuses all notices of a deleted flow run.
        level = logging.DEBUG if self._refusing else logging.WARNING
        self._log.log(level, "Prefect refuses a notice of this job: %r", error)
        self._refusing = True
        self._artifact = None  # it may have been deleted
        self._take_off()

    def _failed(self, error: Exception) -> None:
        if not self._failing:
            self._log.warning("Prefect's API fails; the job continues without it: %r", error)
        with self._changed:
            self._failing = True
            # If Prefect missed several states, only the last one matters.
            states = [notice for notice in self._queue if isinstance(notice, _StateChange)]
            for notice in states[:-1]:
                self._queue.remove(notice)

    def _set_state(self, client: SyncPrefectClient, change: _StateChange) -> None:
        state: State[Any] = Running(name=change.name, message=change.message)
        if change.question is not None:
            change.question.put()  # before the pause: a person cannot fill in an absent form
            state = change.question.state(change.name, change.message)
        refused = replace(client, self._flow_run_id, state)
        self._log.debug("State %s: %s", change.name, refused or "set")

    def _close_earlier(self, client: SyncPrefectClient, flow_run_count: int) -> None:
        # Prefect may still list an own task run as running that has just ended.
        running = TaskRunFilterState(type=TaskRunFilterStateType(any_=[StateType.RUNNING]))
        found = client.read_task_runs(
            flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[self._flow_run_id])),
            task_run_filter=TaskRunFilter(state=running),
        )
        died: State[Any] = Crashed(
            message="The flow's process ended unexpectedly; its rerun has adopted the job."
        )
        for run in found:
            if 0 < run.flow_run_run_count < flow_run_count:  # 0: a subflow
                client.set_task_run_state(run.id, died, force=True)

    def _emit(self, client: SyncPrefectClient, notice: _IncidentStep) -> None:
        # Prefect's own queue of events drops them while its server is away.
        client.hello().raise_for_status()
        emit_event(
            f"rekindle.incident.{notice.step}",
            resource={
                "prefect.resource.id": f"rekindle.job.{self._job_id}",
                "prefect.resource.name": self._job_id,
            },
            related=[
                {
                    "prefect.resource.id": f"prefect.flow-run.{self._flow_run_id}",
                    "prefect.resource.role": "flow-run",
                    "prefect.resource.name": self._flow_run_name,
                }
            ],
            payload=notice.payload,
            occurred=datetime.fromtimestamp(notice.event.at, tz=timezone.utc),
            # An event always has the same id, so a rerun of the flow may send all events again.
            id=uuid.uuid5(self._flow_run_id, f"{self._job_id}/{notice.event.seq}/{notice.step}"),
        )

    def _show(self, client: SyncPrefectClient, progress: Progress) -> None:
        done, words = percent(progress), progress_in_words(progress)
        key = progress_key(self._job_id)
        if self._artifact is None:
            found = find_artifact(client, key)
            self._artifact = found.id if found else None
        if self._artifact is not None:
            client.update_artifact(self._artifact, ArtifactUpdate(data=done, description=words))
            return
        create = ArtifactCreate(
            key=key, type="progress", data=done, description=words, flow_run_id=self._flow_run_id
        )
        self._artifact = client.create_artifact(create).id


def progress_key(job_id: str) -> str:
    """Return the key of the artifact that shows a job's progress."""
    return f"{job_id}-progress"


def find_artifact(client: SyncPrefectClient, key: str) -> Artifact | None:
    """Return the artifact of this key that a process of the flow run has made; None: none has."""
    named = ArtifactFilter(key=ArtifactFilterKey(any_=[key]))
    found = client.read_artifacts(artifact_filter=named, limit=1)
    return found[0] if found else None


def _may_pass(error: Exception) -> bool:
    """Return whether a retry may succeed: the server is away or overloaded, or refuses the key.

    After the rotation of a key, a rerun with the new one sends what this process keeps.
    """
    if isinstance(error, httpx.HTTPStatusError):
        status = error.response.status_code
        return status in (401, 403, 408, 429) or error.response.is_server_error
    return isinstance(error, httpx.TransportError)
