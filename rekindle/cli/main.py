"""The `rekindle` command."""

from __future__ import annotations

import argparse
import importlib
import os
import select
import signal
import sys
from collections.abc import Callable
from typing import NamedTuple

from rekindle import __version__
from rekindle.cli import options as declare
from rekindle.cli.run_options import add_run_arguments
from rekindle.errors import RekindleError, extra_of


class Command(NamedTuple):
    """One command.

    options: each function declares some. function: carries the command out; empty: its options
    name the function. The module is imported then, so that --help does not wait. about: a sentence
    for the command's own --help; empty: as `help`.
    """

    name: str
    help: str
    options: tuple[Callable[[argparse.ArgumentParser], None], ...]
    function: str = ""
    about: str = ""


COMMANDS = (
    Command(
        "run",
        "run a distributed training script (torchrun's command line)",
        (add_run_arguments,),
        "rekindle.cli.run:run",
        about="Start a job's coordinator and agents, and run a script as its ranks.",
    ),
    Command(
        "inject",
        "break a running job on purpose",
        (declare.job, declare.fault),
        "rekindle.cli.jobs:inject",
        about="Have a rank of a job on this machine suffer a fault, to see it recover.",
    ),
    Command(
        "policy",
        "check a policy, and print it as ModelArts or MindCluster write theirs",
        (declare.policy,),
        "rekindle.cli.simulate:policy",
        about="Read a policy, or a job of ModelArts or MindCluster, and print it.",
    ),
    Command(
        "simulate",
        "tell what a recovery policy would be worth",
        (declare.simulation,),
        "rekindle.cli.simulate:simulate",
        about="Run a recovery policy against faults drawn from published statistics.",
    ),
    Command(
        "checkpoints",
        "list, verify, copy, prune, export and import checkpoints",
        (declare.checkpoints,),
        "rekindle.cli.checkpoints:run",
        about="See to the checkpoints of a store: a folder, an s3:// location, or a job's.",
    ),
    Command(
        "kubernetes",
        "print a job as the manifests of a cluster, check whether it could be there, trace it",
        (declare.kubernetes,),
        about="See what a job would be in a cluster, and ask the cluster about it.",
    ),
    Command(
        "diagnose",
        "tell where ranks' time goes, and who is slow",
        (declare.diagnosis,),
        "rekindle.cli.diagnose:run",
        about="Read the records of light profiling: of a job, or of a folder, also TaskD's.",
    ),
    Command(
        "npu-check",
        "tell what ranks on Ascend NPUs lack on this machine",
        (declare.as_json,),
        "rekindle.cli.jobs:npu_check",
        about="Look for torch-npu, the torch of its version, CANN, the driver and devices.",
    ),
    Command(
        "status", "tell where a job is", (declare.job, declare.as_json), "rekindle.cli.jobs:status"
    ),
    Command(
        "incidents",
        "list a job's incidents and what was done about them",
        (declare.job, declare.as_json),
        "rekindle.cli.jobs:incidents",
    ),
    Command(
        "approve",
        "approve (or refuse) what a job waits to be allowed to do",
        (declare.job, declare.approval),
        "rekindle.cli.jobs:approve",
    ),
    Command(
        "report-fault",
        "tell a job of trouble that a monitor or you have seen",
        (declare.job, declare.health_event),
        "rekindle.cli.jobs:report_fault",
    ),
    Command(
        "profile",
        "have a job's ranks write down where their time goes, or no more",
        (declare.job, declare.profiling),
        "rekindle.cli.jobs:profile",
    ),
    Command(
        "stop", "stop a job; its last words are written", (declare.job,), "rekindle.cli.jobs:stop"
    ),
    Command(
        "nodes",
        "list the nodes that jobs had trouble with",
        (declare.as_json, declare.cluster),
        "rekindle.cli.jobs:nodes",
    ),
    Command(
        "release-node",
        "let an isolated node be used again",
        (declare.node, declare.cluster),
        "rekindle.cli.jobs:release_node",
    ),
)


def main(argv: list[str] | None = None) -> None:
    """Run the command line and exit with its status."""
    _open_closed_streams()
    try:
        try:
            status = _status_of(argv)
        finally:
            print(end="", flush=True)  # there may be no sys.stdout to flush
    except BrokenPipeError:
        unread = _unread_outputs()
        if not unread:
            raise
        for fd in unread:  # Python flushes at its exit, which would fail again
            os.dup2(os.open(os.devnull, os.O_WRONLY), fd)
        status = 128 + signal.SIGPIPE
    sys.exit(status)


def _status_of(argv: list[str] | None) -> int:
    options = _parser().parse_args(argv)
    module, _, function = options.function.partition(":")
    try:
        try:
            status: int = getattr(importlib.import_module(module), function)(options)
        except ModuleNotFoundError as error:
            raise extra_of(error) from error
    except RekindleError as error:
        print(f"rekindle: {error}", file=sys.stderr)
        return error.exit_status
    return status


def _unread_outputs() -> list[int]:
    """Which of standard output and error are pipes that nothing reads any more, such as `head`."""
    poll = select.poll()
    for fd in (1, 2):
        poll.register(fd, 0)
    return [fd for fd, events in poll.poll(0) if events & (select.POLLERR | select.POLLHUP)]


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
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for each in COMMANDS:
        about = each.about or f"{each.help.capitalize()}."
        command = commands.add_parser(each.name, help=each.help, description=about)
        command.set_defaults(function=each.function)
        for add_options in each.options:
            add_options(command)
    return parser


if __name__ == "__main__":
    main()
