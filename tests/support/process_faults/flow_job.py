"""A job of a flow run, for the rows of the table whose victim is the process of the flow run."""

from __future__ import annotations

from pathlib import Path

import psutil
from jobs import environ
from prefect_side import WAIT_S, Served
from waiting import bound_s, wait_until

from process_faults import Victim
from process_faults.started import CHECKPOINT_EVERY, ENVIRONMENT, RANKS, SCRIPT, SNAPSHOT_EVERY
from rekindle import names
from rekindle.recovery.journal import journal
from rekindle.testing.handle import JobHandle


class FlowJob:
    """A job of a flow run. If the process of the flow run dies, Prefect starts another one."""

    launches = 1

    def __init__(self, runner: Served, folder: Path) -> None:
        self.folder = folder
        self._runner = runner
        self._run = runner.start(
            script=str(SCRIPT),
            arguments=[str(folder)],
            nodes=RANKS,
            environment=ENVIRONMENT,
            snapshot_every=SNAPSHOT_EVERY,
            checkpoint={"every": CHECKPOINT_EVERY},
        )
        self._handle = JobHandle(self._run.directory.path, limit_s=bound_s(WAIT_S))

    @property
    def handle(self) -> JobHandle:
        return self._handle

    def begun(self, victim: Victim) -> None:
        self._run.until(self._runner.flow_process, "the process of the flow run")

    def processes(self, victim: Victim) -> list[psutil.Process]:
        found = self._runner.flow_process()
        return [found] if found else []

    def launch_again(self) -> None:
        raise AssertionError("Prefect runs the flow again")

    def new_coordinators(self) -> int:
        return self._run.logs().count("a new coordinator replaces it")

    def end(self) -> None:
        self._run.until_state("Completed")
        assert self._run.count(journal.JobStarted) == 1
        wait_until(lambda: not self._left(), "the end of all processes of the job")

    def was_run_again(self) -> bool:
        """Return whether Prefect saw the death of a process of the flow run."""
        return "Crashed" in self._run.states()

    def story(self) -> str:
        return self._run.story()

    def _left(self) -> list[psutil.Process]:
        """Return the processes of the job, without the runner and its own children."""
        home = f"{names.ENV_HOME}={self._runner.home}\0".encode()
        found = [p for p in psutil.process_iter(["ppid"]) if home in environ(p.pid)]
        return [p for p in found if self._runner.pid not in (p.pid, p.info["ppid"])]
