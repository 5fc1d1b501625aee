"""Start a job of the campaign, by a command or by a flow run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import psutil
from jobs import Place, Run
from stores.servers import ENVIRONMENT, Server
from training_jobs.injection import write_faults
from training_jobs.processes import SCRIPT, environment

from campaign.expectations import End
from campaign.kinds import SNAPSHOT_EVERY, STEPS, Kind
from rekindle.job.spec import JobDirectory
from rekindle.recovery.journal import journal

MAX_RESTARTS = 6  # more than the faults of a trial can use up
STEP_S = "0.05"  # the work of a step; without it, faults would come after the last step
_OUTCOMES = {"succeeded": End.SUCCEEDED, "stopped": End.STOPPED, "failed": End.FAILED}


class Launch(Protocol):
    """A job that a launcher has started, and that the same launcher can start again."""

    place: Place
    directory: JobDirectory

    def start(self) -> None:
        """Start the job, or start it again after an end."""

    def steers(self) -> psutil.Process | None:
        """Return the process that launches and steers the job; None: there is none now."""

    def has_ended(self) -> bool:
        """Return whether the launcher has ended, and starts nothing more."""

    def end(self) -> End:
        """Return the end of the newest attempt, after the launcher's end."""

    def story(self) -> str:
        """Return output and journal, for the report of a failed trial."""


def arguments_of(kind: Kind, folder: Path) -> list[str]:
    """Return the arguments of the training script; write what it reads."""
    write_faults(folder, [])
    return [str(folder), "--variant", kind.variant, "--steps", str(STEPS), "--plain-runtime"]


class ByCommand:
    """A job of `rekindle run`."""

    def __init__(self, kind: Kind, place: Place, mark: str, server: Server | None) -> None:
        self.place = place
        self._environment = environment(mark) | {"PRODUCT_S": STEP_S}
        policy = place.folder / "policy.yaml"
        rule = "" if kind.recovers else "strategies: [dump]\n"
        policy.write_text(rule or f"max_restarts: {MAX_RESTARTS}\n")
        nodes = f"{kind.min_nodes}:{kind.nodes}" if kind.min_nodes else str(kind.nodes)
        options = ["--nnodes", nodes, "--nproc-per-node", str(kind.ranks)]
        options += ["--snapshot-every", str(SNAPSHOT_EVERY), "--policy", str(policy)]
        options += ["--checkpoint-every", str(kind.checkpoint_every)]
        options += ["--spares", str(kind.spares)]
        if server is not None:
            options += ["--checkpoint-dir", server.location()]
            self._environment |= ENVIRONMENT
        self._command = [*options, str(SCRIPT), *arguments_of(kind, place.folder)]
        self.run: Run | None = None

    @property
    def directory(self) -> JobDirectory:
        assert self.run is not None
        return self.run.directory

    def start(self) -> None:
        self.run = self.place.start(
            *self._command,
            env=self.place.environment(self._environment),
            start_new_session=True,  # as a shell does
        )

    def steers(self) -> psutil.Process | None:
        assert self.run is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.run.process.pid) if self.run.process.poll() is None else None
        return None

    def has_ended(self) -> bool:
        assert self.run is not None
        return self.run.process.poll() is not None

    def end(self) -> End:
        assert self.run is not None
        status = self.run.process.returncode
        if status < 0:
            return End.KILLED
        if status == 0:
            return End.SUCCEEDED
        ends = self.run.events_of(journal.Ended)
        if status > 128:
            return End.STOPPED
        assert ends, f"status {status} without an end in the journal"
        return _OUTCOMES[ends[-1].outcome]

    def story(self) -> str:
        assert self.run is not None
        return self.run.story()


@contextlib.contextmanager
def launched(
    kind: Kind, place: Place, mark: str, servers: Callable[[str], object]
) -> Iterator[Launch]:
    """Start nothing yet; yield the launch of a job of this kind.

    `servers`: returns the server that the tests share: "s3" or "prefect".
    """
    if kind.flow:
        from campaign.flow_launch import by_flow  # Prefect takes seconds to import

        with by_flow(kind, place, mark, str(servers("prefect"))) as launch:
            yield launch
        return
    server = servers("s3") if kind.s3 else None
    assert server is None or isinstance(server, Server)
    yield ByCommand(kind, place, mark, server)


def kill_processes(found: list[psutil.Process]) -> None:
    """Kill what is left of a trial, after its check."""
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
