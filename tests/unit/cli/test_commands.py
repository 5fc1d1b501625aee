"""The table of commands, and commands about a job that is over."""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from rekindle import names
from rekindle.cli import main as cli
from rekindle.recovery.journal import journal

KUBERNETES = ("render FILE", "check", "trace JOB")


def functions() -> list[str]:
    """Name the function of each command, and of each command of `rekindle kubernetes`."""
    below = [cli.command_parser().parse_args(["kubernetes", *line.split()]) for line in KUBERNETES]
    own = [each.function for each in cli.COMMANDS if each.function]
    return own + [options.function for options in below]


@pytest.mark.parametrize("named", functions())
def test_the_function_of_a_command_exists(named: str) -> None:
    """The function of each command exists; no type checker reads these names."""
    module, _, function = named.partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield a parser and those of all commands below it."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from parsers(below)


def test_help_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """No line of any --help is longer than a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    lines = [
        line for each in parsers(cli.command_parser()) for line in each.format_help().split("\n")
    ]
    assert [line for line in lines if len(line) > 80] == []


@pytest.mark.process
@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("rekindle incid", "incidents"),
        ("rekindle logs ni", "nightly"),
        ("rekindle logs --fo", "--follow"),
    ],
)
def test_a_shell_completes_commands_and_jobs(tmp_path: Path, line: str, found: str) -> None:
    """argcomplete's protocol: the shell passes the line, and reads the words at descriptor 8."""
    (tmp_path / "jobs" / "nightly").mkdir(parents=True)
    asked = {"COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE": "1"}
    command = [sys.executable, "-m", "rekindle.cli.main"]
    shell = ["bash", "-c", 'exec 8>"$0"; exec "$@"', str(tmp_path / "words"), *command]
    environment = os.environ | asked | {names.ENV_HOME: str(tmp_path), "_ARGCOMPLETE_IFS": "\n"}
    subprocess.run(shell, env=environment, check=True)
    assert (tmp_path / "words").read_text().split() == [found]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_code_for_a_shell_names_the_command(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The code goes to standard output."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["completion", shell])
    assert not ended.value.code
    assert "rekindle" in capsys.readouterr().out


def test_no_fault_for_a_job_that_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """`rekindle inject` refuses a job that is over, as `rekindle stop` does."""
    monkeypatch.setenv(names.ENV_HOME, str(tmp_path))
    (tmp_path / "jobs" / "job").mkdir(parents=True)
    (tmp_path / "jobs" / "job" / names.JOURNAL_FILE).touch()
    for command in (["inject", "job", "--rank", "0", "--kind", "kill"], ["stop", "job"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(command)
        assert ended.value.code == 1
        assert capfd.readouterr().err == "rekindle: job job does not run\n"


def test_the_status_is_that_of_the_newest_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """If the coordinator of a later attempt died, `status` does not show an earlier end."""
    monkeypatch.setenv(names.ENV_HOME, str(tmp_path))
    started = journal.JobStarted(
        seq=1, job_id="job", attempt=0, nodes=1, processes_per_node=1, pid=1
    )
    ended = journal.Ended(seq=2, outcome="failed", reason="a fault", finished=7)
    again = msgspec.structs.replace(started, seq=3, attempt=1)
    path = tmp_path / "jobs" / "job" / names.JOURNAL_FILE
    path.parent.mkdir(parents=True)
    for events, shown in (
        ((started, ended), "failed after 7 steps: a fault"),
        ((started, ended, again), "died after 0 steps: no coordinator"),
    ):
        path.write_bytes(b"".join(journal.encode(event) + b"\n" for event in events))
        with pytest.raises(SystemExit):
            cli.main(["status", "job"])
        assert capfd.readouterr().out == f"job job: {shown}\n"


@pytest.mark.parametrize("theirs", ["--fault", "--checkpoint", "--no", "--log"])
def test_a_scripts_option_may_begin_like_options_of_ours(theirs: str) -> None:
    """A script's option may start like several options of Rekindle.

    The default parser of Python 3.11 refuses --checkpoint as ambiguous, because it fits
    --checkpoint-every and --checkpoint-dir.
    """
    options = cli.command_parser().parse_args(["run", "train.py", theirs, "x"])
    assert (options.script, options.arguments) == ("train.py", [theirs, "x"])
