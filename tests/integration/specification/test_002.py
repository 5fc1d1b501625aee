"""DLRover's node check: the command lines of the document, given to `rekindle run`.

The checks themselves are tested in `tests/integration/faults/test_node_check.py`.
`tests/support/specification/document_002.py` has the sentences that these tests prove.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator

import pytest
from jobs import Place, Run
from waiting import wait_until

from rekindle import names
from rekindle.recovery.journal import journal
from rekindle.recovery.node_check.verdicts import Health
from rekindle.recovery.policy.policy import Strategy

# Each start writes a line. Rank 0 fails as often as the command allows restarts.
SCRIPT = """
import json, os, sys

names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID")
told = {name: os.environ[name] for name in names} | {"arguments": sys.argv[1:]}
with open("told", "a") as file:
    file.write(json.dumps(told) + "\\n")
if "--num_epochs" in sys.argv and os.environ["RANK"] == "0":
    sys.exit(3 if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < 3 else 0)
"""
OF_SCRIPT = ("--num_epochs", "5", "--training_data", "/data/a/", "--validation_data", "/data/b/")
LENIENT = ("--compute-factor=20", "--link-factor=20")  # other processes use the cores


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Return a folder with its own home; at the end no process may remain."""
    with Place(tmp_path_factory.mktemp("dlrover") / "place") as found:
        found.script(SCRIPT)
        yield found


@pytest.fixture(scope="module")
def elastic(place: Place) -> tuple[Run, list[dict[str, object]]]:
    """Return the run with the options of `dlrover-run`, and the lines of its ranks."""
    options = ("--network-check", "--nnodes=2:3", "--nproc_per_node=2", "--max_restarts=3")
    more = ("--exclude-straggler", *LENIENT)
    run = place.start(*options, *more, "train.py", *OF_SCRIPT).end(0)
    told = (place.folder / "told").read_text().splitlines()
    return run, [json.loads(line) for line in told]


def test_a_range_of_nodes_and_no_rendezvous(elastic: tuple[Run, list[dict[str, object]]]) -> None:
    """The job starts with the largest number of nodes, and the script gets its arguments."""
    run, told = elastic
    assert run.events_of(journal.JobStarted)[0].nodes == 3
    assert {each["WORLD_SIZE"] for each in told} == {"6"}
    assert {each["LOCAL_WORLD_SIZE"] for each in told} == {"2"}
    assert all(each["arguments"] == [*OF_SCRIPT] for each in told)


def test_the_option_checks_each_node(elastic: tuple[Run, list[dict[str, object]]]) -> None:
    """Each node has a verdict before the first rank starts."""
    run, _ = elastic
    checked = run.events_of(journal.NodeChecked)
    assert {each.host for each in checked} == {"local-0", "local-1", "local-2"}
    assert {each.verdict.health for each in checked} == {Health.HEALTHY}
    started = run.events_of(journal.RanksStarted)[0]
    assert max(each.seq for each in checked) < started.seq


def test_the_option_excludes_stragglers(elastic: tuple[Run, list[dict[str, object]]]) -> None:
    """The description of the job has it; `integration/faults/test_node_check.py` has its effect."""
    run, _ = elastic
    assert run.directory.spec().exclude_straggler


def test_the_option_limits_the_restarts(elastic: tuple[Run, list[dict[str, object]]]) -> None:
    """A script that fails three times restarts three times, and then ends with success."""
    run, _ = elastic
    decided = [event.strategy for event in run.events_of(journal.Decided)]
    assert decided == [Strategy.RESTART] * 3


def test_the_options_of_torchrun(place: Place) -> None:
    """The same command, given four times, forms one job of four nodes with the given id."""
    with socket.socket() as probe:
        probe.bind((names.LOOPBACK, 0))
        port = probe.getsockname()[1]
    before = (place.folder / "told").read_text() if (place.folder / "told").exists() else ""
    options = ("--nnodes=4", "--nproc_per_node=2", "--rdzv_id=123", "--rdzv_backend=c10d")
    program = ("--no-python", sys.executable, "train.py")  # without it each agent imports torch
    command = [*options, f"--rdzv_endpoint=localhost:{port}", *program]
    runs = [Run(place, command, job_id="123") for _ in range(4)]
    for run in runs:
        wait_until(run.has_ended, "the end of all commands")
        assert run.process.returncode == 0, run.story()
    place.wait_for_silence()
    lines = (place.folder / "told").read_text().removeprefix(before).splitlines()
    told = [json.loads(line) for line in lines]
    assert sorted(each["RANK"] for each in told) == sorted(map(str, range(8)))
    assert {each["TORCHELASTIC_RUN_ID"] for each in told} == {"123"}
