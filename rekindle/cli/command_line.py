"""The rows that a command line is declared with, and the parser that is made of them."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple


class Option(NamedTuple):
    """An option or an operand. settings: as argparse's add_argument() takes them."""

    names: tuple[str, ...]
    settings: dict[str, Any]


class Group(NamedTuple):
    """Options below a title. Without a title, they exclude each other."""

    title: str
    options: Sequence[Option]


Rows = Sequence[Option | Group]


class Command(NamedTuple):
    """A command, or an action of one.

    run: the module in rekindle.cli and its function, "module:function", which carries the command
    out. It is imported when it is called, because --help must not wait for it. Without one, the
    function of the command above carries the action out. description: by default the help.
    """

    name: str
    help: str
    run: str = ""
    rows: Rows = ()
    actions: Sequence[Command] = ()
    description: str = ""


def argument(*names: str, **settings: Any) -> Option:
    """Return an option with these names, or the operand of this name."""
    return Option(names, settings)


def option(name: str, *extra: str, **settings: Any) -> Option:
    """Return an option that may be spelt with dashes or underscores, as torchrun's may."""
    spellings = dict.fromkeys((f"--{name.replace('_', '-')}", f"--{name}"))
    return Option((*extra, *spellings), settings)


JOB = argument("job", help="the job's id")
JSON = argument("--json", action="store_true", help="print JSON")


def declare(parser: argparse._ActionsContainer, rows: Rows) -> None:
    """Add the rows to a parser."""
    for row in rows:
        if isinstance(row, Option):
            parser.add_argument(*row.names, **row.settings)
        elif row.title:
            declare(parser.add_argument_group(row.title), row.options)
        else:
            declare(parser.add_mutually_exclusive_group(), row.options)


def add_commands(
    parser: argparse.ArgumentParser, commands: Sequence[Command], **settings: Any
) -> None:
    """Add the commands to a parser, each with its actions."""
    added = parser.add_subparsers(required=True, **settings)
    for command in commands:
        text = command.description or f"{command.help[:1].upper()}{command.help[1:]}."
        one = added.add_parser(command.name, help=command.help, description=text)
        declare(one, command.rows)
        if command.run:
            one.set_defaults(run=command.run)
        if command.actions:
            add_commands(one, command.actions, metavar="ACTION", dest="action")


def carry_out(options: argparse.Namespace) -> int:
    """Call the function of the command that was given; return its exit status."""
    module, _, function = options.run.partition(":")
    found = importlib.import_module(f"rekindle.cli.{module}")
    status: int = getattr(found, function)(options)
    return status
