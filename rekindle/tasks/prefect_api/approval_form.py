"""Ask a person for approval in Prefect: a form on the paused flow run, and the answer to the job.

The coordinator waits for the answer up to its own time limit. It treats an answer from this form
and one from `rekindle approve` equally. The flow's process may fail during the wait. Prefect keeps
the form under a key of the decision, so the next process finds a new answer.
"""

from __future__ import annotations

import http
import threading
import uuid
from typing import Any, Literal

import httpx
from prefect.client.schemas.objects import State
from prefect.context import SettingsContext, get_settings_context
from prefect.exceptions import PrefectException
from prefect.input import RunInput, read_flow_run_input
from prefect.input.run_input import keyset_from_base_key
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES
from prefect.states import Paused
from pydantic import Field, ValidationError

from rekindle.errors import JobError
from rekindle.protocol.agent import Approval
from rekindle.recovery.journal.journal import Decided
from rekindle.reporting.event_text import capital
from rekindle.tasks import job_access as jobs
from rekindle.tasks.prefect_api import Log

_PAUSE_S = 1.0
_UNNAMED = "a person, in Prefect"


class ApprovalForm(RunInput):
    """The form that Prefect shows to a person who resumes the flow run."""

    # The answer has no default. Prefect refuses a resume without a filled-in form.
    answer: Literal["approve", "refuse"] = Field(
        description="With approve, the job uses the proposed strategy. With refuse, the job ends, "
        "and writes a final checkpoint if it has a snapshot. A person can rerun it. It then "
        "continues from its newest checkpoint."
    )
    name: str = Field(
        default="",
        max_length=100,
        description="Name of the person who answers. The report shows it.",
    )


class ApprovalQuestion:
    """A decision that waits for a person: the form, and a thread that fetches the answer."""

    def __init__(
        self,
        decided: Decided,
        *,
        job_id: str,
        flow_run_id: uuid.UUID,
        log: Log,
    ) -> None:
        self._decided = decided
        self._job_id = job_id
        self._flow_run_id = flow_run_id
        self._log = log
        self._keys = keyset_from_base_key(f"approval-{decided.seq}")
        self._closed = threading.Event()
        # A daemon thread: a server that hangs must not keep the flow's process from ending.
        self._thread = threading.Thread(
            target=self._run, args=(get_settings_context(),), name="rekindle-approval", daemon=True
        )

    def open(self) -> None:
        """Start to look for the answer, until it arrives or the question is closed."""
        self._log.warning("%s", self.text())
        self._thread.start()

    def text(self) -> str:
        """Return the question in a line, for the log and the message of the state."""
        one = self._decided
        return (
            f"Incident {one.incident}: may the job use the strategy {one.strategy.value}? "
            f"{capital(one.reason)}. Press Resume and answer in the form, or run rekindle approve "
            f"{self._job_id}"
        )

    def close(self) -> None:
        """Stop looking: the question is answered, or its job ends."""
        self._closed.set()

    def state(self, name: str, message: str) -> State[Any]:
        """Return the state in which Prefect shows the form.

        The state does not have a time-out: Prefect would fail the flow run while the job continues.
        """
        # Prefect accepts a key of a pause only once, but a rerun must be able to pause again.
        state: State[Any] = Paused(name=name, message=message, pause_key=uuid.uuid4().hex)
        state.state_details.run_input_keyset = {str(what): key for what, key in self._keys.items()}
        return state

    def put(self) -> None:
        """Attach the form to the flow run, if no earlier process has done so.

        Raises httpx.HTTPStatusError: Prefect refuses it.
        """
        form = ApprovalForm.with_initial_data(description=self._in_words())
        try:
            form.save(self._keys, flow_run_id=self._flow_run_id)
        except httpx.HTTPStatusError as error:
            if error.response.status_code != http.HTTPStatus.CONFLICT:
                raise

    def _in_words(self) -> str:
        """Return the question in Markdown, which Prefect shows above the form."""
        one = self._decided
        return (
            f"**Job {self._job_id}, incident {one.incident}: may the job use the strategy "
            f"`{one.strategy.value}`?**\n\n{capital(one.reason)}."
        )

    def _run(self, settings: SettingsContext) -> None:
        patient = settings.settings.copy_with_update(updates={PREFECT_CLIENT_MAX_RETRIES: 0})
        with SettingsContext(profile=settings.profile, settings=patient):
            while not self._closed.wait(_PAUSE_S):
                # Errors lead to a retry: the notifier reports errors of Prefect, and another
                # coordinator replaces a failed one. The journal has the answer once it has arrived.
                try:
                    self._fetch()
                except (httpx.HTTPError, PrefectException, JobError, OSError) as error:
                    self._log.debug("The answer to incident %d: %r", self._decided.incident, error)

    def _fetch(self) -> None:
        """Pass an answer on, if there is one. Raises JobError: the job does not take it now."""
        given = read_flow_run_input(self._keys["response"], flow_run_id=self._flow_run_id)
        endpoint = jobs.directory_of(self._job_id).endpoint()
        if given is None or endpoint is None:
            return
        try:
            form = ApprovalForm.model_validate(given)
        except ValidationError as error:
            raise JobError(f"the form has an invalid answer: {given!r}") from error
        answer = Approval(
            incident=self._decided.incident,
            granted=form.answer == "approve",
            by=form.name.strip() or _UNNAMED,
            about=self._decided.fault.at if self._decided.fault else 0.0,
        )
        jobs.client_of(self._job_id, endpoint).approve(answer)
        self._log.info("Incident %d: %s by %s", answer.incident, form.answer, answer.by)
        self.close()
