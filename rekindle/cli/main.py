"""The `rekindle` command."""

from __future__ import annotations

import argparse
import os
import sys

from rekindle import __version__
from rekindle.cli.command_line import add_commands, carry_out
from rekindle.cli.commands import COMMANDS
from rekindle.errors import RekindleError
from rekindle.extras import extra_of


def main(argv: list[str] | None = None) -> None:
    """Run the command line and exit with its status."""
    _open_closed_streams()
    options = _parser().parse_args(argv)
    try:
        try:
            status = carry_out(options)
        except ModuleNotFoundError as error:
            raise extra_of(error) from error
    except RekindleError as error:
        print(f"rekindle: {error}", file=sys.stderr)
        status = error.exit_status
    sys.exit(status)


def _open_closed_streams() -> None:
    """Give a standard stream that is closed a place; else the next file opened would be one."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rekindle", description="Training runs that outlive their faults."
    )
    parser.add_argument("--version", action="version", version=f"rekindle {__version__}")
    add_commands(parser, COMMANDS, metavar="COMMAND")
    return parser


if __name__ == "__main__":
    main()
