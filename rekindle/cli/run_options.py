"""The command line of `rekindle run`: torchrun's, and what Rekindle adds. Pure but for cpu counts.

Source of torchrun's options: torch/distributed/run.py (2.13).
"""

from __future__ import annotations

import argparse
import math
import os
import secrets
import time
from pathlib import Path
from typing import Literal

import msgspec

from rekindle import names
from rekindle.checkpoints.location import absolute
from rekindle.checkpoints.retention import Retention
from rekindle.errors import UsageError
from rekindle.job.spec import EntryKind, Framework, JobSpec, job_directory
from rekindle.profiling.switch import WORDS
from rekindle.protocol.agent import Inject, InjectionKind
from rekindle.recovery.faults.classification import EventSource
from rekindle.recovery.faults.tables.verdict import FaultOrigin, Severity
from rekindle.recovery.node_check.evidence import FACTOR, NodeCheckLimits
from rekindle.recovery.policy.interval import AUTO
from rekindle.recovery.policy.policy import Policy

# torchrun options about its rendezvous (Rekindle's coordinator does that work) and about its agent.
_IGNORED = (
    *("rdzv_backend", "rdzv_endpoint", "rdzv_conf", "start_method", "monitor_interval"),
    *("shutdown_timeout", "signals_to_handle", "event_log_handler", "logs_specs", "numa_binding"),
    *("local_ranks_filter", "duplicate_stdout_filters", "duplicate_stderr_filters"),
)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `rekindle run`."""
    _world(parser)
    _program(parser)
    _output(parser)
    _recovery(parser)
    _node_check(parser)
    ignored = parser.add_argument_group("accepted for torchrun's sake, without effect")
    for name in _IGNORED:
        option(ignored, name, default=None)
    option(ignored, "standalone", action="store_true")
    option(ignored, "virtual_local_rank", action="store_true")
    parser.add_argument("script", nargs="?", help="the training script, module or program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")


def option(where: argparse._ActionsContainer, name: str, *extra: str, **settings: object) -> None:
    """Add an option that may be spelt with dashes or underscores, as torchrun's may."""
    spellings = dict.fromkeys((f"--{name.replace('_', '-')}", f"--{name}"))
    where.add_argument(*extra, *spellings, **settings)  # type: ignore[arg-type]


