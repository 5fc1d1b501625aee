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
    parser = command_parser()
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


def command_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="rekindle", description="Keep distributed training runs alive."
    )
    parser.add_argument("--version", action="version", version=f"rekindle {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="run a distributed training script (torchrun's command line)",
        description="Start the coordinator and the agents of a job, and run a script as its ranks.",
    )
    arguments.add_run_arguments(run)
    run.set_defaults(command=_run)
    inject = commands.add_parser(
        "inject",
        help="inject a fault into a running job",
        description="Inject a fault into a rank of a job that runs on this machine.",
    )
    arguments.add_inject_arguments(inject)
    inject.set_defaults(command=_inject)
    policy = commands.add_parser(
        "policy",
        help="check a policy, and print it in a format of ModelArts or MindCluster",
        description="Read a policy, or a job of ModelArts or MindCluster, and print the policy.",
    )
    policy.add_argument("file", metavar="FILE", help="the policy or the job, as YAML or JSON")
    formats = ("own", "modelarts", "mindcluster")
    said = "the format to print: Rekindle's own, or that of a job of the platform; default: own"
    policy.add_argument("--to", choices=formats, default="own", help=said)
    policy.set_defaults(command=_policy)
    simulate = commands.add_parser(
        "simulate",
        help="estimate how much training time a recovery policy saves",
        description="Simulate a recovery policy with faults drawn from published statistics.",
    )
    add_simulate_arguments(simulate)
    simulate.set_defaults(command=_simulate)
    checkpoints = commands.add_parser(
        "checkpoints",
        help="list, verify, copy, prune, export and import checkpoints",
        description="Manage the checkpoints of a store: a folder, an s3:// location, or a job's.",
    )
    add_checkpoint_arguments(checkpoints)
    checkpoints.set_defaults(command=_checkpoints)
    kubernetes = commands.add_parser(
        "kubernetes",
        help="print the manifests of a job, check a cluster for it, or trace it",
        description="Print the objects of a job in a cluster, check the cluster, or trace the job.",
    )
    add_kubernetes_arguments(kubernetes)
    kubernetes.set_defaults(command=_kubernetes)
    diagnose = commands.add_parser(
        "diagnose",
        help="report where the time of ranks goes, and which ranks are slow",
        description="Read the records of light profiling of a job, or of a folder (also TaskD's).",
    )
    add_diagnose_arguments(diagnose)
    diagnose.set_defaults(command=_diagnose)
    npu = commands.add_parser(
        "npu-check",
        help="report what is missing on this machine for ranks on Ascend NPUs",
        description="Look for torch-npu, torch of the same version, CANN, the driver and devices.",
    )
    npu.add_argument("--json", action="store_true", help="print JSON")
    npu.set_defaults(command=_npu_check)
    for name, about, job in _PEOPLE:
        said = f"{about[0].upper()}{about[1:]}."
        command = commands.add_parser(name, help=about, description=said)
        if job:
            command.add_argument("job", metavar="JOB", help="the job's id")
        arguments.add_people_arguments(name, command)
        if name in ("nodes", "release-node"):
            add_cluster_arguments(command)
        command.set_defaults(command=_people, name=name)
    return parser


# What people ask from the shell: (command, what it does, whether it is about one job).
_PEOPLE = (
    ("status", "print the state of a job and of its ranks", True),
    ("incidents", "list the incidents of a job and what Rekindle did about each", True),
    ("approve", "approve or refuse the recovery that a job asks a person to approve", True),
    ("report-fault", "report a health event of a node or device to a job", True),
    ("profile", "switch light profiling of a job's ranks on or off", True),
    ("stop", "stop a job; it writes a final checkpoint first if its policy has dump", True),
    ("nodes", "list the nodes on which jobs had faults", False),
    ("release-node", "allow jobs to use an isolated node again", False),
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
    from rekindle.cli.run_spec import read_injection
    from rekindle.engines.client import JobClient
    from rekindle.job.spec import JobDirectory, job_directory

    directory = JobDirectory(job_directory(options.job))
    fault = read_injection(options)
    endpoint = directory.endpoint()
    if endpoint is None:
        raise UsageError(f"there is no job {options.job!r} in {directory.path.parent}")
    JobClient(endpoint, directory.secret()).inject(fault)
    return 0


if __name__ == "__main__":
    main()
