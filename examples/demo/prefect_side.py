"""Use Prefect in the demo: a server, a served deployment, and its flow runs."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar
from uuid import UUID

import httpx
from background import background
from place import OUTPUT, PORT, UI
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import State
from prefect.exceptions import ObjectNotFound

from rekindle import TrainingJob

T = TypeVar("T")
_START_S = 120.0


@contextmanager
def server() -> Iterator[None]:
    """Run a Prefect server with its UI."""
    command = [sys.executable, "-m", "prefect", "server", "start"]
    command += ["--host", "127.0.0.1", "--port", str(PORT), "--log-level", "WARNING"]
    with background(command, OUTPUT / "prefect-server.log") as process:
        until(_healthy, "the Prefect server answers", _START_S, process)
        yield


def _healthy() -> bool:
    try:
        return httpx.get(f"{UI}/api/health", timeout=2.0).is_success
    except httpx.TransportError:
        return False


class Served:
    """The train flow's deployment, and the process that runs its flow runs."""

    def __init__(self, client: SyncPrefectClient, process: subprocess.Popen[bytes]) -> None:
        self._client = client
        self._deployment = until(self._find, "the flow is served", _START_S, process)

    def _find(self) -> UUID | None:
        try:
            return self._client.read_deployment_by_name("train/demo").id
        except ObjectNotFound:
            return None

    def start(self, job: TrainingJob, name: str) -> UUID:
        """Schedule a flow run for now; return its id."""
        return self._client.create_flow_run_from_deployment(
            self._deployment, parameters={"job": job.model_dump()}, name=name
        ).id

    def state(self, flow_run_id: UUID) -> State[object]:
        """Return the flow run's current state."""
        state = self._client.read_flow_run(flow_run_id).state
        assert state is not None
        return state


@contextmanager
def served() -> Iterator[Served]:
    """Serve the train flow until the block ends."""
    script = Path(__file__).with_name("serve.py")
    command = [sys.executable, str(script)]
    with (
        get_client(sync_client=True) as client,
        background(command, OUTPUT / "flow-serve.log") as process,
    ):
        yield Served(client, process)


def until(
    read: Callable[[], T | None],
    what: str,
    seconds: float,
    process: subprocess.Popen[bytes] | None = None,
) -> T:
    """Call `read` until it returns a true value, and return that value.

    Raises TimeoutError: the time is over; RuntimeError: `process` has ended.
    """
    deadline = time.monotonic() + seconds
    while True:
        seen = read()
        if seen:
            return seen
        if process is not None and process.poll() is not None:
            raise RuntimeError(f"process ended with {process.returncode} before {what}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:.0f} s in vain until {what}")
        time.sleep(0.02)
