"""The options of all commands but `rekindle run`.

This module imports no more than the options of `rekindle run`, so that --help does not wait.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rekindle.engines.kubernetes.manifests.settings import WorkloadKind
from rekindle.profiling.switch import WORDS
from rekindle.protocol.agent import InjectionKind
from rekindle.recovery.faults.classification import EventSource
from rekindle.recovery.faults.tables.verdict import FaultOrigin, Severity


def option(where: argparse._ActionsContainer, name: str, *extra: str, **settings: object) -> None:
    """Add an option that may be spelt with dashes or underscores, as torchrun's may."""
    spellings = dict.fromkeys((f"--{name.replace('_', '-')}", f"--{name}"))
    where.add_argument(*extra, *spellings, **settings)  # type: ignore[arg-type]


def job(parser: argparse.ArgumentParser) -> None:
    """Declare the job that a command is about."""
    parser.add_argument("job", help="the job's id")


def as_json(parser: argparse.ArgumentParser) -> None:
    """Declare --json."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def node(parser: argparse.ArgumentParser) -> None:
    """Declare the node that a command is about."""
    parser.add_argument("node", help="its name, as rekindle nodes prints it")


def policy(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `rekindle policy`."""
    parser.add_argument("file", help="YAML or JSON")
    parser.add_argument("--to", choices=("own", "modelarts", "mindcluster"), default="own")


