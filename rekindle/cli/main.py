"""Implement the `rekindle` command."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import select
import signal
import sys

from rekindle import names
from rekindle.cli import options as declare
from rekindle.cli.checkpoint_options import CHECKPOINTS
from rekindle.cli.local_options import DIAGNOSIS, POLICY, RUN, SIMULATION, of_variables
from rekindle.cli.options import Command
from rekindle.console import say
from rekindle.errors import RekindleError, extra_of

COMMANDS = (
    Command(
        "run",
        "run a distributed training script (torchrun's command line)",
        RUN,
        "rekindle.cli.run:run",
        about="Start the coordinator and the agents of a job, and run a script as its ranks.",
    ),
    Command(
        "adapt",
        "print the diff that brings a training script into a Session",
        declare.ADAPTATION,
        "rekindle.cli.adapt.command:run",
        about="Read a training script, and print the diff that gives it a Session. The script is "
        "not run.",
    ),
    Command(
        "inject",
        "inject a fault into a running job",
        (declare.JOB, *declare.FAULT),
        "rekindle.cli.jobs:inject",
        about="Inject a fault into a rank of a job that runs on this machine.",
    ),
    Command(
        "policy",
        "check a policy, and print it in a format of ModelArts or MindCluster",
        POLICY,
        "rekindle.cli.simulate:policy",
        about="Read a policy, or a job of ModelArts or MindCluster, and print the policy.",
    ),
    Command(
        "simulate",
        "estimate how much training time a recovery policy saves",
        SIMULATION,
        "rekindle.cli.simulate:simulate",
        about="Simulate a recovery policy with faults drawn from published statistics.",
    ),
    Command(
        "checkpoints",
        "list, verify, copy, pin, prune, export and import checkpoints",
        function="rekindle.cli.checkpoints:run",
        about="Manage the checkpoints of a store: a folder, an s3:// location, or a job's.",
        below=CHECKPOINTS,
    ),
    Command(
        "kubernetes",
        "print the manifests of a job, check a cluster for it, or trace it",
        about="Print the objects of a job in a cluster, check the cluster, or trace the job.",
        below=declare.KUBERNETES,
    ),
    Command(
        "diagnose",
        "report how ranks spend their time, and which ranks are slow",
        DIAGNOSIS,
        "rekindle.cli.diagnose:run",
        about="Read the records of light profiling of a job, or of a folder (also TaskD's).",
    ),
    Command(
        "npu-check",
        "report what is missing on this machine for ranks on Ascend NPUs",
        (declare.AS_JSON,),
        "rekindle.cli.jobs:npu_check",
        about="Look for torch-npu, torch of the same version, CANN, the driver and devices.",
    ),
    Command(
        "status",
        "print the state of a job and of its ranks",
        (declare.JOB, declare.AS_JSON),
        "rekindle.cli.jobs:status",
    ),
    Command(
        "incidents",
        "list the incidents of a job and what Rekindle did about each",
        (declare.JOB, declare.AS_JSON),
        "rekindle.cli.jobs:incidents",
    ),
    Command(
        "approve",
        "approve or refuse the recovery that a job asks a person to approve",
        (declare.JOB, *declare.APPROVAL),
        "rekindle.cli.jobs:approve",
    ),
    Command(
        "report-fault",
        "report a health event of a node or device to a job",
        (declare.JOB, *declare.HEALTH_EVENT),
        "rekindle.cli.jobs:report_fault",
    ),
    Command(
        "profile",
        "switch light profiling of a job's ranks on or off",
        (declare.JOB, *declare.PROFILING),
        "rekindle.cli.jobs:profile",
    ),
    Command(
        "drain",
        "move a node of a job to another agent while the job trains",
        (declare.JOB, *declare.DRAIN),
        "rekindle.cli.jobs:drain",
    ),
    Command(
        "stop",
        "stop a job; it writes a final checkpoint first if its policy has dump",
        (declare.JOB,),
        "rekindle.cli.jobs:stop",
    ),
    Command(
        "jobs",
        "list the jobs of this machine and user, the newest first",
        declare.JOBS,
        "rekindle.cli.job_files:list_jobs",
    ),
    Command(
        "logs",
        "print the output of a job's ranks",
        (declare.JOB, *declare.LOGS),
        "rekindle.cli.job_files:logs",
    ),
    Command(
        "report",
        "print the report of a job: times, incidents, the fault that ended it",
        (declare.JOB,),
        "rekindle.cli.job_files:report",
    ),
    Command(
        "completion",
        "print the code that completes commands, options and job ids in a shell",
        declare.SHELL,
        "rekindle.cli.completion:run",
        about="Print the code for your shell's start file.",
    ),
    Command(
        "setup",
        "create what Rekindle's flows need on a Prefect server",
        declare.SETUP,
        "rekindle.cli.setup.command:run",
        about="Create work pools, queues, block types, example blocks, deployments and automations "
        "on a Prefect server. A second call changes nothing.",
    ),
    Command(
        "nodes",
        "list the nodes on which jobs had faults",
        (declare.AS_JSON, declare.CLUSTER),
        "rekindle.cli.jobs:nodes",
    ),
    Command(
        "release-node",
        "allow jobs to use an isolated node again",
        (declare.NODE, declare.CLUSTER),
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
            print(end="", flush=True)  # sys.stdout may be None
    except BrokenPipeError:
        unread = _unread_outputs()
        if not unread:
            raise
        for fd in unread:  # Python flushes again at its exit, which would fail again
            os.dup2(os.open(os.devnull, os.O_WRONLY), fd)
        status = 128 + signal.SIGPIPE
    sys.exit(status)


def _status_of(argv: list[str] | None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = command_parser()
    if "_ARGCOMPLETE" in os.environ:
        importlib.import_module("rekindle.cli.completion").complete(parser)
    options = parser.parse_args(argv)
    module, _, function = options.function.partition(":")
    try:
        options = _with_variables(options, argv)
        try:
            status: int | None = getattr(importlib.import_module(module), function)(options)
        except ModuleNotFoundError as error:
            raise extra_of(error) from error
    except RekindleError as error:
        say(str(error), logging.ERROR)
        return error.exit_status
    return status or 0


def _with_variables(options: argparse.Namespace, argv: list[str]) -> argparse.Namespace:
    """Return the options of `rekindle run` with those in torchrun's variables.

    torchrun has no --coordinator, so the variables of a pod do not describe such a command.
    Raises UsageError: a variable is invalid.
    """
    if argv[0] == "run":
        if not options.coordinator and (more := of_variables(os.environ)):
            argv = ["run", *more, *argv[1:]]
            options = command_parser().parse_args(argv)
        options.given = declare.given(RUN, argv[1:])
    return options


def _unread_outputs() -> list[int]:
    """Return the standard outputs that are pipes without a reader, for example after `head`."""
    poll = select.poll()
    for fd in (1, 2):
        poll.register(fd, 0)
    return [fd for fd, events in poll.poll(0) if events & (select.POLLERR | select.POLLHUP)]


def _open_closed_streams() -> None:
    """Open /dev/null for each closed standard stream; a file opened later would become one."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def command_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="rekindle", description="Keep distributed training runs alive."
    )
    parser.add_argument("--version", action="version", version=f"rekindle {names.VERSION}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for each in COMMANDS:
        _add(commands, each)
    return parser


def _add(commands: argparse._SubParsersAction[argparse.ArgumentParser], new: Command) -> None:
    about = new.about or f"{new.help[0].upper()}{new.help[1:]}."
    # Abbreviations would also match the script's own options (Python 3.11).
    parser = commands.add_parser(new.name, help=new.help, description=about, allow_abbrev=False)
    declare.add(parser, new.arguments)
    if new.function:
        parser.set_defaults(function=new.function)
    if new.below:
        below = parser.add_subparsers(required=True, metavar="ACTION", dest="action")
        for each in new.below:
            _add(below, each)


if __name__ == "__main__":
    main()
