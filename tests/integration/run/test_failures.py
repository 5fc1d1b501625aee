"""Scripts that fail, and command lines that cannot work: a clear error, and an end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from jobs import Place

from rekindle import names
from rekindle.recovery import journal
from rekindle.recovery.policy import Strategy

ALL_RAISE = """
import os, time

def train(rank):
    if rank != 2:  # the others fail because of it, and later
        time.sleep(0.5)
        raise ConnectionError(f"peer of {rank} is gone")
    raise ValueError("the first")

train(int(os.environ["RANK"]))
"""

SECOND_TRY = """
import os, time

count = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print("try", count, "of at most", os.environ["TORCHELASTIC_MAX_RESTARTS"])
if count == 0 and os.environ["RANK"] == "1":
    raise RuntimeError("only once")
if count == 0:
    time.sleep(600)
"""


def test_all_ranks_raise(place: Place) -> None:
    """The first failing rank's traceback is shown; the same error after a restart ends the job."""
    script = place.script(ALL_RAISE)
    run = place.start("--nproc-per-node", "4", "--max-restarts", "5", script).end(1)
    report = run.stderr[run.stderr.index("rekindle: the job failed") :]
    assert "first fault: rank 2 on node 0: rank 2 raised ValueError: the first" in report
    assert f'{place.folder / script}", line 8, in train' in report
    assert "ConnectionError" not in report
    decided = [event.strategy for event in run.recorded(journal.Decided)]
    assert decided == [Strategy.RESTART, Strategy.FAIL]
    assert "the script is the likely cause" in run.recorded(journal.Ended)[-1].reason


def test_a_script_that_fails_at_its_imports(place: Place) -> None:
    """An error in the first line is shown with its traceback, and nothing is tried again."""
    place.script("import no_such_module\n", "own.py")
    script = place.script("import own\n")
    run = place.start("--nproc-per-node", "2", script).end(1)
    assert "ModuleNotFoundError: No module named 'no_such_module'" in run.stderr
    assert f'{place.folder / "own.py"}", line 1' in run.stderr
    assert [event.strategy for event in run.recorded(journal.Decided)] == [Strategy.FAIL]


def test_a_script_that_succeeds_at_the_second_try(place: Place) -> None:
    """--max-restarts ends all ranks and starts them with the next TORCHELASTIC_RESTART_COUNT."""
    script = place.script(SECOND_TRY)
    run = place.start("--nproc-per-node", "2", "--max-restarts", "2", script).end(0)
    for restart in (0, 1):
        for rank in (0, 1):
            assert run.log(rank, restart=restart) == f"try {restart} of at most 2\n"
    [incident] = journal.incidents(run.events())
    assert (incident.strategy, incident.closed) == (Strategy.RESTART, True)
    assert "RuntimeError: only once" in incident.reason


def test_an_untouched_rank_that_is_killed(place: Place) -> None:
    """The signal is named; without restarts the job fails, and the others are ended."""
    script = place.script(
        "import os, time\n"
        "if os.environ['RANK'] == '1':\n    os.kill(os.getpid(), 9)\n"
        "time.sleep(600)\n"
    )
    run = place.start_quick(script, "--nproc-per-node", "3").end(1)
    assert "rank 1 was ended by signal 9 (SIGKILL)" in run.stderr


