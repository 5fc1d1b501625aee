"""Declare the options of `rekindle run`, `policy`, `simulate` and `diagnose`.

These commands work without a running job. `rekindle run` has torchrun's options, as in
torch/distributed/run.py (2.13), and its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from rekindle.cli.options import AS_JSON, Group, argument, option
from rekindle.console import AUTO, Form
from rekindle.errors import UsageError
from rekindle.job.spec import Framework
from rekindle.recovery.node_check.evidence import FACTOR, NodeCheckLimits

MAX_RESTARTS = 0  # without a policy file, as in torchrun; the default of a Policy is higher

# Options of torchrun's agent.
_IGNORED = (
    *("start_method", "monitor_interval"),
    *("shutdown_timeout", "signals_to_handle", "event_log_handler", "logs_specs", "numa_binding"),
    *("local_ranks_filter", "duplicate_stdout_filters", "duplicate_stderr_filters"),
)

# Options that torchrun reads in variables PET_NAME, if the command line lacks them.
_OF_VARIABLES = (
    *("nnodes", "nproc_per_node", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf"),
    *("max_restarts", "monitor_interval", "start_method", "event_log_handler", "role", "log_dir"),
    *("redirects", "tee", "local_ranks_filter", "duplicate_stdout_filters", "node_rank"),
    *("duplicate_stderr_filters", "master_addr", "master_port", "local_addr"),
    *("signals_to_handle", "shutdown_timeout"),
)
_FLAGS = ("standalone", "module", "no_python", "run_path", "virtual_local_rank")

_WORLD = (
    option(
        "nnodes",
        default="1",
        metavar="NODES",
        help="number of nodes, or MIN:MAX; without an address of another machine they are "
        "simulated on this one",
    ),
    option(
        "nproc_per_node",
        default="1",
        metavar="RANKS",
        help="ranks per node: a number, cpu, gpu (CUDA devices), or auto (CUDA devices, otherwise "
        "CPU cores); NPUs are not counted",
    ),
    option(
        "spares",
        type=int,
        default=0,
        metavar="NODES",
        help="spare nodes that replace lost ones",
    ),
    option("spare", action="store_true", help="join as a spare node"),
    option(
        "node_rank",
        type=int,
        default=None,
        metavar="NODE",
        help="run this node only; the other nodes join",
    ),
    option(
        "coordinator",
        default=None,
        metavar="HOST:PORT",
        help="join the job of this coordinator",
    ),
    option(
        "listen",
        default=None,
        metavar="HOST:PORT",
        help="address of the coordinator, on this machine; port 0: any free one; default: "
        "127.0.0.1:0",
    ),
    option(
        "join_timeout",
        type=float,
        default=None,
        metavar="SECONDS",
        help="time to wait for the coordinator on another machine; 0: it must run already; "
        "default: 0 with --coordinator, otherwise 600, as in torchrun",
    ),
    option(
        "local_addr",
        default=None,
        metavar="ADDRESS",
        help="address of this machine for other nodes; default: the address on the route to them, "
        "or 127.0.0.1 if all nodes are here",
    ),
    option(
        "master_addr",
        default="",
        metavar="ADDRESS",
        help="with several nodes: address of the machine of node 0, which hosts the coordinator; "
        "with --listen or one node: address of the ranks' store",
    ),
    option(
        "master_port",
        type=int,
        default=0,
        metavar="PORT",
        help="port at --master-addr; default: 29500 for the coordinator, any free one for the "
        "ranks' store",
    ),
    option(
        "rdzv_endpoint",
        default=None,
        metavar="HOST[:PORT]",
        help="address of one of the machines, which hosts the coordinator; give it on all "
        "machines; default port: 29400",
    ),
    option(
        "rdzv_backend",
        default=None,
        metavar="BACKEND",
        help="c10d: the machine that has the address of --rdzv-endpoint hosts the coordinator; "
        "static: that of node rank 0; default: static with --node-rank, otherwise c10d",
    ),
    option(
        "rdzv_conf",
        default=None,
        metavar="KEY=VALUE,...",
        help="is_host: whether this machine hosts the coordinator; join_timeout: seconds to wait "
        "for it; other keys have no effect",
    ),
    option(
        "standalone",
        action="store_true",
        help="all nodes are on this machine; --rdzv-endpoint and --master-addr meet no machine",
    ),
    option("rdzv_id", default=None, metavar="ID", help="the job's id, as --job-id"),
    option(
        "job_id",
        default=None,
        metavar="ID",
        help="the job's id; an existing job of this id resumes; default: a new id",
    ),
)

_FRAMEWORKS = [each.value for each in Framework]
_PROGRAM = (
    option("module", "-m", action="store_true", help="the script is a module name"),
    option("no_python", action="store_true", help="the script is any program"),
    option(
        "framework",
        choices=_FRAMEWORKS,
        default=_FRAMEWORKS[0],
        help="framework of the script",
    ),
    option(
        "run_path",
        action="store_true",
        help="run the script with runpy.run_path; this is the default",
    ),
    option("role", default="default", help="role name; it starts each printed line of a rank"),
)

_STREAMS = "0 none, 1 stdout, 2 stderr, 3 both"
_OUTPUT = (
    option(
        "log_format",
        choices=(AUTO, *(each.value for each in Form)),
        default="",
        help="form of the lines; default: REKINDLE_LOG_FORMAT, otherwise auto: short on a "
        "terminal, long elsewhere",
    ),
    option(
        "log_dir",
        default=None,
        metavar="DIR",
        help="logs of ranks; default: logs in the job directory",
    ),
    option(
        "redirects",
        "-r",
        default="0",
        metavar="STREAMS",
        help=f"streams that go only to files: {_STREAMS}; default: both go to files and to the "
        "terminal",
    ),
    option(
        "tee",
        "-t",
        default="0",
        metavar="STREAMS",
        help=f"streams that go to files and to the terminal: {_STREAMS}",
    ),
)

_RECOVERY = (
    option("policy", default=None, metavar="FILE", help="recovery policy, as YAML"),
    option(
        "max_restarts",
        type=int,
        default=None,
        metavar="RESTARTS",
        help="restarts of all ranks; default: the number of the --policy file, "
        f"without a file {MAX_RESTARTS}, as in torchrun",
    ),
    option(
        "checkpoint_dir",
        default=None,
        metavar="STORE",
        help="folder or s3:// location of checkpoints; default: checkpoints in the job directory",
    ),
    option(
        "resume_from",
        default=None,
        metavar="STORE",
        help="begin with the newest checkpoint of this folder, s3:// location or job; without "
        "effect when this job has a checkpoint",
    ),
    option(
        "checkpoint_every",
        default="0",
        metavar="STEPS",
        help="steps between two checkpoints; with 0 the job writes none, with auto Rekindle "
        "chooses the number",
    ),
    option(
        "keep_last",
        type=int,
        default=0,
        metavar="CHECKPOINTS",
        help="keep this many of the newest checkpoints; 0: no such rule",
    ),
    option(
        "keep_every",
        type=int,
        default=0,
        metavar="STEPS",
        help="keep the first checkpoint of each interval of this many steps; 0: no such rule",
    ),
    option(
        "keep_best",
        default="",
        metavar="N:NAME[:max]",
        help="keep the N checkpoints with the lowest (NAME) or highest (NAME:max) logged value",
    ),
    option(
        "keep_hours",
        type=float,
        default=0.0,
        metavar="HOURS",
        help="keep checkpoints that are younger than this; 0: no such rule",
    ),
    option(
        "snapshot_every",
        type=int,
        default=10,
        metavar="STEPS",
        help="steps between two snapshots in memory; 0: none",
    ),
    option(
        "fault_tables",
        default=None,
        metavar="FILE",
        help="TOML file with your own entries for the fault tables",
    ),
    option("allow_injection", action="store_true", help="allow `rekindle inject` for this job"),
)

_NODE_CHECK = (
    option(
        "network_check",
        action="store_true",
        help="measure devices and links of each node; the job excludes a faulty node",
    ),
    option(
        "exclude_straggler",
        action="store_true",
        help="exclude slow nodes also; implies --network-check",
    ),
    option(
        "compute_factor",
        type=float,
        default=FACTOR,
        metavar="FACTOR",
        help="a node is slow if its devices take this many times as long as others'",
    ),
    option(
        "link_factor",
        type=float,
        default=FACTOR,
        metavar="FACTOR",
        help="a node is slow if its links take this many times as long as others'",
    ),
    option(
        "node_check_timeout",
        type=float,
        default=NodeCheckLimits().timeout_s,
        metavar="SECONDS",
        help="time limit of a node for one task of the check",
    ),
)

# The options and arguments of `rekindle run`.
RUN = (
    Group("world", _WORLD),
    Group("program", _PROGRAM),
    Group("output", _OUTPUT),
    Group("recovery", _RECOVERY),
    Group("node check before training, as in dlrover-run", _NODE_CHECK),
    Group(
        "accepted for compatibility with torchrun, without effect",
        (
            *(option(name, default=None, metavar="VALUE") for name in _IGNORED),
            option("virtual_local_rank", action="store_true"),
        ),
    ),
    argument("script", nargs="?", help="the training script, module or program"),
    argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script"),
)

# The options of `rekindle policy`.
POLICY = (
    argument("file", metavar="FILE", help="the policy or the job, as YAML or JSON"),
    argument(
        "--to",
        choices=("own", "modelarts", "mindcluster"),
        default="own",
        help="the format to print: own is Rekindle's format, the others are the format of a job on "
        "that platform; default: own",
    ),
)

# The options of `rekindle simulate`.
SIMULATION = (
    argument("--policy", type=Path, metavar="FILE", required=True, help="the policy, as YAML"),
    argument(
        "--compare", type=Path, metavar="FILE", help="another policy, which meets the same faults"
    ),
    Group(
        "world",
        (
            argument("--nodes", type=int, required=True, metavar="NODES", help="nodes that train"),
            argument(
                "--devices-per-node",
                type=int,
                default=8,
                metavar="DEVICES",
                help="devices of each node",
            ),
            argument(
                "--spares",
                type=int,
                metavar="NODES",
                help="number of spare nodes; default: without a limit",
            ),
            argument(
                "--min-nodes",
                type=int,
                default=0,
                metavar="NODES",
                help="fewest nodes with which training continues; 0: all",
            ),
        ),
    ),
    Group(
        "faults",
        (
            argument(
                "--faults",
                default="llama3",
                metavar="MIX|FILE",
                help="fault statistics: llama3, rsc1, rsc2, byterobust, or a file of your own",
            ),
            argument(
                "--times",
                type=Path,
                metavar="FILE",
                help="durations of recoveries, as TOML; its entries replace the shipped ones "
                "(measured, published or assumed)",
            ),
            argument(
                "--checkpoint-every",
                type=float,
                metavar="SECONDS",
                help="time between two checkpoints; default: the best one",
            ),
        ),
    ),
    Group(
        "runs",
        (
            argument("--days", type=float, default=30.0, metavar="DAYS", help="length of a run"),
            argument(
                "--runs", type=int, default=20, metavar="RUNS", help="number of simulated runs"
            ),
            argument(
                "--seed",
                type=int,
                default=0,
                metavar="SEED",
                help="seed of the faults; the same seed draws the same faults",
            ),
        ),
    ),
    argument("--json", type=Path, metavar="FILE", help="write the result as JSON"),
    argument("--plot", type=Path, metavar="FILE.png", help="write a plot of the result"),
)

# The options of `rekindle diagnose`.
DIAGNOSIS = (
    argument("job", metavar="JOB|DIR", help="a job's id, or a folder of records"),
    argument("--steps", default="", metavar="FIRST:LAST", help="steps to report; default: all"),
    argument(
        "--per-node",
        type=int,
        metavar="RANKS",
        help="ranks of a node; default: the job's number, 1 for a folder",
    ),
    argument("--trace", metavar="FILE", help="write a trace of these steps for Perfetto or Chrome"),
    argument(
        "--picture", metavar="FILE", help="write a heat map of ranks and steps, as PNG or SVG"
    ),
    AS_JSON,
)


def of_variables(environment: Mapping[str, str]) -> list[str]:
    """Return the options in torchrun's PET_ variables. A command line has priority over them.

    Raises UsageError: the variable of a flag is not a number.
    """
    found = [
        f"--{name.replace('_', '-')}={environment[_variable(name)]}"
        for name in _OF_VARIABLES
        if environment.get(_variable(name))
    ]
    for name in _FLAGS:
        value = environment.get(_variable(name)) or "0"
        if not value.isdecimal():
            raise UsageError(f"{_variable(name)} is {value!r}; give 1 or 0")
        found += [f"--{name.replace('_', '-')}"] if int(value) else []
    return found


def _variable(option: str) -> str:
    return f"PET_{option.upper()}"
