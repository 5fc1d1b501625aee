"""The states of one flow run, behind the methods of Prefect's client that read and write them."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

from prefect.client.schemas.objects import State
from prefect.client.schemas.responses import SetStateStatus

EPOCH = datetime(2026, 1, 1, tzinfo=timezone.utc)


class SimulatedFlowRun:
    """The states of one flow run; `meanwhile` come between a read and the write after it."""

    def __init__(self, *states: State[Any], meanwhile: tuple[State[Any], ...] = ()) -> None:
        self.states: list[State[Any]] = []
        self._meanwhile = list(meanwhile)
        for state in states:
            self._add(state)

    def _add(self, state: State[Any]) -> State[Any]:
        at = EPOCH + timedelta(seconds=len(self.states))
        self.states.append(state.model_copy(update={"id": uuid4(), "timestamp": at}))
        return self.states[-1]

    def __enter__(self) -> SimulatedFlowRun:
        return self

    def __exit__(self, *_: object) -> None:
        """Close nothing."""

    def read_flow_run(self, flow_run_id: object) -> SimpleNamespace:
        """Return the run with its present state."""
        return SimpleNamespace(state=self.states[-1])

    def read_flow_run_states(self, flow_run_id: object) -> list[State[Any]]:
        """Return all states, the newest first."""
        return self.states[::-1]

    def set_flow_run_state(
        self, flow_run_id: object, state: State[Any], force: bool = False
    ) -> SimpleNamespace:
        """Set the state, after those that come meanwhile."""
        while self._meanwhile:
            self._add(self._meanwhile.pop(0))
        written = self._add(state)
        return SimpleNamespace(status=SetStateStatus.ACCEPT, state=written, details=None)

    def names(self) -> list[str | None]:
        """Return the names of all states."""
        return [state.name for state in self.states]