def approval(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `rekindle approve`."""
    parser.add_argument("--incident", type=int, default=0, help="the one that is meant")
    parser.add_argument("--deny", action="store_true", help="refuse it: the job ends")


def profiling(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `rekindle profile`."""
    parser.add_argument("switch", choices=("on", "off"))
    said = f"some of {','.join(WORDS)}; default: all but communication on, or all off"
    option(parser, "kinds", default="", metavar="KIND,...", help=said)


def health_event(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `rekindle report-fault`."""
    option(parser, "node", type=int, required=True, help="the node, by its rank in the job")
    option(parser, "device", type=int, default=-1, help="its device, by its number there")
    option(parser, "gone", action="store_true", help="it is over")
    kinds = [source.value for source in EventSource]
    option(parser, "source", choices=kinds, required=True, help="what kind of sign it is")
    ranks = [severity.name.lower() for severity in Severity]
    option(parser, "severity", choices=ranks, help="how Ascend's driver ranks the code")
    origins = [origin.value for origin in FaultOrigin]
    said = "what reported the Ascend code; default: the chip, or without --device the node"
    option(parser, "origin", choices=origins, help=said)
    parser.add_argument("what", help="the code, number, line of the kernel's log, or condition")


def fault(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `rekindle inject`."""
    kinds = [kind.value for kind in InjectionKind]
    option(parser, "rank", type=int, required=True, help="who suffers it")
    option(parser, "kind", choices=kinds, required=True, help="what")
    option(parser, "step", type=int, default=None, help="in which step; default: the next one")
    option(parser, "seconds", type=float, default=1.0, help="how long a slow step pauses")


_STORE = "a folder, an s3:// location, or a job's id"
_SOURCE = f"{_STORE}, or the reference of a published one"


def checkpoints(parser: argparse.ArgumentParser) -> None:
    """Declare the sub-commands of `rekindle checkpoints`."""
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")

    def action(name: str, about: str) -> argparse.ArgumentParser:
        return actions.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")

    ls = action("ls", "list the checkpoints of a store, newest first")
    ls.add_argument("store", help=_STORE)
    as_json(ls)
    verify = action("verify", "read every byte, and name what is damaged; status 1 if anything is")
    verify.add_argument("store", help=_STORE)
    verify.add_argument("steps", nargs="*", type=int, metavar="STEP", help="default: all of them")
    as_json(verify)
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


def kubernetes(parser: argparse.ArgumentParser) -> None:
    """Declare the sub-commands of `rekindle kubernetes`."""
    actions = parser.add_subparsers(required=True, metavar="ACTION")

    def action(name: str, about: str, function: str) -> argparse.ArgumentParser:
        added = actions.add_parser(name, help=about, description=f"{about.capitalize()}.")
        added.set_defaults(function=function)
        return added

    about = "print all objects that a job would be in a cluster, secrets hidden"
    render = action("render", about, "rekindle.cli.kubernetes:run")
    render.add_argument("file", help=_JOB_FILE)
    said = "a node that its pods keep off; may be given several times"
    render.add_argument("--avoid", action="append", default=[], metavar="NODE", help=said)
    about = "ask a cluster for all that a job needs there; status 1 if anything is missing"
    check = action("check", about, "rekindle.cli.kubernetes:check")
    said = f"{_JOB_FILE}; default: any job of the kind"
    check.add_argument("file", nargs="?", help=said)
    check.add_argument("--kubeconfig", default="", metavar="FILE", help="default: KUBECONFIG")
    check.add_argument("--context", default="", help="default: the file's current one")
    check.add_argument("--namespace", help="instead of the job's")
    as_json(check)
    kinds = [kind.value for kind in WorkloadKind]
    for each in (render, check):
        each.add_argument("--kind", choices=kinds, help="instead of the file's")
        each.add_argument("--job-id", help="default: the job's name")
    about = "switch what MindCluster's profiling of a job writes down, or print what is on"
    trace = action("trace", about, "rekindle.cli.cluster:trace")
    job(trace)
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


def cluster(parser: argparse.ArgumentParser) -> None:
    """Declare how a cluster is found, for commands that are about this machine without any."""
    cluster = parser.add_argument_group("a cluster, instead of this machine")
    said = "default: KUBECONFIG, ~/.kube/config, or the service account of a pod"
    cluster.add_argument("--kubeconfig", default="", metavar="FILE", help=said)
    cluster.add_argument("--context", default="", help="of that file; default: its own")
    said = "where the jobs are; default: default"
    cluster.add_argument("--namespace", default="", help=said)


def diagnosis(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `rekindle diagnose`."""
    parser.add_argument("job", metavar="JOB|DIR", help="a job's id, or a folder of records")
    parser.add_argument("--steps", default="", metavar="FIRST:LAST", help="default: all")
    parser.add_argument("--per-node", type=int, metavar="N", help="ranks of a node; default: 1")
    parser.add_argument("--trace", metavar="FILE", help="write these steps for Perfetto or Chrome")
    parser.add_argument("--picture", metavar="FILE", help="draw ranks over steps, PNG or SVG")
    as_json(parser)


def simulation(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `rekindle simulate`."""
    parser.add_argument("--policy", type=Path, required=True, help="its YAML file")
    parser.add_argument("--compare", type=Path, metavar="POLICY", help="another, same faults")
    world = parser.add_argument_group("world")
    world.add_argument("--nodes", type=int, required=True, help="nodes that train")
    world.add_argument("--devices-per-node", type=int, default=8, help="default: 8")
    world.add_argument("--spares", type=int, help="nodes in reserve; default: as many as it takes")
    world.add_argument("--min-nodes", type=int, default=0, help="least to go on with; 0: all")
    faults = parser.add_argument_group("faults")
    faults.add_argument(
        "--faults",
        default="llama3",
        metavar="MIX|FILE",
        help="llama3 (the default), rsc1, rsc2, byterobust, or a file of your own",
    )
    faults.add_argument("--times", type=Path, metavar="FILE", help="what recovering takes")
    faults.add_argument(
        "--checkpoint-every", type=float, metavar="SECONDS", help="default: the best interval"
    )
    runs = parser.add_argument_group("runs")
    runs.add_argument("--days", type=float, default=30.0, help="length of a run; default: 30")
    runs.add_argument("--runs", type=int, default=20, help="default: 20")
    runs.add_argument("--seed", type=int, default=0, help="the same seed draws the same faults")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the answer there as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw it there")
