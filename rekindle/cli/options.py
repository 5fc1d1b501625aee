"""Declare the options of the commands for jobs, checkpoints and clusters.

This module imports no more modules than the options of `rekindle run`, so that --help is fast.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from rekindle.engines.kubernetes.manifests.settings import WorkloadKind
from rekindle.profiling.switch import WORDS
from rekindle.protocol.agent import InjectionKind
from rekindle.recovery.faults.classification import EventSource
from rekindle.recovery.faults.tables.verdict import FaultOrigin, Severity

_ACCESS = "file with the access to a cluster"
_JOB_FILE = "YAML: the fields of a training job, kubernetes among them"


class Argument(NamedTuple):
    """An option or a positional argument: its spellings, and its settings for argparse."""

    spellings: tuple[str, ...]
    settings: dict[str, Any]


class Group(NamedTuple):
    """Arguments with a title in --help. Without a title: at most one of them may be given."""

    title: str
    arguments: tuple[Argument, ...]


class Command(NamedTuple):
    """One command, or a command below another one.

    function: runs the command, and returns its exit status, or None for 0; empty: the command above
    or below names it. The command imports its module late, so that --help is fast. about: a
    sentence for the command's own --help; empty: as `help`. below: its own commands.
    """

    name: str
    help: str
    arguments: tuple[Argument | Group, ...] = ()
    function: str = ""
    about: str = ""
    below: tuple[Command, ...] = ()


def argument(*spellings: str, **settings: object) -> Argument:
    """Return an argument with exactly these spellings."""
    return Argument(spellings, settings)


def option(name: str, *extra: str, **settings: object) -> Argument:
    """Return an option whose name accepts dashes or underscores, as torchrun's options do."""
    spellings = dict.fromkeys((f"--{name.replace('_', '-')}", f"--{name}"))
    return Argument((*extra, *spellings), settings)


def add(where: argparse._ActionsContainer, arguments: Iterable[Argument | Group]) -> None:
    """Add arguments to a parser or to a group of it."""
    for each in arguments:
        if isinstance(each, Argument):
            where.add_argument(*each.spellings, **each.settings)
        elif each.title:
            add(where.add_argument_group(each.title), each.arguments)
        else:
            add(where.add_mutually_exclusive_group(), each.arguments)


