"""The options of `rekindle run`, torchrun's and Rekindle's own, and those of commands about a job.

Source of torchrun's options: torch/distributed/run.py (2.13).
"""

from __future__ import annotations

import argparse

from rekindle import names
from rekindle.job.spec import Framework
from rekindle.profiling.switch import WORDS
from rekindle.protocol.agent import InjectionKind
from rekindle.recovery.faults.classification import EventSource
from rekindle.recovery.faults.tables.verdict import FaultOrigin, Severity
from rekindle.recovery.node_check.evidence import FACTOR, NodeCheckLimits

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
    option(
        group,
        "nnodes",
        default="1",
        metavar="NODES",
        help="number of nodes, or MIN:MAX; on one machine they are simulated",
    )
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
    option(
        group,
        "node_rank",
        type=int,
        default=None,
        metavar="NODE",
        help="run this node only; the other nodes join",
    )
    option(
        group,
        "coordinator",
        default=None,
        metavar="HOST:PORT",
        help="join the job of this coordinator",
    )
    option(
        group,
        "listen",
        default=f"{names.LOOPBACK}:0",
        metavar="HOST:PORT",
        help="address of the coordinator; port 0: any free one",
    )
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
    option(
        group,
        "master_port",
        type=int,
        default=0,
        metavar="PORT",
        help="port of the ranks' store; 0: any free one",
    )
    option(group, "rdzv_id", default=None, metavar="ID", help="the job's id, as --job-id")
    option(
        group,
        "job_id",
        default=None,
        metavar="ID",
        help="the job's id; an existing job of this id resumes; default: a new id",
    )


def _program(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("program")
    option(group, "module", "-m", action="store_true", help="the script is a module name")
    option(group, "no_python", action="store_true", help="the script is any program")
    frameworks = [each.value for each in Framework]
    option(
        group,
        "framework",
        choices=frameworks,
        default=frameworks[0],
        help="framework of the script",
    )
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
    option(
        group,
        "redirects",
        "-r",
        default="0",
        metavar="STREAMS",
        help=f"streams that go only to files: {streams}",
    )
    option(
        group,
        "tee",
        "-t",
        default="0",
        metavar="STREAMS",
        help=f"streams that go to files and to the terminal: {streams}",
    )


def _recovery(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("recovery")
    option(group, "policy", default=None, metavar="FILE", help="recovery policy, as YAML")
    option(
        group,
        "max_restarts",
        type=int,
        default=None,
        metavar="RESTARTS",
        help="restarts of all ranks; default: the policy's number, else 0",
    )
    option(
        group,
        "checkpoint_dir",
        default=None,
        metavar="STORE",
        help="folder or s3:// location of checkpoints; default: checkpoints in the job directory",
    )
    option(
        group,
        "checkpoint_every",
        default="0",
        metavar="STEPS",
        help="steps between two checkpoints; 0: none; auto: Rekindle chooses the number",
    )
    option(
        group,
        "keep_last",
        type=int,
        default=0,
        metavar="CHECKPOINTS",
        help="keep this many of the newest checkpoints; 0: no such rule",
    )
    option(
        group,
        "keep_every",
        type=int,
        default=0,
        metavar="STEPS",
        help="keep the first checkpoint of each interval of this many steps; 0: no such rule",
    )
    option(
        group,
        "keep_best",
        default="",
        metavar="N:NAME[:max]",
        help="keep the N checkpoints with the lowest (NAME) or highest (NAME:max) logged value",
    )
    option(
        group,
        "keep_hours",
        type=float,
        default=0.0,
        metavar="HOURS",
        help="keep checkpoints that are younger than this; 0: no such rule",
    )
    option(
        group,
        "snapshot_every",
        type=int,
        default=10,
        metavar="STEPS",
        help="steps between two snapshots in memory; 0: none",
    )
    option(
        group,
        "fault_tables",
        default=None,
        metavar="FILE",
        help="TOML file with your own entries for the fault tables",
    )
    option(
        group, "allow_injection", action="store_true", help="allow `rekindle inject` for this job"
    )


def _node_check(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("node check, before training, as dlrover-run's")
    option(
        group,
        "network_check",
        action="store_true",
        help="measure devices and links of each node; a faulty node takes no part",
    )
    option(
        group,
        "exclude_straggler",
        action="store_true",
        help="a slow node takes no part either; implies --network-check",
    )
    option(
        group,
        "compute_factor",
        type=float,
        default=FACTOR,
        metavar="FACTOR",
        help="a node is slow if its devices take this many times as long as others'",
    )
    option(
        group,
        "link_factor",
        type=float,
        default=FACTOR,
        metavar="FACTOR",
        help="a node is slow if its links take this many times as long as others'",
    )
    said = "how long a node may take for one task of the check"
    option(
        group,
        "node_check_timeout",
        type=float,
        default=NodeCheckLimits().timeout_s,
        metavar="SECONDS",
        help=said,
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
        option(
            parser,
            "node",
            type=int,
            required=True,
            metavar="NODE",
            help="node rank of the node in the job",
        )
        option(
            parser,
            "device",
            type=int,
            default=-1,
            metavar="DEVICE",
            help="number of the device on the node; -1: none",
        )
        option(parser, "gone", action="store_true", help="the event is over")
        kinds = [source.value for source in EventSource]
        option(parser, "source", choices=kinds, required=True, help="what the event is")
        ranks = [severity.name.lower() for severity in Severity]
        option(parser, "severity", choices=ranks, help="severity of an Ascend code, by its driver")
        origins = [origin.value for origin in FaultOrigin]
        option(
            parser,
            "origin",
            choices=origins,
            help="what reported the Ascend code; default: chip with --device, else node",
        )
        parser.add_argument(
            "what",
            metavar="WHAT",
            help="the fault code, XID number, line of the kernel's log, or condition (Type=Status)",
        )
    if name == "profile":
        parser.add_argument("switch", choices=("on", "off"), help="on: start to record; off: stop")
        said = f"kinds of records: some of {', '.join(WORDS)}; default: all; "
        said += "on leaves out communication"
        option(parser, "kinds", default="", metavar="KIND,...", help=said)
    if name == "approve":
        parser.add_argument(
            "--incident",
            type=int,
            default=0,
            metavar="INCIDENT",
            help="the incident; 0: the one that waits",
        )
        parser.add_argument("--deny", action="store_true", help="refuse; the job ends")


def add_inject_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `rekindle inject`."""
    parser.add_argument("job", metavar="JOB", help="the job's id")
    kinds = [kind.value for kind in InjectionKind]
    option(
        parser, "rank", type=int, required=True, metavar="RANK", help="the rank that gets the fault"
    )
    option(parser, "kind", choices=kinds, required=True, help="the kind of fault")
    option(
        parser,
        "step",
        type=int,
        default=None,
        metavar="STEP",
        help="the step of the fault, counted from 0; default: the next step",
    )
    option(
        parser,
        "seconds",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="length of the pause of a slow step",
    )
