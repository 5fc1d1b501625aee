"""A job of two nodes that a platform's annotations describe, and the faults that befall it."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
import yaml
from host_conditions import set_condition
from jobs import Place, Run
from waiting import wait_until

from rekindle import names
from rekindle.agent.devices.tools import SimulatedCondition
from rekindle.cli import main as cli
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import Strategy

RANKS = 2
_LOOK_S = 0.05  # between two reads of the file of starts
# Each process writes a line at its start. Then it waits for a file that ends it, or that hangs it.
SCRIPT = """
import os, sys, time

rank, agent = os.environ["RANK"], os.getppid()
placed, started = os.environ["MA_SCHEDULE_CNT"], os.environ["MA_PROC_START_CNT"]
with open("starts", "a") as file:
    file.write(f"{rank} {placed} {started} {agent} {os.getpid()}\\n")
while not os.path.exists("hang"):
    if os.path.exists(f"fail-{rank}"):
        os.unlink(f"fail-{rank}")
        sys.exit(3)
    if os.path.exists("succeed"):
        sys.exit(0)
    time.sleep(0.02)
time.sleep(10_000)
"""


class Start(NamedTuple):
    """One start of the script.

    placed, started: the values of ModelArts' variables. agent: the process that started it, which
    lives as long as the pod.
    """

    rank: int
    placed: int
    started: int
    agent: int
    pid: int


class PlatformJob:
    """A running job whose policy is a file with annotations.

    env: more variables of its processes. own: settings of Rekindle that annotations cannot express.
    `rekindle policy` then translates the file first.
    """

    def __init__(
        self,
        place: Place,
        annotations: dict[str, str],
        env: Mapping[str, str] = {},
        **own: Any,
    ) -> None:
        self.place = place
        file = place.folder / "job.yaml"
        file.write_text(described(annotations))
        if own:
            translated = yaml.safe_load(shell(place, "policy", "job.yaml").out)
            file.write_text(yaml.safe_dump(translated | own))
        options = ("--nnodes", str(RANKS), "--policy", "job.yaml")
        self.run: Run = place.start_quick(
            place.script(SCRIPT), *options, env=place.environment(env)
        )

    # ---- faults

    def report(self, code: str, *more: str) -> None:
        """Report a code of the chip of node 1."""
        words = ("report-fault", "job", "--node", "1", "--device", "0", "--source", "ascend")
        assert shell(self.place, *words, *more, code).status == 0

    def fail(self, rank: int) -> None:
        """Let the script of a rank end with an exit status other than 0."""
        (self.place.folder / f"fail-{rank}").touch()

    def hang(self) -> None:
        """Let each process of the script sleep without an end."""
        (self.place.folder / "hang").touch()

    def set_host(self, **condition: Any) -> None:
        """Set the condition of the host of node 1."""
        file = self.place.home / names.HOSTS_DIRECTORY / self.hosts(1)[-1]
        set_condition(file, SimulatedCondition(**condition))

    def succeed(self) -> None:
        """Let all ranks end with success, and wait for the end of the job."""
        (self.place.folder / "succeed").touch()
        self.run.end(0)

    # ---- results

    def wait_starts(self, *expected: tuple[int, int]) -> list[Start]:
        """Wait until the newest start of each rank has these numbers; return these starts.

        expected: of each rank, how often its node was placed, and how often the script started
        there.
        """

        def reached() -> list[Start]:
            newest = [self._newest(rank) for rank in range(RANKS)]
            found = [each for each in newest if each is not None]
            return found if [each[1:3] for each in found] == [*expected] else []

        try:
            return wait_until(reached, f"starts {expected}", pause_s=_LOOK_S)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.starts()}{self.run.story()}") from error

    def starts(self) -> list[Start]:
        """Return all starts of the script so far, in their order."""
        path = self.place.folder / "starts"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [Start(*map(int, line.split())) for line in lines]

    def hosts(self, node: int) -> list[str]:
        """Return the hosts of a node, in order."""
        return [e.host for e in self.run.events_of(journal.NodeJoined) if e.node == node]

    def strategies(self) -> list[Strategy]:
        """Return the strategies of all decisions, in order."""
        return [event.strategy for event in self.run.events_of(journal.Decided)]

    def isolated(self) -> list[str]:
        """Return the isolated hosts, in order."""
        return [event.host for event in self.run.events_of(journal.Isolated)]

    def _newest(self, rank: int) -> Start | None:
        return next((each for each in reversed(self.starts()) if each.rank == rank), None)


class Printed(NamedTuple):
    """The result of a command."""

    out: str
    err: str
    status: int


def described(annotations: dict[str, str]) -> str:
    """Return the text of a job file that has these annotations, as the platform's API takes it."""
    return yaml.safe_dump({"kind": "job", "metadata": {"annotations": annotations}})


def shell(place: Place, *words: str) -> Printed:
    """Run a command of rekindle in this process."""
    out, err = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.setenv(names.ENV_HOME, str(place.home))
        patch.chdir(place.folder)
        with pytest.raises(SystemExit) as ended:
            cli.main([*words])
    return Printed(out.getvalue(), err.getvalue(), int(ended.value.code or 0))