def given(arguments: Iterable[Argument | Group], words: Sequence[str]) -> frozenset[str]:
    """Return the names of the options that a valid command line has, without those by default."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, add_help=False, argument_default=argparse.SUPPRESS
    )
    add(parser, map(_without_default, arguments))
    return frozenset(vars(parser.parse_args(words)))


def _without_default(each: Argument | Group) -> Argument | Group:
    if isinstance(each, Group):
        return Group(each.title, tuple(map(_plain, each.arguments)))
    return _plain(each)


def _plain(each: Argument) -> Argument:
    settings = {name: value for name, value in each.settings.items() if name != "default"}
    return Argument(each.spellings, settings)


JOB = argument("job", metavar="JOB", help="the job's id")
AS_JSON = argument("--json", action="store_true", help="print JSON")
NODE = argument("node", metavar="NAME", help="the node's name, as rekindle nodes prints it")

ADAPTATION = (
    argument("file", metavar="FILE", help="the training script"),
    argument("--write", action="store_true", help="change the file too"),
)

JOBS = (
    argument("pattern", nargs="?", default="*", metavar="PATTERN", help="of job ids, with * and ?"),
    argument(
        "--state",
        default="",
        metavar="STATE",
        help="list only jobs in this state, such as succeeded, failed, stopped, training or died",
    ),
    AS_JSON,
)
LOGS = (
    argument("--rank", type=int, metavar="RANK", help="only of this rank; default: all ranks"),
    argument("--restart", type=int, metavar="RESTART", help="default: the newest one"),
    argument("--stream", choices=("stdout", "stderr"), default="", help="default: both"),
    argument("--tail", type=int, metavar="LINES", help="only the last lines of each stream"),
    argument("-f", "--follow", action="store_true", help="wait for more until the job ends"),
)
# The options of `rekindle setup`.
SETUP = (
    argument("--dry-run", action="store_true", help="print what would change, and change nothing"),
    argument(
        "--overwrite",
        action="store_true",
        help="also replace objects that differ, for example because a person changed them",
    ),
    argument(
        "--file",
        default="",
        metavar="FILE",
        help="the deployments; default: Rekindle's prefect.yaml",
    ),
    argument(
        "--root",
        default=".",
        metavar="DIR",
        help="folder where the relative paths of jobs start; default: the current one",
    ),
    argument(
        "--type", default="process", metavar="TYPE", help="type of the work pools; default: process"
    ),
    argument(
        "--base-job-template",
        default="",
        metavar="FILE",
        help="JSON file with the template of the work pools; default: that of the type",
    ),
    option(
        "queue-limit",
        type=int,
        default=1,
        metavar="RUNS",
        help="limit of flow runs of each queue, except the queue default",
    ),
    argument(
        "--heartbeat",
        type=float,
        default=180.0,
        metavar="SECONDS",
        help="the longest heartbeat interval of the flow runs",
    ),
    argument(
        "--pending",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="how long a process or pod may take to start",
    ),
    argument(
        "--rescued",
        type=float,
        default=180.0,
        metavar="SECONDS",
        help="how long the rescue flow may take",
    ),
    argument(
        "--flows",
        nargs="+",
        default=["train", "retrain"],
        metavar="NAME",
        help="the flows that the automations watch; yours may be among them",
    ),
    argument("--notify", default="", metavar="SLUG/NAME", help="block that tells of incidents"),
)
SHELL = (argument("shell", choices=("bash", "zsh", "fish"), help="the shell"),)

# The options of `rekindle approve`.
APPROVAL = (
    argument(
        "--incident",
        type=int,
        default=0,
        metavar="INCIDENT",
        help="the incident; 0: the one that waits",
    ),
    argument("--deny", action="store_true", help="refuse; the job ends"),
)

# The options of `rekindle profile`.
PROFILING = (
    argument("switch", choices=("on", "off"), help="on: start to record; off: stop"),
    option(
        "kinds",
        default="",
        metavar="KIND,...",
        help=f"kinds of records, separated by commas: {', '.join(WORDS)}. The default is all "
        "kinds; for on it is all kinds except communication",
    ),
)

# The options of `rekindle drain`.
DRAIN = (
    option(
        "node", type=int, required=True, metavar="NODE", help="node rank of the node in the job"
    ),
    option(
        "deadline",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="seconds until the node may end. If it has not moved by then, the ranks write a "
        "checkpoint. 0: no deadline",
    ),
)

# The options of `rekindle report-fault`.
HEALTH_EVENT = (
    option(
        "node",
        type=int,
        default=-1,
        metavar="NODE",
        help="node rank of the node in the job; without it give --host",
    ),
    option("host", default="", metavar="NAME", help="name of the host, for all nodes on it"),
    option(
        "within",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="for --source notice: seconds until the host ends; 0: unknown",
    ),
    option(
        "device",
        type=int,
        default=-1,
        metavar="DEVICE",
        help="number of the device on the node; -1: none",
    ),
    option("gone", action="store_true", help="the event is over"),
    option(
        "source",
        choices=[source.value for source in EventSource],
        required=True,
        metavar="SOURCE",
        help=f"the kind of the event: {', '.join(source.value for source in EventSource)}",
    ),
    option(
        "severity",
        choices=[severity.name.lower() for severity in Severity],
        help="severity of an Ascend code, from its driver",
    ),
    option(
        "origin",
        choices=[origin.value for origin in FaultOrigin],
        help="the component that reported the Ascend code; default: chip with --device, "
        "otherwise node",
    ),
    argument(
        "what",
        metavar="WHAT",
        help="the fault code, XID number, line of the kernel's log, condition (Type=Status), or "
        "reason of a pod",
    ),
)

# The options of `rekindle inject`.
FAULT = (
    option("rank", type=int, required=True, metavar="RANK", help="the rank that gets the fault"),
    option(
        "kind",
        choices=[kind.value for kind in InjectionKind],
        required=True,
        metavar="KIND",
        help=f"the kind of fault: {', '.join(kind.value for kind in InjectionKind)}",
    ),
    option(
        "step",
        type=int,
        default=None,
        metavar="STEP",
        help="the step of the fault, counted from 0; default: the next step",
    ),
    option(
        "seconds",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="length of the pause of a slow step",
    ),
)

_CLUSTER = (
    argument(
        "--kubeconfig",
        default="",
        metavar="FILE",
        help=f"{_ACCESS}; default: KUBECONFIG, ~/.kube/config, or the service account of a pod",
    ),
    argument("--context", default="", metavar="NAME", help="context in it; default: the current"),
)
_KIND = (
    argument(
        "--kind",
        choices=[kind.value for kind in WorkloadKind],
        metavar="KIND",
        help="kind of the workload; default: the file's; "
        + ", ".join(kind.value for kind in WorkloadKind),
    ),
    argument("--job-id", metavar="ID", help="the job's id; default: the job's name"),
)

# The options that select a cluster, for commands whose default is this machine.
CLUSTER = Group(
    "a cluster, instead of this machine",
    (
        *_CLUSTER,
        argument("--namespace", default="", help="namespace of the jobs; default: default"),
    ),
)

_OF_CLUSTERD = (
    argument("--namespace", default="default", help="the job's namespace"),
    *_CLUSTER,
    argument(
        "--clusterd",
        metavar="HOST:PORT",
        default="",
        help="address of ClusterD; default: its usual address in a pod",
    ),
    argument("--follow", action="store_true", help="print each change until ClusterD ends it"),
)

# The commands below `rekindle kubernetes`.
KUBERNETES = (
    Command(
        "render",
        "print all objects of a job in a cluster, with secrets hidden",
        (
            argument("file", help=_JOB_FILE),
            argument(
                "--avoid",
                action="append",
                default=[],
                metavar="NODE",
                help="a node that the pods avoid; may be given several times",
            ),
            *_KIND,
        ),
        "rekindle.cli.kubernetes:run",
    ),
    Command(
        "check",
        "check whether a cluster has everything that a job needs; the status is 1 if something "
        "required is missing",
        (
            argument("file", nargs="?", help=f"{_JOB_FILE}; default: any job of the kind"),
            *_CLUSTER,
            argument("--namespace", help="namespace to check; default: the job's"),
            AS_JSON,
            *_KIND,
        ),
        "rekindle.cli.kubernetes:check",
    ),
    Command(
        "trace",
        "switch MindCluster's profiling of a job, or print what is on",
        (
            JOB,
            Group(
                "",
                (
                    argument(
                        "--on",
                        metavar="KIND,...",
                        help=f"kinds to record, separated by commas: {', '.join(WORDS)}. "
                        "MindCluster switches all kinds except the first together",
                    ),
                    argument("--off", action="store_true", help="record nothing"),
                ),
            ),
            *_OF_CLUSTERD,
        ),
        "rekindle.cli.cluster:trace",
    ),
    Command(
        "signals",
        "print what MindCluster's ClusterD sends to a job",
        (JOB, argument("what", choices=("faults", "recovery"), help="a service"), *_OF_CLUSTERD),
        "rekindle.cli.cluster:signals",
    ),
)