def _world(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("world")
    said = "number of nodes, or MIN:MAX; on one machine they are simulated"
    option(group, "nnodes", default="1", metavar="NODES", help=said)
    option(
        group,
        "nproc_per_node",
        default="1",
        metavar="RANKS",
        help="ranks per node: a number, auto, cpu or gpu",
    )
    option(
        group,
        "spares",
        type=int,
        default=0,
        metavar="NODES",
        help="spare nodes that replace lost ones",
    )
    option(group, "spare", action="store_true", help="join as a spare node")
    said = "run this node only; the other nodes join"
    option(group, "node_rank", type=int, default=None, metavar="NODE", help=said)
    option(
        group,
        "coordinator",
        default=None,
        metavar="HOST:PORT",
        help="join the job of this coordinator",
    )
    said = "address of the coordinator; port 0: any free one"
    option(group, "listen", default=f"{names.LOOPBACK}:0", metavar="HOST:PORT", help=said)
    option(
        group,
        "join_timeout",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="how long to wait for the coordinator of --coordinator; 0: it must be there",
    )
    option(
        group,
        "local_addr",
        default=None,
        metavar="ADDRESS",
        help="address of this machine for other nodes",
    )
    option(group, "master_addr", default="", metavar="ADDRESS", help="address of the ranks' store")
    said = "port of the ranks' store; 0: any free one"
    option(group, "master_port", type=int, default=0, metavar="PORT", help=said)
    option(group, "rdzv_id", default=None, metavar="ID", help="the job's id, as --job-id")
    said = "the job's id; an existing job of this id resumes; default: a new id"
    option(group, "job_id", default=None, metavar="ID", help=said)


def _program(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("program")
    option(group, "module", "-m", action="store_true", help="the script is a module name")
    option(group, "no_python", action="store_true", help="the script is any program")
    frameworks = [each.value for each in Framework]
    said = "framework of the script"
    option(group, "framework", choices=frameworks, default=frameworks[0], help=said)
    option(
        group,
        "run_path",
        action="store_true",
        help="run the script with runpy.run_path, as by default",
    )
    option(
        group, "role", default="default", help="role name; it starts each printed line of a rank"
    )


def _output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    option(
        group,
        "log_dir",
        default=None,
        metavar="DIR",
        help="logs of ranks; default: logs in the job directory",
    )
    streams = "0 none, 1 stdout, 2 stderr, 3 both"
    said = f"streams that go only to files: {streams}"
    option(group, "redirects", "-r", default="0", metavar="STREAMS", help=said)
    said = f"streams that go to files and to the terminal: {streams}"
    option(group, "tee", "-t", default="0", metavar="STREAMS", help=said)


def _recovery(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("recovery")
    option(group, "policy", default=None, metavar="FILE", help="recovery policy, as YAML")
    said = "restarts of all ranks; default: the policy's number, else 0"
    option(group, "max_restarts", type=int, default=None, metavar="RESTARTS", help=said)
    said = "folder or s3:// location of checkpoints; default: checkpoints in the job directory"
    option(group, "checkpoint_dir", default=None, metavar="STORE", help=said)
    said = "steps between two checkpoints; 0: none; auto: Rekindle chooses the number"
    option(group, "checkpoint_every", default="0", metavar="STEPS", help=said)
    said = "keep this many of the newest checkpoints; 0: no such rule"
    option(group, "keep_last", type=int, default=0, metavar="CHECKPOINTS", help=said)
    said = "keep the first checkpoint of each interval of this many steps; 0: no such rule"
    option(group, "keep_every", type=int, default=0, metavar="STEPS", help=said)
    said = "keep the N checkpoints with the lowest (NAME) or highest (NAME:max) logged value"
    option(group, "keep_best", default="", metavar="N:NAME[:max]", help=said)
    said = "keep checkpoints that are younger than this; 0: no such rule"
    option(group, "keep_hours", type=float, default=0.0, metavar="HOURS", help=said)
    said = "steps between two snapshots in memory; 0: none"
    option(group, "snapshot_every", type=int, default=10, metavar="STEPS", help=said)
    said = "TOML file with your own entries for the fault tables"
    option(group, "fault_tables", default=None, metavar="FILE", help=said)
    said = "allow `rekindle inject` for this job"
    option(group, "allow_injection", action="store_true", help=said)


def _node_check(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("node check, before training, as dlrover-run's")
    said = "measure devices and links of each node; a faulty node takes no part"
    option(group, "network_check", action="store_true", help=said)
    said = "a slow node takes no part either; implies --network-check"
    option(group, "exclude_straggler", action="store_true", help=said)
    said = "a node is slow if its devices take this many times as long as others'"
    option(group, "compute_factor", type=float, default=FACTOR, metavar="FACTOR", help=said)
    said = "a node is slow if its links take this many times as long as others'"
    option(group, "link_factor", type=float, default=FACTOR, metavar="FACTOR", help=said)
    said = "how long a node may take for one task of the check"
    option(
        group,
        "node_check_timeout",
        type=float,
        default=NodeCheckLimits().timeout_s,
        metavar="SECONDS",
        help=said,
    )


# Ranks inherit the whole environment; others need these, on whatever machine they are.
_KEPT = (
    names.ENV_FAILOVER_GRACE,
    names.ENV_PROFILING_CAP_MB,
    names.ENV_PROFILING_FILE_MB,
    names.ENV_PROFILING_FLUSH_S,
)


def read_spec(options: argparse.Namespace) -> JobSpec:
    """Make the job's description from parsed options. Raises UsageError: one cannot be meant so."""
    if not options.script:
        raise UsageError("name the training script: rekindle run [options] train.py [arguments]")
    job_id = options.job_id or options.rdzv_id or _new_id()
    directory = job_directory(job_id)
    least, most = _nodes(options.nnodes)
    return JobSpec(
        job_id=job_id,
        entry=entry_kind(options),
        target=options.script,
        arguments=tuple(options.arguments),
        framework=Framework(options.framework),
        nodes=most,
        min_nodes=least,
        processes_per_node=_processes(options.nproc_per_node),
        spares=options.spares,
        environment={name: os.environ[name] for name in _KEPT if name in os.environ},
        working_directory=str(Path.cwd()),
        directory=str(directory),
        log_directory=str(Path(options.log_dir or directory / names.LOGS_DIRECTORY).absolute()),
        checkpoint_store=absolute(
            options.checkpoint_dir or str(directory / names.CHECKPOINT_DIRECTORY)
        ),
        snapshot_every=options.snapshot_every,
        checkpoint_every=_checkpoint_every(options.checkpoint_every),
        keep=_retention(options),
        master_addr=options.master_addr,
        master_port=options.master_port,
        role=options.role,
        redirects=_streams("redirects", options.redirects),
        tee=_streams("tee", options.tee),
        allow_injection=options.allow_injection,
        policy=_policy(options),
        network_check=options.network_check or options.exclude_straggler,
        exclude_straggler=options.exclude_straggler,
        node_check=_limits(options),
        fault_tables=str(Path(options.fault_tables).absolute()) if options.fault_tables else "",
    )


def add_people_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declare the options of one of the commands for people."""
    if name in ("status", "incidents", "nodes"):
        parser.add_argument("--json", action="store_true", help="print JSON")
    if name == "release-node":
        parser.add_argument(
            "node", metavar="NAME", help="the node's name, as rekindle nodes prints it"
        )
    if name == "report-fault":
        said = "node rank of the node in the job"
        option(parser, "node", type=int, required=True, metavar="NODE", help=said)
        said = "number of the device on the node; -1: none"
        option(parser, "device", type=int, default=-1, metavar="DEVICE", help=said)
        option(parser, "gone", action="store_true", help="the event is over")
        kinds = [source.value for source in EventSource]
        option(parser, "source", choices=kinds, required=True, help="what the event is")
        ranks = [severity.name.lower() for severity in Severity]
        option(parser, "severity", choices=ranks, help="severity of an Ascend code, by its driver")
        origins = [origin.value for origin in FaultOrigin]
        said = "what reported the Ascend code; default: chip with --device, else node"
        option(parser, "origin", choices=origins, help=said)
        said = "the fault code, XID number, line of the kernel's log, or condition (Type=Status)"
        parser.add_argument("what", metavar="WHAT", help=said)
    if name == "profile":
        parser.add_argument("switch", choices=("on", "off"), help="on: start to record; off: stop")
        said = f"kinds of records: some of {', '.join(WORDS)}; default: all; "
        said += "on leaves out communication"
        option(parser, "kinds", default="", metavar="KIND,...", help=said)
    if name == "approve":
        said = "the incident; 0: the one that waits"
        parser.add_argument("--incident", type=int, default=0, metavar="INCIDENT", help=said)
        parser.add_argument("--deny", action="store_true", help="refuse; the job ends")


def add_inject_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `rekindle inject`."""
    parser.add_argument("job", metavar="JOB", help="the job's id")
    kinds = [kind.value for kind in InjectionKind]
    said = "the rank that gets the fault"
    option(parser, "rank", type=int, required=True, metavar="RANK", help=said)
    option(parser, "kind", choices=kinds, required=True, help="the kind of fault")
    said = "the step of the fault, counted from 0; default: the next step"
    option(parser, "step", type=int, default=None, metavar="STEP", help=said)
    said = "length of the pause of a slow step"
    option(parser, "seconds", type=float, default=1.0, metavar="SECONDS", help=said)


def read_injection(options: argparse.Namespace) -> Inject:
    """Make the order from parsed options. Raises UsageError: one cannot be meant so."""
    if options.step is not None and options.step < 0:
        raise UsageError(f"--step {options.step}: steps are counted from 0")
    if not 0 <= options.seconds < math.inf:
        raise UsageError(f"--seconds {options.seconds}: give seconds from 0 on")
    return Inject(
        rank=options.rank,
        kind=InjectionKind(options.kind),
        step=options.step,
        seconds=options.seconds,
    )


def entry_kind(options: argparse.Namespace) -> EntryKind:
    """Tell what the positional argument names. Raises UsageError: -m and --no-python at once."""
    if options.module and options.no_python:
        raise UsageError("-m names a Python module and --no-python any program; give one of them")
    if options.module:
        return EntryKind.MODULE
    return EntryKind.PROGRAM if options.no_python else EntryKind.SCRIPT


def host_and_port(text: str, option_name: str) -> tuple[str, int]:
    """Split HOST:PORT. Raises UsageError: it is not of that form."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"{option_name} {text!r}: give HOST:PORT, such as 10.0.0.1:29400")
    return host, int(port)


def _checkpoint_every(text: str) -> int | Literal["auto"]:
    if text == AUTO:
        return AUTO
    try:
        return int(text)
    except ValueError as error:
        raise UsageError(f"--checkpoint-every {text!r}: give steps, or {AUTO}") from error


def _retention(options: argparse.Namespace) -> Retention:
    """Read which checkpoints are kept; without an option all. Raises UsageError."""
    best, _, metric = options.keep_best.partition(":")
    name, _, end = metric.rpartition(":") if metric.endswith(":max") else (metric, "", "")
    if options.keep_best and not (best.isdigit() and name):
        raise UsageError(f"--keep-best {options.keep_best!r}: give N:NAME, or N:NAME:max")
    try:
        return Retention(
            last=options.keep_last,
            every_steps=options.keep_every,
            best=int(best or 0),
            metric=name,
            highest=end == "max",
            hours=options.keep_hours,
        )
    except ValueError as error:
        raise UsageError(f"--keep-...: {error}") from error


def _limits(options: argparse.Namespace) -> NodeCheckLimits:
    try:
        return NodeCheckLimits(
            compute_factor=options.compute_factor,
            link_factor=options.link_factor,
            timeout_s=options.node_check_timeout,
        )
    except ValueError as error:
        raise UsageError(str(error)) from error


def _policy(options: argparse.Namespace) -> Policy:
    policy = Policy()
    if options.policy:
        from rekindle.recovery.policy.policy_file import read_policy

        policy = read_policy(Path(options.policy))
    if options.max_restarts is None:
        return policy
    try:
        return msgspec.structs.replace(policy, max_restarts=options.max_restarts)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _new_id() -> str:
    return time.strftime("run-%Y%m%d-%H%M%S-") + secrets.token_hex(3)


def _nodes(text: str) -> tuple[int, int]:
    first, colon, second = text.partition(":")
    least = _count("--nnodes", first)
    most = _count("--nnodes", second) if colon else least
    if least > most:
        raise UsageError(f"--nnodes {text}: give MIN:MAX, the smaller number first")
    return least, most


def _processes(text: str) -> int:
    if text == "cpu":
        return os.cpu_count() or 1
    if text in ("auto", "gpu"):
        import torch  # only here: torch takes a second to import, and the launcher needs no more

        devices = torch.cuda.device_count()
        if text == "gpu" and not devices:
            raise UsageError("--nproc-per-node gpu: this machine has no GPU that torch can use")
        return devices or os.cpu_count() or 1
    return _count("--nproc-per-node", text)


def _count(name: str, text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise UsageError(f"{name} {text!r}: give a number from 1 on")
    return int(text)


def _streams(name: str, text: str) -> int:
    if text not in ("0", "1", "2", "3"):
        raise UsageError(f"--{name} {text!r}: give 0 (none), 1 (stdout), 2 (stderr) or 3 (both)")
    return int(text)
