"""Declare the options of all commands except `rekindle run`.

This module imports no more modules than the options of `rekindle run`, so that --help is fast.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

from rekindle.engines.kubernetes.manifests.settings import WorkloadKind
from rekindle.profiling.switch import WORDS
from rekindle.protocol.agent import InjectionKind
from rekindle.recovery.faults.classification import EventSource
from rekindle.recovery.faults.tables.verdict import FaultOrigin, Severity


def option(where: argparse._ActionsContainer, name: str, *extra: str, **settings: object) -> None:
    """Add an option whose name accepts dashes or underscores, as torchrun's options do."""
    spellings = dict.fromkeys((f"--{name.replace('_', '-')}", f"--{name}"))
    where.add_argument(*extra, *spellings, **settings)  # type: ignore[arg-type]


def job(parser: argparse.ArgumentParser) -> None:
    """Declare the job of a command."""
    parser.add_argument("job", metavar="JOB", help="the job's id")


def as_json(parser: argparse.ArgumentParser) -> None:
    """Declare --json."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def node(parser: argparse.ArgumentParser) -> None:
    """Declare the node of a command."""
    parser.add_argument("node", metavar="NAME", help="the node's name, as rekindle nodes prints it")


def policy(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `rekindle policy`."""
    parser.add_argument("file", metavar="FILE", help="the policy or the job, as YAML or JSON")
    formats = ("own", "modelarts", "mindcluster")
    said = (
        "the format to print: own is Rekindle's format, the others are the format of a job on "
        "that platform; default: own"
    )
    parser.add_argument("--to", choices=formats, default="own", help=said)


