"""Wrong command lines: status 2, one readable line, and no new process.

`rekindle.cli.main.main` runs in this process. tests/integration/run has one real process.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle import names
from rekindle.cli import main as cli

RUN = [
    (["missing.py"], "missing.py does not exist"),
    ([], "name the training script"),
    (["--nnodes", "0", "train.py"], "--nnodes '0': give a number"),
    (["--nnodes", "two", "train.py"], "--nnodes 'two': give a number"),
    (["--nnodes", "3:2", "train.py"], "--nnodes 3:2: give MIN:MAX"),
    (["--nnodes", "1:", "train.py"], "--nnodes '': give a number"),
    (["--nnodes", "0:2", "train.py"], "--nnodes '0': give a number"),
    (["--spares", "-1", "train.py"], "spares is -1"),
    (["--spare", "train.py"], "joins with --coordinator HOST:PORT --spare"),
    (
        ["--nnodes", "2", "--node-rank", "0", "--spares", "1", "train.py"],
        "joins with --coordinator HOST:PORT --spare",
    ),
    (["--nproc-per-node", "-1", "train.py"], "--nproc-per-node '-1': give a number"),
    (["--nproc-per-node", "gpu:2", "train.py"], "--nproc-per-node 'gpu:2'"),
    (["--max-restarts", "-1", "train.py"], "max_restarts is -1"),
    (["--checkpoint-every", "-1", "train.py"], "checkpoint_every is -1"),
    (["--checkpoint-every", "often", "train.py"], "'often': give steps, or auto"),
    (["--keep-last", "-1", "train.py"], "--keep-last is -1; give at least 0"),
    (["--keep-every", "-1", "train.py"], "--keep-every is -1; give at least 0"),
    (["--keep-best", "0:loss", "train.py"], "--keep-best '0:loss': give N:NAME"),
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
    (["--coordinator", "127.0.0.1:1"], f"{names.ENV_SECRET} is not set"),
    (["--no-such-option", "train.py"], "--no-such-option"),
    (["--compute-factor", "1", "train.py"], "node check: compute_factor is 1.0; give above 1"),
    (["--fault-tables", "own.toml", "train.py"], "own.toml:4: "),
    (["--checkpoint-dir", "gs://bucket/a", "train.py"], "s3://bucket/prefix, not at gs://"),
]
INJECT = [
    (["nowhere", "--rank", "0", "--kind", "kill"], "there is no job 'nowhere'"),
    (["job", "--rank", "0", "--kind", "flood"], "invalid choice: 'flood'"),
    (["job", "--rank", "0", "--kind", "kill", "--step", "-3"], "--step -3: give 0 or more"),
    (["job", "--rank", "0", "--kind", "slow", "--seconds", "nan"], "--seconds nan: give 0 or more"),
]
DIAGNOSE = [
    (["empty"], "does not contain records"),
    (["nothing"], "neither a job on this machine nor a folder"),
    (["./none"], "neither a job on this machine nor a folder"),
]
REFUSED = [
    ([command, *arguments], words)
    for command, lines in (("run", RUN), ("inject", INJECT), ("diagnose", DIAGNOSE))
    for arguments, words in lines
]
BAD_TABLE = """
[[exit]]
codes = [3]
kind = "bad luck"
says = "our scripts say so when memory runs short"
"""


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Create a home without jobs, and a working directory with a script."""
    monkeypatch.setenv(names.ENV_LOG_FORMAT, "short")
    (tmp_path / "train.py").write_text("raise SystemExit('was run')")
    (tmp_path / "own.toml").write_text(BAD_TABLE)
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv(names.ENV_HOME, str(tmp_path / "home"))
    monkeypatch.delenv(names.ENV_SECRET, raising=False)
    monkeypatch.chdir(tmp_path)


def refusal(capfd: pytest.CaptureFixture[str], *command: str) -> str:
    """Run a command that ends with status 2, and return its standard error."""
    with pytest.raises(SystemExit) as ended:
        cli.main([*command])
    printed = capfd.readouterr()
    assert (ended.value.code, printed.out) == (2, ""), printed.err
    return printed.err


@pytest.mark.parametrize(
    ("command", "words"), REFUSED, ids=[" ".join(command) for command, _ in REFUSED]
)
def test_a_command_line_that_cannot_work(
    command: list[str], words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The message names the mistake; the command starts no rank and writes no journal."""
    errors = refusal(capfd, *command)
    assert words in errors
    assert "Traceback" not in errors
    assert "was run" not in errors
    assert not list(tmp_path.glob("home/jobs/*/journal.jsonl"))


def test_a_spare_has_no_node_rank(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The command refuses `--spare` together with `--node-rank`."""
    monkeypatch.setenv(names.ENV_SECRET, "x")
    errors = refusal(capfd, "run", "--coordinator", "127.0.0.1:1", "--spare", "--node-rank", "1")
    assert (
        errors
        == "rekindle: a spare does not have a node rank; give either --spare or --node-rank\n"
    )


def test_no_coordinator_where_a_node_wants_to_join(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """If no coordinator answers, the message has its address, and the status is 1.

    The command line itself is correct.
    """
    monkeypatch.setenv(names.ENV_SECRET, "x")
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", "--coordinator", "127.0.0.1:1", "--join-timeout", "0"])
    assert ended.value.code == 1
    assert "coordinator (127.0.0.1:1) does not answer: " in capfd.readouterr().err
