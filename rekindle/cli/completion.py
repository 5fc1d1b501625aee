"""Complete commands, options and job ids in bash, zsh and fish, with argcomplete."""

from __future__ import annotations

import argparse

import argcomplete
from argcomplete.shell_integration import shellcode

from rekindle.job.spec import home


def run(options: argparse.Namespace) -> None:
    """Print the code for the start file of a shell."""
    print(shellcode(["rekindle"], shell=options.shell))


def complete(parser: argparse.ArgumentParser) -> None:
    """Print the completions that the shell asks for, and end this process."""
    _complete_jobs(parser)
    argcomplete.autocomplete(parser)


def _complete_jobs(parser: argparse.ArgumentParser) -> None:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                _complete_jobs(below)
        elif action.dest == "job":
            action.completer = _job_ids  # type: ignore[attr-defined]  # argcomplete reads it


def _job_ids(prefix: str, **_: object) -> list[str]:
    return [path.name for path in (home() / "jobs").glob("*") if path.name.startswith(prefix)]