def test_a_rank_that_cannot_be_started(place: Place) -> None:
    """A log folder that cannot be made for one rank ends the job, and the ranks that were started.

    The rank in the way is neither the first nor the last of its node.
    """
    logs = place.folder / "logs"
    (logs / "attempt_0").mkdir(parents=True)
    (logs / "attempt_0" / "1").write_text("in the way")
    script = place.script("import time\ntime.sleep(600)\n")
    options = ("--log-dir", str(logs), "--nproc-per-node", "3")
    run = place.start_quick(script, *options).end(1)
    assert "rank 1 could not be started" in run.stderr
    assert str(logs) in run.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["missing.py"], "missing.py does not exist"),
        ([], "name the training script"),
        (["--nnodes", "0", "train.py"], "--nnodes '0': give a number"),
        (["--nnodes", "two", "train.py"], "--nnodes 'two': give a number"),
        (["--nnodes", "3:2", "train.py"], "--nnodes 3:2: give MIN:MAX"),
        (["--nnodes", "1:", "train.py"], "--nnodes '': give a number"),
        (["--nnodes", "0:2", "train.py"], "--nnodes '0': give a number"),
        (["--spares", "-1", "train.py"], "spares is -1"),
        (["--spare", "train.py"], "join with --coordinator HOST:PORT --spare"),
        (
            ["--nnodes", "2", "--node-rank", "0", "--spares", "1", "train.py"],
            "join with --coordinator HOST:PORT --spare",
        ),
        (["--nproc-per-node", "-1", "train.py"], "--nproc-per-node '-1': give a number"),
        (["--nproc-per-node", "gpu:2", "train.py"], "--nproc-per-node 'gpu:2'"),
        (["--max-restarts", "-1", "train.py"], "max_restarts is -1"),
        (["--checkpoint-every", "-1", "train.py"], "checkpoint_every is -1"),
        (["--checkpoint-every", "often", "train.py"], "'often': give steps, or auto"),
        (["--keep-last", "-1", "train.py"], "last is -1"),
        (["--keep-best", "3", "train.py"], "--keep-best '3': give N:NAME"),
        (["--keep-best", "x:loss", "train.py"], "--keep-best 'x:loss': give N:NAME"),
        (["--job-id", "No Good", "train.py"], "job id 'No Good'"),
        (["--job-id", "../../up", "train.py"], "job id '../../up'"),
        (["--master-port", "99999", "train.py"], "master port 99999"),
        (["--listen", "29400", "train.py"], "--listen '29400': give HOST:PORT"),
        (["--listen", "no.such.host.invalid:0", "train.py"], "no.such.host.invalid"),
        (["-r", "7", "train.py"], "--redirects '7'"),
        (["-m", "--no-python", "train"], "give one of them"),
        (["--nnodes", "2", "--node-rank", "2", "train.py"], "--node-rank 2: with"),
        (["--coordinator", "127.0.0.1:1"], f"set {names.ENV_SECRET}"),
        (["--no-such-option", "train.py"], "--no-such-option"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_command_line_that_cannot_work(place: Place, arguments: list[str], words: str) -> None:
    """Exit status 2, one readable line that names what is wrong, and no process is started."""
    place.script("raise SystemExit('was run')")
    command = [sys.executable, "-m", "rekindle.cli", "run", *arguments]
    said = subprocess.run(
        command, cwd=place.folder, env=place.environment(), capture_output=True, check=False
    )
    errors = said.stderr.decode()
    assert said.returncode == 2, errors
    assert words in errors
    assert "Traceback" not in errors
    assert "was run" not in errors
    assert not list(place.home.glob("jobs/*/ledger.jsonl"))


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port of this machine that somebody listens on."""
    with socket.create_server(("0.0.0.0", 0)) as server:
        yield server.getsockname()[1]


def test_a_port_in_use_for_the_coordinator(place: Place, taken_port: int) -> None:
    """--listen on a taken port is refused before anything is started."""
    script = place.script("")
    run = place.start("--listen", f"127.0.0.1:{taken_port}", script).end(2)
    assert f"cannot listen on 127.0.0.1:{taken_port}: Address already in use" in run.stderr
    assert run.events() == []


def test_a_port_in_use_for_the_ranks(place: Place, taken_port: int) -> None:
    """--master-port on a taken port fails the job with the port in the reason; no rank starts."""
    script = place.script("print('was run')")
    port = ("--master-port", str(taken_port))
    for run in (
        place.start(*port, "--max-restarts", "3", script),
        place.start_quick(script, *port, job_id="quick"),
    ):
        run.end(1)
        assert str(taken_port) in run.stderr
        assert "address already in use" in run.stderr.lower()
        assert "was run" not in run.stdout
        assert not run.recorded(journal.RanksStarted)


def test_one_job_id_is_one_job(place: Place) -> None:
    """A second `rekindle run` of a running job's id is refused, and the first goes on."""
    script = place.script("import sys\nprint('runs')\nopen('go').close()\n")
    os.mkfifo(place.folder / "go")
    run = place.start_quick(script)
    run.wait_for_output(0, "runs")
    second = place.start_quick(script)
    second.process.wait()
    assert second.process.returncode == 1
    assert "job job is being run by another process" in second.stderr
    (place.folder / "go").write_text("")
    run.end(0)


def test_a_job_id_is_resumed_as_its_next_attempt(place: Place) -> None:
    """The same id again, when the job has ended: the ledger goes on, with the next attempt."""
    script = place.script("import sys\nsys.exit(len(sys.argv) > 1)\n")
    place.start_quick(script, "--max-restarts", "0").end(0)
    run = place.start("--no-python", sys.executable, script, "fail").end(1)
    assert [event.attempt for event in run.recorded(journal.JobStarted)] == [0, 1]
    assert [event.outcome for event in run.recorded(journal.Ended)] == ["succeeded", "failed"]
    assert [event.seq for event in run.events()] == list(range(1, len(run.events()) + 1))
