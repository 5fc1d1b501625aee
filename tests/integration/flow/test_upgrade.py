"""An upgrade of Rekindle while a job lives: the job is refused with one line, and continues."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import acts
import psutil
import pytest
from flow_jobs import SCRIPTS
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import State
from prefect.states import Crashed
from prefect_side import Served, ending_jobs, serve
from repository import ROOT
from waiting import run_command

from rekindle import names
from rekindle.recovery.journal.journal import Ended, FirstStep, Formed, JobStarted

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

OLD = names.WIRE_VERSION - 1
# In the copies of Rekindle: by file, a text and the one that replaces it.
EARLIER = {"names.py": (f"WIRE_VERSION = {names.WIRE_VERSION}", f"WIRE_VERSION = {OLD}")}
OTHER_ANSWERS = {
    "protocol/http_views.py": (
        "class JobView(msgspec.Struct, frozen=True, kw_only=True)",
        'class JobView(msgspec.Struct, frozen=True, kw_only=True, rename={"finished": "done"})',
    )
}


def copied(to: Path, changes: dict[str, tuple[str, str]]) -> Path:
    """Copy the package with changes; return the folder of the copy."""
    shutil.copytree(ROOT / "rekindle", to / "rekindle", ignore=shutil.ignore_patterns("__pyc*"))
    for name, (old, new) in changes.items():
        file = to / "rekindle" / name
        text = file.read_text()
        assert text.count(old) == 1
        file.write_text(text.replace(old, new))
    return to


class Upgraded:
    """A job that an earlier version has started. Its flow's process and runner are killed."""

    def __init__(
        self, client: SyncPrefectClient, home: Path, changes: dict[str, tuple[str, str]]
    ) -> None:
        self.client, self.home, self.gate = client, home, home / "gate"
        self.old = copied(home / "old", changes)
        with self.served(self.old) as runner:
            self.run = runner.start(
                script=str(SCRIPTS / "steps.py"),
                arguments=[str(self.gate), "1200"],
                snapshot_every=2,
            )
            self.run.until(lambda: self.run.count(FirstStep), "the job trains")
        self.run.client = client
        self.pid = self.coordinator()

    @contextlib.contextmanager
    def served(self, package: Path = ROOT) -> Iterator[Served]:
        """Serve the flow with this version, and kill its processes at the end."""
        with serve(str(self.client.api_url), self.home, "upgrade", package) as runner:
            yield runner
            flow = runner.flow_process()
            os.kill(runner.pid, signal.SIGKILL)
            if flow is not None:
                flow.kill()

    def coordinator(self) -> int:
        """Return the process id of the newest coordinator."""
        endpoint = self.run.directory.endpoint()
        assert endpoint is not None
        return endpoint.pid

    def refused(self) -> str:
        """Run the flow run again with this version. Return the message of its end."""
        failed = self.run.states().count("Failed")
        self.retry()
        with self.served():
            state: State[Any] = self.run.until_state("Failed", failed + 1)
        return state.message or ""

    def retry(self) -> None:
        """Press Retry; Prefect knows that the process of the run has ended."""
        self.run.client.set_flow_run_state(self.run.id, Crashed(), force=True)
        self.run.retry()

    def command(self, name: str) -> None:
        """Run a command of this version for the job."""
        env = {**os.environ, "REKINDLE_HOME": str(self.home)}
        command = [sys.executable, "-m", "rekindle.cli.main", name, self.run.job_id]
        done = run_command(command, env=env, cwd=ROOT)
        assert done.returncode == 0, done.stderr


def a_job_of_an_earlier_version_is_refused(upgraded: Upgraded) -> None:
    """The run ends once with one line that says what to do, and the job continues."""
    text = upgraded.refused()
    wanted = f"has the wire version {OLD}, and this Rekindle has {names.WIRE_VERSION}. The job "
    assert f"OtherVersionError: the coordinator of job {upgraded.run.job_id} {wanted}" in text
    assert psutil.pid_exists(upgraded.pid)
    assert upgraded.coordinator() == upgraded.pid
    assert upgraded.run.count(JobStarted) == 1
    assert not upgraded.run.count(Ended)


def its_agents_are_not_given_a_coordinator_of_another_version(upgraded: Upgraded) -> None:
    """They would refuse it, and end. They wait for one of their version."""
    os.kill(upgraded.pid, signal.SIGKILL)
    text = upgraded.refused()
    assert "has lost its coordinator, and each of its agents has the wire version" in text
    assert upgraded.coordinator() == upgraded.pid


def the_earlier_version_adopts_it(upgraded: Upgraded) -> None:
    """The Rekindle that started the job gives it another coordinator."""
    upgraded.retry()
    with upgraded.served(upgraded.old):
        upgraded.run.until(upgraded.run.holder, "the rerun steers the job")
    assert upgraded.coordinator() != upgraded.pid


def a_stopped_job_continues_with_the_new_version(upgraded: Upgraded) -> None:
    """`rekindle stop` works for a job of another version, and a retry loses no step."""
    upgraded.command("stop")
    run = upgraded.run
    run.until(lambda: run.count(Ended), "the job has ended")
    upgraded.gate.touch()
    upgraded.retry()
    with upgraded.served():
        run.until_state("Completed")
    assert run.count(JobStarted) == 2
    formed = [event.step for event in run.history() if isinstance(event, Formed)]
    assert formed[-1] > 0


ACTS = [
    a_job_of_an_earlier_version_is_refused,
    its_agents_are_not_given_a_coordinator_of_another_version,
    the_earlier_version_adopts_it,
    a_stopped_job_continues_with_the_new_version,
]


@pytest.fixture(scope="module")
def played(prefect_api: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[acts.Played]:
    """Start a job with an earlier version, and upgrade."""
    home = tmp_path_factory.mktemp("upgrade")
    with ending_jobs(home), SyncPrefectClient(prefect_api) as client:
        yield acts.Played(ACTS, Upgraded(client, home, EARLIER))


@pytest.mark.parametrize("act", acts.names(ACTS))
def test_upgrade(played: acts.Played, act: str) -> None:
    """Each act has the result that its function states."""
    played.check(act)


def test_a_coordinator_with_other_answers_is_not_replaced(prefect_api: str, tmp_path: Path) -> None:
    """It lives, although this version cannot read its answer."""
    with ending_jobs(tmp_path), SyncPrefectClient(prefect_api) as client:
        upgraded = Upgraded(client, tmp_path, {**EARLIER, **OTHER_ANSWERS})
        assert "answers as another version of Rekindle does" in upgraded.refused()
        assert psutil.pid_exists(upgraded.pid)