def approval(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `rekindle approve`."""
    parser.add_argument(
        "--incident",
        type=int,
        default=0,
        metavar="INCIDENT",
        help="the incident; 0: the one that waits",
    )
    parser.add_argument("--deny", action="store_true", help="refuse; the job ends")


def profiling(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `rekindle profile`."""
    parser.add_argument("switch", choices=("on", "off"), help="on: start to record; off: stop")
    said = f"kinds of records, separated by commas: {', '.join(WORDS)}. The default is all kinds; "
    said += "for on it is all kinds except communication"
    option(parser, "kinds", default="", metavar="KIND,...", help=said)


def health_event(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `rekindle report-fault`."""
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
    option(parser, "source", choices=kinds, required=True, help="the kind of the event")
    ranks = [severity.name.lower() for severity in Severity]
    option(parser, "severity", choices=ranks, help="severity of an Ascend code, from its driver")
    origins = [origin.value for origin in FaultOrigin]
    option(
        parser,
        "origin",
        choices=origins,
        help=(
            "the component that reported the Ascend code; default: chip with --device, "
            "otherwise node"
        ),
    )
    parser.add_argument(
        "what",
        metavar="WHAT",
        help="the fault code, XID number, line of the kernel's log, or condition (Type=Status)",
    )


def fault(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `rekindle inject`."""
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


_STORE = "a folder, an s3:// location, or a job's id"
_SOURCE = f"{_STORE}, or the reference of a published one"


def checkpoints(parser: argparse.ArgumentParser) -> None:
    """Declare the sub-commands of `rekindle checkpoints`."""
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")
    action = functools.partial(_action, actions)
    ls = action("ls", "list the checkpoints of a store, newest first")
    ls.add_argument("store", help=_STORE)
    as_json(ls)
    verify = action(
        "verify", "read every byte, and name the damaged files; the status is 1 if there are any"
    )
    verify.add_argument("store", help=_STORE)
    verify.add_argument(
        "steps", nargs="*", type=int, metavar="STEP", help="the steps to verify; default: all"
    )
    as_json(verify)
    pull = action("pull", "copy a verified checkpoint from a store into a folder")
    pull.add_argument("source", metavar="STORE", help=_SOURCE)
    pull.add_argument(
        "target", metavar="DIR", help="the target folder; the command creates it if it is missing"
    )
    push = action("push", "copy a verified checkpoint from a folder into a store")
    push.add_argument("source", metavar="DIR", help="a folder of checkpoints, or a job's id")
    push.add_argument("target", metavar="STORE", help="a folder, or an s3:// location")
    prune = action("prune", "remove the checkpoints that are older than the newest valid ones")
    prune.add_argument("store", help=_STORE)
    prune.add_argument(
        "--keep",
        type=int,
        required=True,
        metavar="CHECKPOINTS",
        help="number of checkpoints to keep",
    )
    prune.add_argument(
        "--dry-run",
        action="store_true",
        help="print what the command would remove, and remove nothing",
    )
    pin = action("pin", "protect the checkpoint of a step against pruning")
    pin.add_argument(
        "--hours", type=float, metavar="HOURS", help="how long the pin lasts; default: until unpin"
    )
    unpin = action("unpin", "remove a step's pin")
    for each in (pin, unpin):
        each.add_argument("store", help=_STORE)
        each.add_argument("step", type=int, metavar="STEP", help="the step of the checkpoint")
        each.add_argument("--name", default="user", help="name of the pin; a step may have several")
    export = action("export", "write the state of a checkpoint for torch.load or torch's DCP")
    export.add_argument("store", help=_SOURCE)
    export.add_argument("out", metavar="OUT", help="the file (torch) or folder (dcp) to make")
    export.add_argument(
        "--format", choices=("torch", "dcp"), required=True, help="format of the output"
    )
    export.add_argument(
        "--only",
        action="append",
        metavar="NAME",
        help="export only this object, such as model; may be given several times",
    )
    for each in (pull, push, export):
        each.add_argument(
            "--step",
            type=int,
            metavar="STEP",
            help="the step of the checkpoint; default: the newest intact one",
        )
    _add_import(
        action("import", "create a checkpoint from a torch.save file or a folder of torch's DCP")
    )


def _action(
    actions: argparse._SubParsersAction[argparse.ArgumentParser], name: str, about: str
) -> argparse.ArgumentParser:
    return actions.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")


def _add_import(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help="a file of torch.save, or a folder of DCP")
    parser.add_argument("store", metavar="STORE", help="a folder, or an s3:// location")
    parser.add_argument("--job-id", required=True, help="the job that resumes from the checkpoint")
    parser.add_argument(
        "--step",
        type=int,
        metavar="STEPS",
        help="finished steps; default: the number in the source",
    )
    parser.add_argument(
        "--take",
        action="append",
        default=[],
        metavar="NAME=KEY",
        help="an object of the Session and the key of its state, such as model=net; may be given "
        "several times; default: the object's name is the key",
    )
    parser.add_argument(
        "--add",
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="the state of an object that the source lacks; may be given several times",
    )
    parser.add_argument(
        "--device", default="cpu", help="where the Session has its model: cpu, cuda or npu"
    )


_ACCESS = "file with the access to a cluster"
_JOB_FILE = "YAML: the fields of a training job, kubernetes among them"


def kubernetes(parser: argparse.ArgumentParser) -> None:
    """Declare the sub-commands of `rekindle kubernetes`."""
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    about = "print all objects of a job in a cluster, with secrets hidden"
    render = _action(actions, "render", about)
    render.set_defaults(function="rekindle.cli.kubernetes:run")
    render.add_argument("file", help=_JOB_FILE)
    render.add_argument(
        "--avoid",
        action="append",
        default=[],
        metavar="NODE",
        help="a node that the pods avoid; may be given several times",
    )
    about = (
        "check whether a cluster has everything that a job needs; the status is 1 if something "
        "is missing"
    )
    check = _action(actions, "check", about)
    check.set_defaults(function="rekindle.cli.kubernetes:check")
    check.add_argument("file", nargs="?", help=f"{_JOB_FILE}; default: any job of the kind")
    check.add_argument(
        "--kubeconfig",
        default="",
        metavar="FILE",
        help=f"{_ACCESS}; default: KUBECONFIG",
    )
    check.add_argument(
        "--context",
        default="",
        metavar="NAME",
        help="context of that file; default: its current one",
    )
    check.add_argument("--namespace", help="namespace to check; default: the job's")
    as_json(check)
    kinds = [kind.value for kind in WorkloadKind]
    for each in (render, check):
        each.add_argument("--kind", choices=kinds, help="kind of the workload; default: the file's")
        each.add_argument("--job-id", metavar="ID", help="the job's id; default: the job's name")
    about = "switch MindCluster's profiling of a job, or print what is on"
    trace = _action(actions, "trace", about)
    trace.set_defaults(function="rekindle.cli.cluster:trace")
    job(trace)
    which = trace.add_mutually_exclusive_group()
    which.add_argument(
        "--on",
        metavar="KIND,...",
        help=(
            f"kinds to record, separated by commas: {', '.join(WORDS)}. MindCluster switches all "
            "kinds except the first together"
        ),
    )
    which.add_argument("--off", action="store_true", help="record nothing")
    trace.add_argument("--namespace", default="default", help="the job's namespace")
    trace.add_argument(
        "--kubeconfig",
        metavar="FILE",
        default="",
        help=f"{_ACCESS}; default: KUBECONFIG, ~/.kube/config, or the service account of a pod",
    )
    trace.add_argument(
        "--context", metavar="NAME", default="", help="context of that file; default: its own"
    )
    trace.add_argument(
        "--clusterd",
        metavar="HOST:PORT",
        default="",
        help=(
            "address of ClusterD; default: its usual address in a pod, otherwise the job's "
            "ConfigMap"
        ),
    )


def cluster(parser: argparse.ArgumentParser) -> None:
    """Declare the options that select a cluster, for commands whose default is this machine."""
    cluster = parser.add_argument_group("a cluster, instead of this machine")
    cluster.add_argument(
        "--kubeconfig",
        default="",
        metavar="FILE",
        help=f"{_ACCESS}; default: KUBECONFIG, ~/.kube/config, or the service account of a pod",
    )
    cluster.add_argument(
        "--context", default="", metavar="NAME", help="context of that file; default: its own"
    )
    cluster.add_argument("--namespace", default="", help="namespace of the jobs; default: default")


def diagnosis(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `rekindle diagnose`."""
    parser.add_argument("job", metavar="JOB|DIR", help="a job's id, or a folder of records")
    parser.add_argument(
        "--steps", default="", metavar="FIRST:LAST", help="steps to report; default: all"
    )
    parser.add_argument(
        "--per-node",
        type=int,
        metavar="RANKS",
        help="ranks of a node; default: the job's number, 1 for a folder",
    )
    parser.add_argument(
        "--trace", metavar="FILE", help="write a trace of these steps for Perfetto or Chrome"
    )
    parser.add_argument(
        "--picture", metavar="FILE", help="write a heat map of ranks and steps, as PNG or SVG"
    )
    as_json(parser)


def simulation(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `rekindle simulate`."""
    parser.add_argument(
        "--policy", type=Path, metavar="FILE", required=True, help="the policy, as YAML"
    )
    parser.add_argument(
        "--compare", type=Path, metavar="FILE", help="another policy, which meets the same faults"
    )
    world = parser.add_argument_group("world")
    world.add_argument("--nodes", type=int, required=True, metavar="NODES", help="nodes that train")
    world.add_argument(
        "--devices-per-node", type=int, default=8, metavar="DEVICES", help="devices of each node"
    )
    world.add_argument(
        "--spares",
        type=int,
        metavar="NODES",
        help="number of spare nodes; default: without a limit",
    )
    world.add_argument(
        "--min-nodes",
        type=int,
        default=0,
        metavar="NODES",
        help="fewest nodes with which training continues; 0: all",
    )
    faults = parser.add_argument_group("faults")
    faults.add_argument(
        "--faults",
        default="llama3",
        metavar="MIX|FILE",
        help="fault statistics: llama3, rsc1, rsc2, byterobust, or a file of your own",
    )
    faults.add_argument(
        "--times",
        type=Path,
        metavar="FILE",
        help="durations of recoveries, as TOML; default: measured ones",
    )
    faults.add_argument(
        "--checkpoint-every",
        type=float,
        metavar="SECONDS",
        help="time between two checkpoints; default: the best one",
    )
    runs = parser.add_argument_group("runs")
    runs.add_argument("--days", type=float, default=30.0, metavar="DAYS", help="length of a run")
    runs.add_argument(
        "--runs", type=int, default=20, metavar="RUNS", help="number of simulated runs"
    )
    runs.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="SEED",
        help="seed of the faults; the same seed draws the same faults",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="write a plot of the result")
