"""The `rekindle` command."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from rekindle import __version__
from rekindle.cli import run_options as arguments
from rekindle.cli.options import add_arguments as add_checkpoint_arguments
from rekindle.cli.options import (
    add_cluster_arguments,
    add_diagnose_arguments,
    add_kubernetes_arguments,
)
from rekindle.cli.simulate_options import add_arguments as add_simulate_arguments
from rekindle.errors import RekindleError, UsageError
from rekindle.extras import extra_of


def main(argv: list[str] | None = None) -> None:
    """Run the command line and exit with its status."""
    _open_closed_streams()
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        try:
            status = options.command(options)
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
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="run a distributed training script (torchrun's command line)",
        description="Start a job's coordinator and agents, and run a script as its ranks.",
    )
    arguments.add_run_arguments(run)
    run.set_defaults(command=_run)
    inject = commands.add_parser(
        "inject",
        help="break a running job on purpose",
        description="Have a rank of a job on this machine suffer a fault, to see it recover.",
    )
    arguments.add_inject_arguments(inject)
    inject.set_defaults(command=_inject)
    policy = commands.add_parser(
        "policy",
        help="check a policy, and print it as ModelArts or MindCluster write theirs",
        description="Read a policy, or a job of ModelArts or MindCluster, and print it.",
    )
    policy.add_argument("file", help="YAML or JSON")
    policy.add_argument("--to", choices=("own", "modelarts", "mindcluster"), default="own")
    policy.set_defaults(command=_policy)
    simulate = commands.add_parser(
        "simulate",
        help="tell what a recovery policy would be worth",
        description="Run a recovery policy against faults drawn from published statistics.",
    )
    add_simulate_arguments(simulate)
    simulate.set_defaults(command=_simulate)
    checkpoints = commands.add_parser(
        "checkpoints",
        help="list, verify, copy, prune, export and import checkpoints",
        description="See to the checkpoints of a store: a folder, an s3:// location, or a job's.",
    )
    add_checkpoint_arguments(checkpoints)
    checkpoints.set_defaults(command=_checkpoints)
    kubernetes = commands.add_parser(
        "kubernetes",
        help="print a job as the manifests of a cluster, check whether it could be there, trace it",
        description="See what a job would be in a cluster, and ask the cluster about it.",
    )
    add_kubernetes_arguments(kubernetes)
    kubernetes.set_defaults(command=_kubernetes)
    diagnose = commands.add_parser(
        "diagnose",
        help="tell where ranks' time goes, and who is slow",
        description="Read the records of light profiling: of a job, or of a folder, also TaskD's.",
    )
    add_diagnose_arguments(diagnose)
    diagnose.set_defaults(command=_diagnose)
    npu = commands.add_parser(
        "npu-check",
        help="tell what ranks on Ascend NPUs lack on this machine",
        description="Look for torch-npu, the torch of its version, CANN, the driver and devices.",
    )
    npu.add_argument("--json", action="store_true", help="print JSON")
    npu.set_defaults(command=_npu_check)
    for name, about, job in _PEOPLE:
        command = commands.add_parser(name, help=about, description=f"{about.capitalize()}.")
        if job:
            command.add_argument("job", help="the job's id")
        arguments.add_people_arguments(name, command)
        if name in ("nodes", "release-node"):
            add_cluster_arguments(command)
        command.set_defaults(command=_people, name=name)
    return parser


# What people ask from the shell: (command, what it does, whether it is about one job).
_PEOPLE = (
    ("status", "tell where a job is", True),
    ("incidents", "list a job's incidents and what was done about them", True),
    ("approve", "approve (or refuse) what a job waits to be allowed to do", True),
    ("report-fault", "tell a job of trouble that a monitor or you have seen", True),
    ("profile", "have a job's ranks write down where their time goes, or no more", True),
    ("stop", "stop a job; its last words are written", True),
    ("nodes", "list the nodes that jobs had trouble with", False),
    ("release-node", "let an isolated node be used again", False),
)


def _people(options: argparse.Namespace) -> int:
    from rekindle.cli import jobs as people

    status: int = getattr(people, options.name.replace("-", "_"))(options)
    return status


def _run(options: argparse.Namespace) -> int:
    from rekindle.cli import (
        run as launcher,
    )  # imports follow the command: --help must not wait for them

    return launcher.join(options) if options.coordinator else launcher.launch(options)


def _policy(options: argparse.Namespace) -> int:
    from rekindle.recovery.policy.policy_file import PolicyFormat, read_policy, write_policy

    print(write_policy(read_policy(Path(options.file)), PolicyFormat(options.to)), end="")
    return 0


def _simulate(options: argparse.Namespace) -> int:
    from rekindle.cli import simulate as command

    return command.simulate(options)


def _checkpoints(options: argparse.Namespace) -> int:
    from rekindle.cli import checkpoints

    return checkpoints.run(options)


def _kubernetes(options: argparse.Namespace) -> int:
    if options.action == "trace":
        from rekindle.cli import kubernetes_trace as trace

        return trace.run(options)
    if options.action == "check":
        from rekindle.cli import kubernetes as preflight

        return preflight.check(options)
    from rekindle.cli import kubernetes

    return kubernetes.run(options)


def _diagnose(options: argparse.Namespace) -> int:
    from rekindle.cli import diagnose

    return diagnose.run(options)


def _npu_check(options: argparse.Namespace) -> int:
    from rekindle.cli import npu

    return npu.npu_check(options)


def _inject(options: argparse.Namespace) -> int:
    from rekindle.engines.client import JobClient
    from rekindle.job.spec import JobDirectory, job_directory

    directory = JobDirectory(job_directory(options.job))
    fault = arguments.read_injection(options)
    endpoint = directory.endpoint()
    if endpoint is None:
        raise UsageError(f"there is no job {options.job!r} in {directory.path.parent}")
    JobClient(endpoint, directory.secret()).inject(fault)
    return 0


if __name__ == "__main__":
    main()
