"""The command lines of `rekindle checkpoints`, and of what is about a cluster, as rows.

They import no more than those of `rekindle run`, because --help must not wait.
"""

from __future__ import annotations

from rekindle.cli.command_line import JOB, JSON, Command, Group, argument
from rekindle.profiling.switch import WORDS

_STORE_HELP = "a folder, an s3:// location, or a job's id"
_SOURCE_HELP = f"{_STORE_HELP}, or the reference of a published one"
_STORE = argument("store", help=_STORE_HELP)
_NEWEST = argument("--step", type=int, help="default: the newest that is intact")
_PINNED = (
    _STORE,
    argument("step", type=int, metavar="STEP"),
    argument("--name", default="user", help="of the pin; a step may have many"),
)

_IMPORT = (
    argument("source", metavar="SRC", help="a file of torch.save, or a folder of DCP"),
    argument("store", help="a folder, or an s3:// location"),
    argument("--job-id", required=True, help="the job that will go on from it"),
    argument("--step", type=int, help="steps finished; default: what the source says"),
    argument(
        "--take",
        action="append",
        default=[],
        metavar="NAME=KEY",
        help="a Session's object and where its state is, such as model=net; default: by its name",
    ),
    argument(
        "--add",
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="an object's state that the source lacks, such as that of the sampler",
    ),
    argument(
        "--device", default="cpu", help="where the Session has its model: cpu (default), cuda, npu"
    ),
)

CHECKPOINTS = (
    Command("ls", "list the checkpoints of a store, newest first", rows=(_STORE, JSON)),
    Command(
        "verify",
        "read every byte, and name what is damaged; status 1 if anything is",
        rows=(
            _STORE,
            argument("steps", nargs="*", type=int, metavar="STEP", help="default: all of them"),
            JSON,
        ),
    ),
    Command(
        "pull",
        "copy a verified checkpoint from a store into a folder",
        rows=(
            argument("source", metavar="STORE", help=_SOURCE_HELP),
            argument("target", metavar="DIR", help="a folder; one that is not there is made"),
            _NEWEST,
        ),
    ),
    Command(
        "push",
        "copy a verified checkpoint from a folder into a store",
        rows=(
            argument("source", metavar="DIR", help="a folder of checkpoints, or a job's id"),
            argument("target", metavar="STORE", help="a folder, or an s3:// location"),
            _NEWEST,
        ),
    ),
    Command(
        "prune",
        "remove what is older than the newest valid checkpoints",
        rows=(
            _STORE,
            argument("--keep", type=int, required=True, metavar="N", help="how many stay"),
            argument("--dry-run", action="store_true", help="tell what would go, remove nothing"),
        ),
    ),
    Command(
        "pin",
        "keep a step's checkpoint from being pruned",
        rows=(
            argument("--hours", type=float, metavar="H", help="so long; default: until unpin"),
            *_PINNED,
        ),
    ),
    Command("unpin", "remove a step's pin", rows=_PINNED),
    Command(
        "export",
        "write a checkpoint's state for torch.load or torch's DCP",
        rows=(
            argument("store", help=_SOURCE_HELP),
            argument("out", help="the file (torch) or folder (dcp) to make"),
            argument("--format", choices=("torch", "dcp"), required=True),
            argument(
                "--only",
                action="append",
                metavar="NAME",
                help="these objects alone (model, optimizer)",
            ),
            _NEWEST,
        ),
    ),
    Command(
        "import", "make a checkpoint of a torch.save file or a folder of torch's DCP", rows=_IMPORT
    ),
)

_JOB_FILE = "YAML: the fields of a training job, kubernetes among them"
# As rekindle.engines.kubernetes.manifests.settings.WorkloadKind has them.
KINDS = ("indexed-job", "jobset", "ascendjob", "volcano-job", "trainjob", "pytorchjob")
_INSTEAD = (
    argument("--kind", choices=KINDS, help="instead of the file's"),
    argument("--job-id", help="default: the job's name"),
)

_TRACE = (
    JOB,
    Group(
        "",
        (
            argument(
                "--on",
                metavar="WHAT",
                help=f"have this written down, with commas between: {', '.join(WORDS)}; "
                "all but the first go together",
            ),
            argument("--off", action="store_true", help="have nothing written down"),
        ),
    ),
    argument("--namespace", default="default", help="where the job is (default: default)"),
    argument(
        "--kubeconfig",
        metavar="FILE",
        default="",
        help="where the cluster is; default: KUBECONFIG, ~/.kube/config, or as a pod of it",
    ),
    argument("--context", metavar="NAME", default="", help="of that file"),
    argument(
        "--clusterd",
        metavar="HOST:PORT",
        default="",
        help="ask ClusterD there; default: in a pod at its usual place, else its ConfigMap is "
        "written",
    ),
)

KUBERNETES = (
    Command(
        "render",
        "print all objects that a job would be in a cluster, secrets hidden",
        "kubernetes:run",
        (
            argument("file", help=_JOB_FILE),
            argument(
                "--avoid",
                action="append",
                default=[],
                metavar="NODE",
                help="a node that its pods keep off; may be given several times",
            ),
            *_INSTEAD,
        ),
    ),
    Command(
        "check",
        "ask a cluster for all that a job needs there; status 1 if anything is missing",
        "kubernetes:check",
        (
            argument("file", nargs="?", help=f"{_JOB_FILE}; default: any job of the kind"),
            argument("--kubeconfig", default="", metavar="FILE", help="default: KUBECONFIG"),
            argument("--context", default="", help="default: the file's current one"),
            argument("--namespace", help="instead of the job's"),
            JSON,
            *_INSTEAD,
        ),
    ),
    Command(
        "trace",
        "switch what MindCluster's profiling of a job writes down, or print what is on",
        "kubernetes_trace:run",
        _TRACE,
    ),
)

DIAGNOSE = (
    argument("job", metavar="JOB|DIR", help="a job's id, or a folder of records"),
    argument("--steps", default="", metavar="FIRST:LAST", help="default: all"),
    argument("--per-node", type=int, metavar="N", help="ranks of a node; default: 1"),
    argument("--trace", metavar="FILE", help="write these steps for Perfetto or Chrome"),
    argument("--picture", metavar="FILE", help="draw ranks over steps, PNG or SVG"),
    JSON,
)

# For commands that are about this machine without any.
CLUSTER = Group(
    "a cluster, instead of this machine",
    (
        argument(
            "--kubeconfig",
            default="",
            metavar="FILE",
            help="default: KUBECONFIG, ~/.kube/config, or the service account of a pod",
        ),
        argument("--context", default="", help="of that file; default: its own"),
        argument("--namespace", default="", help="where the jobs are; default: default"),
    ),
)
