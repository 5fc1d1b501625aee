"""Kinds of `rekindle inject` through the flow on the local engine: results and lost steps.

One flow run has several kinds, one after the other.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from prefect_side import FlowRun, Served
from training_jobs.checks import assert_same_training, assert_samples_once
from training_jobs.injection import Fault, reached, release, write_faults
from training_jobs.job import STEPS
from training_jobs.processes import SCRIPT, environment
from training_jobs.record import Record
from waiting import bound_s

from rekindle.cli import main as cli
from rekindle.protocol.agent import Inject, InjectionKind
from rekindle.rank.injection import received

pytestmark = pytest.mark.timeout(900)

RANKS = 4


class Row(NamedTuple):
    """The expected result of one kind; strategy is "" if Rekindle takes no action."""

    rank: int
    fault: str
    strategy: str
    lost: bool = False  # whether the job may repeat steps


# By the run that has them, in order. No rank gets two faults in succession.
USUAL = {
    "kill": Row(1, "process", "recover-in-place"),
    "slow": Row(3, "", ""),
    "node-lost": Row(2, "node-lost", "recover"),
    "uce": Row(1, "device-memory", "retry"),
    "hang": Row(3, "hang", "recover-in-place"),
    "exception": Row(2, "user-code", "restart", lost=True),
}
OTHERS = {
    "torn-update": Row(2, "device-memory", "retry"),
    "oom": Row(1, "device-out-of-memory", "recover-in-place"),
    "hang-collective": Row(3, "hang", "recover-in-place"),
    "hang-data": Row(2, "hang", "recover-in-place"),
    "stop": Row(1, "hang", "recover-in-place"),
    "livelock": Row(3, "hang", "recover-in-place"),
}
TABLES = {"usual": USUAL, "others": OTHERS}
APART = 3  # steps


class Injected:
    """A flow run whose job has had the kinds of a table, and its record."""

    def __init__(self, served: Served, folder: Path, table: dict[str, Row]) -> None:
        self.folder, self.table, self._home = folder, table, str(served.home)
        self.steps = [APART * number for number in range(1, len(table) + 1)]
        write_faults(folder, [Fault(0, "forward", step, do="pause", life=0) for step in self.steps])
        self.run: FlowRun = served.start(
            script=str(SCRIPT),
            arguments=[str(folder), "--variant", "ddp", "--steps", str(STEPS)],
            nodes=2,
            processes_per_node=RANKS // 2,
            environment=environment(uuid.uuid4().hex),
            snapshot_every=5,
            allow_injection=True,
            policy={"hang_timeout_s": bound_s(3.0), "max_restarts": 1},
        )
        self.error = ""
        try:
            for number, kind in enumerate(table):
                self._inject(number, kind)
            self.run.until_state("Completed")
        except AssertionError as error:
            self.error = str(error)
        self.record = Record(
            folder, STEPS, metrics=self.run.directory.path / "metrics", ranks=RANKS
        )

    def _inject(self, number: int, kind: str) -> None:
        """Order a fault while the job waits in a step; the fault occurs in the next step.

        The job waits until the rank has the order. Otherwise the order could arrive too late.
        """
        rank, step = self.table[kind].rank, self.steps[number] + 1
        self.run.until(reached(self.folder, number).exists, f"the job waits, before {kind}")
        command = ["inject", self.run.job_id, "--rank", str(rank)]
        command += ["--kind", kind, "--step", str(step)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("REKINDLE_HOME", self._home)
            with pytest.raises(SystemExit) as ended:
                cli.main(command)
        assert ended.value.code == 0
        order = received(Inject(rank=rank, kind=InjectionKind(kind), step=step))
        self.run.until(lambda: order in self._log(rank), f"rank {rank} has the order: {kind}")
        release(self.folder, number)

    def _log(self, rank: int) -> str:
        logs = self.run.directory.path.glob(f"logs/attempt_*/{rank}/stderr.log")
        return "".join(log.read_text() for log in logs)

    def incidents(self) -> list[dict[str, Any]]:
        """Return the rows of the incident table in Prefect."""
        found: list[dict[str, Any]] = json.loads(self.run.artifact("incidents").data)
        return found


@pytest.fixture(scope="module")
def injected(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Injected]:
    """Return a function that runs a table once and returns its flow run."""
    known: dict[str, Injected] = {}

    def find(name: str) -> Injected:
        if name not in known:
            known[name] = Injected(served, tmp_path_factory.mktemp(name), TABLES[name])
        return known[name]

    return find


def test_the_tables_have_every_kind() -> None:
    """The two tables together have all kinds."""
    assert {*USUAL, *OTHERS} == {kind.value for kind in InjectionKind}


# tests/integration/faults tests the job itself; the flow does not distinguish kinds of hangs.
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("usual", kind) for kind in USUAL),
        *(pytest.param("others", kind, marks=pytest.mark.soak) for kind in OTHERS),
    ],
)
def test_a_kind_ends_as_its_row_says(
    name: str, kind: str, injected: Callable[[str], Injected]
) -> None:
    """The incident table in Prefect has the expected row, with the expected lost steps."""
    found = injected(name)
    assert not found.error
    rows = [each for each, row in found.table.items() if row.strategy]
    met = found.incidents()
    assert len(met) == len(rows)
    row = found.table[kind]
    if row.strategy:
        result = met[rows.index(kind)]
        fault, _, _ = result["fault"].partition(",")
        assert (fault, result["strategy"]) == (row.fault, row.strategy)
        assert result["lost"] == "0" or row.lost


@pytest.mark.parametrize("name", ["usual", pytest.param("others", marks=pytest.mark.soak)])
def test_the_end(name: str, injected: Callable[[str], Injected], baseline: Record) -> None:
    """The flow run completes; the training is that of an uninterrupted run, bit by bit."""
    found = injected(name)
    assert not found.error
    assert_same_training(found.record, baseline)
    assert_samples_once(found.record)
