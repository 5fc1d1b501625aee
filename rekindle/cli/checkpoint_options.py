"""Declare the options of the commands below `rekindle checkpoints`."""

from __future__ import annotations

from rekindle.cli.options import AS_JSON, Command, argument

_STORE = "a folder, an s3:// location, or a job's id"
_SOURCE = f"{_STORE}, or the reference of a published one"

_IN = argument("store", help=_STORE)
_STEP = argument(
    "--step",
    type=int,
    metavar="STEP",
    help="the step of the checkpoint; default: the newest intact one",
)
_COPY = (
    argument("source", metavar="STORE", help=_SOURCE),
    argument("target", metavar="TARGET", help=f"{_STORE}; a missing folder is created"),
    _STEP,
)
_PINNED = (
    _IN,
    argument("step", type=int, metavar="STEP", help="the step of the checkpoint"),
    argument("--name", default="user", help="name of the pin; a step may have several"),
)

# The commands below `rekindle checkpoints`.
CHECKPOINTS = (
    Command(
        "ls",
        "list the checkpoints of a store, newest first",
        (_IN, AS_JSON),
    ),
    Command(
        "verify",
        "read every byte, and name the damaged files; the status is 1 if there are any",
        (
            _IN,
            argument(
                "steps",
                nargs="*",
                type=int,
                metavar="STEP",
                help="the steps to verify; default: all",
            ),
            AS_JSON,
        ),
    ),
    Command(
        "pull",
        "copy a verified checkpoint from one store to another, such as a folder",
        _COPY,
    ),
    Command("push", "copy a verified checkpoint; the same command as pull", _COPY),
    Command(
        "prune",
        "remove the checkpoints that are older than the newest valid ones",
        (
            _IN,
            argument(
                "--keep",
                type=int,
                required=True,
                metavar="CHECKPOINTS",
                help="number of checkpoints to keep",
            ),
            argument(
                "--dry-run",
                action="store_true",
                help="print what the command would remove, and remove nothing",
            ),
        ),
    ),
    Command(
        "pin",
        "protect the checkpoint of a step against pruning",
        (
            argument(
                "--hours",
                type=float,
                metavar="HOURS",
                help="how long the pin lasts; default: until unpin",
            ),
            *_PINNED,
        ),
    ),
    Command("unpin", "remove a step's pin", _PINNED),
    Command(
        "export",
        "write the state of a checkpoint for torch.load or torch's DCP",
        (
            argument("store", help=_SOURCE),
            argument("out", metavar="OUT", help="the file (torch) or folder (dcp) to make"),
            argument(
                "--format", choices=("torch", "dcp"), required=True, help="format of the output"
            ),
            argument(
                "--only",
                action="append",
                metavar="NAME",
                help="export only this object, such as model; may be given several times",
            ),
            _STEP,
        ),
    ),
    Command(
        "import",
        "create a checkpoint from a torch.save file or a folder of torch's DCP",
        (
            argument("source", metavar="SRC", help="a file of torch.save, or a folder of DCP"),
            argument("store", metavar="STORE", help="a folder, or an s3:// location"),
            argument("--job-id", required=True, help="the job that resumes from the checkpoint"),
            argument(
                "--step",
                type=int,
                metavar="STEPS",
                help="finished steps; default: the number in the source",
            ),
            argument(
                "--take",
                action="append",
                default=[],
                metavar="NAME=KEY",
                help="an object of the Session and the key of its state, such as model=net; may be "
                "given several times; default: the object's name is the key",
            ),
            argument(
                "--add",
                action="append",
                default=[],
                metavar="NAME=JSON",
                help="the state of an object that the source lacks; may be given several times",
            ),
            argument(
                "--device", default="cpu", help="where the Session has its model: cpu, cuda or npu"
            ),
        ),
    ),
)
