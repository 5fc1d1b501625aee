"""A job of the campaign that a run of the train flow launches, with its own served deployment."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import psutil
from jobs import Place
from prefect_side import FlowRun, Served, serve
from training_jobs.processes import SCRIPT, environment

from campaign.expectations import End
from campaign.kinds import SNAPSHOT_EVERY, Kind
from campaign.launches import MAX_RESTARTS, STEP_S, arguments_of
from rekindle.job.spec import JobDirectory
from rekindle.recovery.journal import journal

_FINAL = ("Completed", "Failed", "Cancelled")


class ByFlow:
    """A job of the train flow. A retry of the flow run starts it again."""

    def __init__(self, kind: Kind, place: Place, mark: str, served: Served) -> None:
        self.place, self._served = place, served
        self._job = {
            "name": "campaign",
            "script": str(SCRIPT),
            "arguments": arguments_of(kind, place.folder),
            "nodes": kind.nodes,
            "processes_per_node": kind.ranks,
            "snapshot_every": SNAPSHOT_EVERY,
            "checkpoint": {"every": kind.checkpoint_every},
            "environment": environment(mark) | {"PRODUCT_S": STEP_S},
            "working_directory": str(place.folder),
            "policy": {"max_restarts": MAX_RESTARTS},
        }
        self.run: FlowRun | None = None
        self._ends = 0  # final states before the newest start

    @property
    def directory(self) -> JobDirectory:
        assert self.run is not None
        return self.run.directory

    def start(self) -> None:
        if self.run is None:
            self.run = self._served.start(**self._job)
            return
        self._ends = self._finals()
        self.run.retry()

    def steers(self) -> psutil.Process | None:
        return self._served.flow_process()

    def has_ended(self) -> bool:
        return self._finals() > self._ends and self._served.flow_process() is None

    def end(self) -> End:
        assert self.run is not None
        if self.run.state().name == "Completed":
            return End.SUCCEEDED
        ended = [event for event in self.run.history() if isinstance(event, journal.Ended)]
        return End(ended[-1].outcome) if ended else End.FAILED

    def story(self) -> str:
        assert self.run is not None
        logs = "\n".join(
            f"-- {path.name}\n{path.read_text(errors='replace')[-4000:]}"
            for path in sorted(self.directory.path.glob("*.log"))
        )
        return f"{self.run.story()}\n{logs}"

    def _finals(self) -> int:
        assert self.run is not None
        return sum(name in _FINAL for name in self.run.states())


class PlaceOfFlow(Place):
    """A place in which a runner serves the flow. Its processes do not belong to a job."""

    runner: Served | None = None

    def processes(self) -> list[psutil.Process]:
        """Return the processes of jobs, without the runner and the processes of its flow runs."""
        outside: set[int] = set()
        if self.runner is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                runner = psutil.Process(self.runner.pid)
                outside = {runner.pid, *(child.pid for child in runner.children())}
                flow = self.runner.flow_process()
                outside |= {c.pid for c in flow.children() if _serves_flow(c)} if flow else set()
        return [process for process in super().processes() if process.pid not in outside]


def _serves_flow(process: psutil.Process) -> bool:
    return not any("rekindle." in word for word in process.cmdline())


@contextlib.contextmanager
def by_flow(kind: Kind, place: Place, mark: str, api: str) -> Iterator[ByFlow]:
    """Serve the train flow in the place until the context ends."""
    assert isinstance(place, PlaceOfFlow)
    place.home.mkdir()
    with serve(api, place.home, f"campaign-{mark[:8]}") as served:
        place.runner = served
        yield ByFlow(kind, place, mark, served)
    place.runner = None
