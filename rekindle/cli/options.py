"""The command lines of `rekindle checkpoints`, and of what is about a cluster.

They import no more than those of `rekindle run`, for --help is not to wait.
"""

from __future__ import annotations

import argparse
import functools

from rekindle.profiling.switch import WORDS

_STORE = "a folder, an s3:// location, or a job's id"
_SOURCE = f"{_STORE}, or the reference of a published one"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the sub-commands."""
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")
    action = functools.partial(_action, actions)
    ls = action("ls", "list the checkpoints of a store, newest first")
    ls.add_argument("store", help=_STORE)
    ls.add_argument("--json", action="store_true", help="print JSON")
    verify = action(
        "verify", "read every byte, and name the damaged files; the status is 1 if there are any"
    )
    verify.add_argument("store", help=_STORE)
    verify.add_argument(
        "steps", nargs="*", type=int, metavar="STEP", help="the steps to verify; default: all"
    )
    verify.add_argument("--json", action="store_true", help="print JSON")
    pull = action("pull", "copy a verified checkpoint from a store into a folder")
    pull.add_argument("source", metavar="STORE", help=_SOURCE)
    pull.add_argument(
        "target", metavar="DIR", help="the target folder; the command makes it if it is missing"
    )
    push = action("push", "copy a verified checkpoint from a folder into a store")
    push.add_argument("source", metavar="DIR", help="a folder of checkpoints, or a job's id")
    push.add_argument("target", metavar="STORE", help="a folder, or an s3:// location")
    prune = action("prune", "remove the checkpoints that are older than the newest valid ones")
    prune.add_argument("store", help=_STORE)
    prune.add_argument(
        "--keep", type=int, required=True, metavar="CHECKPOINTS", help="how many to keep"
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
        action("import", "make a checkpoint from a torch.save file or a folder of torch's DCP")
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
# As rekindle.engines.kubernetes.manifests.settings.Kind has them.
KINDS = ("indexed-job", "jobset", "ascendjob", "volcano-job", "trainjob", "pytorchjob")


def add_kubernetes_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the sub-commands of `rekindle kubernetes`."""
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")
    about = "print all objects of a job in a cluster, with secrets hidden"
    render = _action(actions, "render", about)
    render.add_argument("file", help=_JOB_FILE)
    render.add_argument(
        "--avoid",
        action="append",
        default=[],
        metavar="NODE",
        help="a node that the pods avoid; may be given several times",
    )
    about = "check a cluster for all that a job needs; the status is 1 if anything is missing"
    check = _action(actions, "check", about)
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
    check.add_argument("--json", action="store_true", help="print JSON")
    for each in (render, check):
        each.add_argument("--kind", choices=KINDS, help="kind of the workload; default: the file's")
        each.add_argument("--job-id", metavar="ID", help="the job's id; default: the job's name")
    about = "switch MindCluster's profiling of a job, or print what is on"
    trace = _action(actions, "trace", about)
    trace.add_argument("job", metavar="JOB", help="the job's id")
    which = trace.add_mutually_exclusive_group()
    which.add_argument(
        "--on",
        metavar="KIND,...",
        help=f"kinds to record, with commas: {', '.join(WORDS)}; all but the first go together",
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
        help="address of ClusterD; default: its usual address in a pod, else the job's ConfigMap",
    )


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare how a cluster is found, for commands that are about this machine without any."""
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


def add_diagnose_arguments(parser: argparse.ArgumentParser) -> None:
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
    parser.add_argument("--json", action="store_true", help="print JSON")
