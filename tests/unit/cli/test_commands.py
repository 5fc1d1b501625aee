"""The table of commands, and a command about a job that is over."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from rekindle import names
from rekindle.cli import main as cli

KUBERNETES = ("render FILE", "check", "trace JOB")


def functions() -> list[str]:
    """Name the function of each command, and of each command of `rekindle kubernetes`."""
    below = [cli._parser().parse_args(["kubernetes", *line.split()]) for line in KUBERNETES]
    own = [each.function for each in cli.COMMANDS if each.function]
    return own + [options.function for options in below]


@pytest.mark.parametrize("named", functions())
def test_the_function_of_a_command_exists(named: str) -> None:
    """The command line imports it by its name, which no type checker reads."""
    module, _, function = named.partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_no_fault_for_a_job_that_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`rekindle inject` refuses it as `rekindle stop` does."""
    monkeypatch.setenv(names.ENV_HOME, str(tmp_path))
    (tmp_path / "jobs" / "job").mkdir(parents=True)
    (tmp_path / "jobs" / "job" / names.JOURNAL_FILE).touch()
    for command in (["inject", "job", "--rank", "0", "--kind", "kill"], ["stop", "job"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(command)
        assert ended.value.code == 1
        assert capsys.readouterr().err == "rekindle: job job does not run\n"
