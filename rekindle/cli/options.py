"""The command lines of `rekindle checkpoints`, and of what is about a cluster.

They import no more than those of `rekindle run`, for --help is not to wait.
"""

from __future__ import annotations

import argparse

from rekindle.profiling.switch import WORDS

_STORE = "a folder, an s3:// location, or a job's id"
_SOURCE = f"{_STORE}, or the reference of a published one"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the sub-commands."""
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")

    def action(name: str, about: str) -> argparse.ArgumentParser:
        return actions.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")

    ls = action("ls", "list the checkpoints of a store, newest first")
    ls.add_argument("store", help=_STORE)
    ls.add_argument("--json", action="store_true", help="print JSON")
    verify = action("verify", "read every byte, and name what is damaged; status 1 if anything is")
    verify.add_argument("store", help=_STORE)
    verify.add_argument("steps", nargs="*", type=int, metavar="STEP", help="default: all of them")
    verify.add_argument("--json", action="store_true", help="print JSON")
    pull = action("pull", "copy a verified checkpoint from a store into a folder")
    pull.add_argument("source", metavar="STORE", help=_SOURCE)
    pull.add_argument("target", metavar="DIR", help="a folder; one that is not there is made")
    push = action("push", "copy a verified checkpoint from a folder into a store")
    push.add_argument("source", metavar="DIR", help="a folder of checkpoints, or a job's id")
    push.add_argument("target", metavar="STORE", help="a folder, or an s3:// location")
    prune = action("prune", "remove what is older than the newest valid checkpoints")
    prune.add_argument("store", help=_STORE)
    prune.add_argument("--keep", type=int, required=True, metavar="N", help="how many stay")
    prune.add_argument("--dry-run", action="store_true", help="tell what would go, remove nothing")
    pin = action("pin", "keep a step's checkpoint from being pruned")
    pin.add_argument("--hours", type=float, metavar="H", help="so long; default: until unpin")
    unpin = action("unpin", "remove a step's pin")
    for each in (pin, unpin):
        each.add_argument("store", help=_STORE)
        each.add_argument("step", type=int, metavar="STEP")
        each.add_argument("--name", default="user", help="of the pin; a step may have many")
    export = action("export", "write a checkpoint's state for torch.load or torch's DCP")
    export.add_argument("store", help=_SOURCE)
    export.add_argument("out", help="the file (torch) or folder (dcp) to make")
    export.add_argument("--format", choices=("torch", "dcp"), required=True)
    export.add_argument(
        "--only", action="append", metavar="NAME", help="these objects alone (model, optimizer)"
    )
    for each in (pull, push, export):
        each.add_argument("--step", type=int, help="default: the newest that is intact")
    _add_import(
        action("import", "make a checkpoint of a torch.save file or a folder of torch's DCP")
    )


def _add_import(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help="a file of torch.save, or a folder of DCP")
    parser.add_argument("store", help="a folder, or an s3:// location")
    parser.add_argument("--job-id", required=True, help="the job that will go on from it")
    parser.add_argument("--step", type=int, help="steps finished; default: what the source says")
    parser.add_argument(
        "--take",
        action="append",
        default=[],
        metavar="NAME=KEY",
        help="a Session's object and where its state is, such as model=net; default: by its name",
    )
    parser.add_argument(
        "--add",
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="an object's state that the source lacks, such as that of the sampler",
    )
    parser.add_argument(
        "--device", default="cpu", help="where the Session has its model: cpu (default), cuda, npu"
    )


_JOB_FILE = "YAML: the fields of a training job, kubernetes among them"
# As rekindle.engines.kubernetes.manifests.settings.Kind has them.
KINDS = ("indexed-job", "jobset", "ascendjob", "volcano-job", "trainjob", "pytorchjob")


def add_kubernetes_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the sub-commands of `rekindle kubernetes`."""
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")
    about = "print all objects that a job would be in a cluster, secrets hidden"
    render = actions.add_parser("render", help=about, description=f"{about.capitalize()}.")
    render.add_argument("file", help=_JOB_FILE)
    said = "a node that its pods keep off; may be given several times"
    render.add_argument("--avoid", action="append", default=[], metavar="NODE", help=said)
    about = "ask a cluster for all that a job needs there; status 1 if anything is missing"
    check = actions.add_parser("check", help=about, description=f"{about.capitalize()}.")
    said = f"{_JOB_FILE}; default: any job of the kind"
    check.add_argument("file", nargs="?", help=said)
    check.add_argument("--kubeconfig", default="", metavar="FILE", help="default: KUBECONFIG")
    check.add_argument("--context", default="", help="default: the file's current one")
    check.add_argument("--namespace", help="instead of the job's")
    check.add_argument("--json", action="store_true", help="print JSON")
    for each in (render, check):
        each.add_argument("--kind", choices=KINDS, help="instead of the file's")
        each.add_argument("--job-id", help="default: the job's name")
    about = "switch what MindCluster's profiling of a job writes down, or print what is on"
    trace = actions.add_parser("trace", help=about, description=f"{about.capitalize()}.")
    trace.add_argument("job", help="the job's id")
    which = trace.add_mutually_exclusive_group()
    said = f"have this written down, with commas between: {', '.join(WORDS)}; all but the first "
    which.add_argument("--on", metavar="WHAT", help=f"{said}go together")
    which.add_argument("--off", action="store_true", help="have nothing written down")
    trace.add_argument("--namespace", default="default", help="where the job is (default: default)")
    said = "where the cluster is; default: KUBECONFIG, ~/.kube/config, or as a pod of it"
    trace.add_argument("--kubeconfig", metavar="FILE", default="", help=said)
    trace.add_argument("--context", metavar="NAME", default="", help="of that file")
    said = "ask ClusterD there; default: in a pod at its usual place, else its ConfigMap is written"
    trace.add_argument("--clusterd", metavar="HOST:PORT", default="", help=said)


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare how a cluster is found, for commands that are about this machine without any."""
    cluster = parser.add_argument_group("a cluster, instead of this machine")
    said = "default: KUBECONFIG, ~/.kube/config, or the service account of a pod"
    cluster.add_argument("--kubeconfig", default="", metavar="FILE", help=said)
    cluster.add_argument("--context", default="", help="of that file; default: its own")
    said = "where the jobs are; default: default"
    cluster.add_argument("--namespace", default="", help=said)


def add_diagnose_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `rekindle diagnose`."""
    parser.add_argument("job", metavar="JOB|DIR", help="a job's id, or a folder of records")
    parser.add_argument("--steps", default="", metavar="FIRST:LAST", help="default: all")
    parser.add_argument("--per-node", type=int, metavar="N", help="ranks of a node; default: 1")
    parser.add_argument("--trace", metavar="FILE", help="write these steps for Perfetto or Chrome")
    parser.add_argument("--picture", metavar="FILE", help="draw ranks over steps, PNG or SVG")
    parser.add_argument("--json", action="store_true", help="print JSON")
