"""Declare the command line of `rekindle run`: torchrun's options, and Rekindle's own.

Torchrun's options are those in torch/distributed/run.py (2.13).
"""

from __future__ import annotations

import argparse

from rekindle import names
from rekindle.cli.options import option
from rekindle.job.spec import Framework
from rekindle.recovery.node_check.evidence import FACTOR, NodeCheckLimits

# Options of torchrun's rendezvous, which Rekindle's coordinator replaces, and of torchrun's agent.
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
    ignored = parser.add_argument_group("accepted for compatibility with torchrun, without effect")
    for name in _IGNORED:
        option(ignored, name, default=None)
    option(ignored, "standalone", action="store_true")
    option(ignored, "virtual_local_rank", action="store_true")
    parser.add_argument("script", nargs="?", help="the training script, module or program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")


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
        help="time to wait for the coordinator of --coordinator; 0: it must run already",
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
        help="run the script with runpy.run_path; this is the default",
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
        help=(
            "steps between two checkpoints; with 0 the job writes none, with auto Rekindle "
            "chooses the number"
        ),
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
    group = parser.add_argument_group("node check before training, as in dlrover-run")
    option(
        group,
        "network_check",
        action="store_true",
        help="measure devices and links of each node; the job excludes a faulty node",
    )
    option(
        group,
        "exclude_straggler",
        action="store_true",
        help="exclude slow nodes also; implies --network-check",
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
    said = "time limit of a node for one task of the check"
    option(
        group,
        "node_check_timeout",
        type=float,
        default=NodeCheckLimits().timeout_s,
        metavar="SECONDS",
        help=said,
    )
