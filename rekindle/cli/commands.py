"""The commands of `rekindle`, as rows.

They import no more than `rekindle run` needs, because --help must not wait.
"""

from __future__ import annotations

from rekindle.cli.command_line import JOB, JSON, Command, argument, option
from rekindle.cli.options import CHECKPOINTS, CLUSTER, DIAGNOSE, KUBERNETES
from rekindle.cli.run_options import RUN
from rekindle.cli.simulate_options import SIMULATE
from rekindle.profiling.switch import WORDS
from rekindle.protocol.agent import InjectionKind
from rekindle.recovery.faults.classification import EventSource
from rekindle.recovery.faults.tables.verdict import FaultOrigin, Severity

_INJECT = (
    JOB,
    option("rank", type=int, required=True, help="who suffers it"),
    option("kind", choices=[kind.value for kind in InjectionKind], required=True, help="what"),
    option("step", type=int, default=None, help="in which step; default: the next one"),
    option("seconds", type=float, default=1.0, help="how long a slow step pauses"),
)

_POLICY = (
    argument("file", help="YAML or JSON"),
    argument("--to", choices=("own", "modelarts", "mindcluster"), default="own"),
)

_APPROVE = (
    JOB,
    argument("--incident", type=int, default=0, help="the one that is meant"),
    argument("--deny", action="store_true", help="refuse it: the job ends"),
)

REPORT_FAULT = (
    JOB,
    option("node", type=int, required=True, help="the node, by its rank in the job"),
    option("device", type=int, default=-1, help="its device, by its number there"),
    option("gone", action="store_true", help="it is over"),
    option(
        "source",
        choices=[source.value for source in EventSource],
        required=True,
        help="what kind of sign it is",
    ),
    option(
        "severity",
        choices=[severity.name.lower() for severity in Severity],
        help="how Ascend's driver ranks the code",
    ),
    option(
        "origin",
        choices=[origin.value for origin in FaultOrigin],
        help="what reported the Ascend code; default: the chip, or without --device the node",
    ),
    argument("what", help="the code, number, line of the kernel's log, or condition"),
)

_PROFILE = (
    JOB,
    argument("switch", choices=("on", "off")),
    option(
        "kinds",
        default="",
        metavar="KIND,...",
        help=f"some of {','.join(WORDS)}; default: all but communication on, or all off",
    ),
)

COMMANDS = (
    Command(
        "run",
        "run a distributed training script (torchrun's command line)",
        "run:run",
        RUN,
        description="Start a job's coordinator and agents, and run a script as its ranks.",
    ),
    Command(
        "inject",
        "break a running job on purpose",
        "jobs:inject",
        _INJECT,
        description="Have a rank of a job on this machine suffer a fault, to see it recover.",
    ),
    Command(
        "policy",
        "check a policy, and print it as ModelArts or MindCluster write theirs",
        "policy:show",
        _POLICY,
        description="Read a policy, or a job of ModelArts or MindCluster, and print it.",
    ),
    Command(
        "simulate",
        "tell what a recovery policy would be worth",
        "simulate:simulate",
        SIMULATE,
        description="Run a recovery policy against faults drawn from published statistics.",
    ),
    Command(
        "checkpoints",
        "list, verify, copy, prune, export and import checkpoints",
        "checkpoints:run",
        actions=CHECKPOINTS,
        description="See to the checkpoints of a store: a folder, an s3:// location, or a job's.",
    ),
    Command(
        "kubernetes",
        "print a job as the manifests of a cluster, check whether it could be there, trace it",
        actions=KUBERNETES,
        description="See what a job would be in a cluster, and ask the cluster about it.",
    ),
    Command(
        "diagnose",
        "tell where ranks' time goes, and who is slow",
        "diagnose:run",
        DIAGNOSE,
        description="Read the records of light profiling: of a job, or of a folder, also TaskD's.",
    ),
    Command(
        "npu-check",
        "tell what ranks on Ascend NPUs lack on this machine",
        "npu:npu_check",
        (JSON,),
        description="Look for torch-npu, the torch of its version, CANN, the driver and devices.",
    ),
    Command("status", "tell where a job is", "jobs:status", (JOB, JSON)),
    Command(
        "incidents",
        "list a job's incidents and what was done about them",
        "jobs:incidents",
        (JOB, JSON),
    ),
    Command(
        "approve",
        "approve (or refuse) what a job waits to be allowed to do",
        "jobs:approve",
        _APPROVE,
    ),
    Command(
        "report-fault",
        "tell a job of trouble that a monitor or you have seen",
        "jobs:report_fault",
        REPORT_FAULT,
    ),
    Command(
        "profile",
        "have a job's ranks write down where their time goes, or no more",
        "jobs:profile",
        _PROFILE,
    ),
    Command("stop", "stop a job; its last words are written", "jobs:stop", (JOB,)),
    Command("nodes", "list the nodes that jobs had trouble with", "jobs:nodes", (JSON, CLUSTER)),
    Command(
        "release-node",
        "let an isolated node be used again",
        "jobs:release_node",
        (argument("node", help="its name, as rekindle nodes prints it"), CLUSTER),
    ),
)
