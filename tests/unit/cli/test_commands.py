"""The rows of the command line name the functions that carry the commands out."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

from rekindle.cli.command_line import Command, add_commands
from rekindle.cli.commands import COMMANDS


def named(commands: tuple[Command, ...], above: str = "") -> Iterator[tuple[str, str]]:
    """Return each command without actions, with the function that carries it out."""
    for command in commands:
        run = command.run or above
        if command.actions:
            yield from named(tuple(command.actions), run)
        else:
            yield command.name, run


@pytest.mark.parametrize(("name", "run"), [*named(COMMANDS)])
def test_each_command_has_its_function(name: str, run: str) -> None:
    """A function that is named takes the parsed options; a row that names none is a mistake."""
    module, _, function = run.partition(":")
    found = getattr(importlib.import_module(f"rekindle.cli.{module}"), function)
    assert list(found.__annotations__) == ["options", "return"], name


def test_an_action_has_its_own_function_or_that_of_its_command() -> None:
    """The parser tells which function carries out what was given."""
    parser = argparse.ArgumentParser()
    add_commands(parser, COMMANDS)
    given = {
        "checkpoints ls store": "checkpoints:run",
        "kubernetes check": "kubernetes:check",
        "kubernetes trace job": "kubernetes_trace:run",
        "stop job": "jobs:stop",
    }
    assert {line: parser.parse_args(line.split()).run for line in given} == given


@pytest.mark.process
def test_help_waits_for_no_large_import() -> None:
    """The rows are declared without what the commands need."""
    code = (
        "import sys; from rekindle.cli import main; main._parser(); "
        "print({'torch', 'prefect', 'kubernetes', 'rich', 'boto3'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
