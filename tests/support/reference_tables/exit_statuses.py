"""Exit statuses of all commands."""

from __future__ import annotations

from reference_tables.commands import parsers
from reference_tables.markdown import check_names, code, page, table
from rekindle.cli.main import command_parser
from rekindle.errors import RekindleError, UsageError

_FAILED, _WRONG = str(RekindleError.exit_status), str(UsageError.exit_status)

# What every command may end with.
_ALL = [
    ("0", "The command did its work."),
    (_FAILED, "The command could not do its work. The last line on stderr has the reason."),
    (
        _WRONG,
        "The command line, a file or the environment is wrong, or a package is not installed.",
    ),
]
_ABSENT = (_FAILED, "The job does not run, or its coordinator does not answer or refuses.")

# What a status means for one command, where that is more than above.
_OWN: dict[str, list[tuple[str, str]]] = {
    "rekindle run": [
        (
            "0",
            "All ranks ended with status 0; or the coordinator no longer needs this node.",
        ),
        (
            _FAILED,
            "The job failed, `rekindle stop` stopped it, or another process runs it.",
        ),
        (_WRONG, "The job could not start: the command line or a file is wrong."),
        ("129, 130, 143", "SIGHUP, SIGINT or SIGTERM stopped the job (128 + signal)."),
    ],
    "rekindle inject": [_ABSENT],
    "rekindle policy": [(_WRONG, "The policy is not valid.")],
    "rekindle simulate": [
        (_WRONG, "A file or an option is not valid, or a file cannot be written.")
    ],
    "rekindle checkpoints ls": [
        ("0", "The list is complete, also if it has damaged checkpoints."),
    ],
    "rekindle checkpoints verify": [
        ("0", "All checkpoints are intact."),
        (_FAILED, "A checkpoint is damaged or cannot be read."),
    ],
    "rekindle checkpoints pull": [
        (_FAILED, "There is no intact checkpoint to copy."),
    ],
    "rekindle checkpoints push": [
        (_FAILED, "There is no intact checkpoint to copy."),
    ],
    "rekindle checkpoints prune": [],
    "rekindle checkpoints pin": [(_FAILED, "The step has no complete checkpoint.")],
    "rekindle checkpoints unpin": [(_WRONG, "The step has no pin of this name.")],
    "rekindle checkpoints export": [],
    "rekindle checkpoints import": [],
    "rekindle kubernetes render": [(_WRONG, "The job file is not valid.")],
    "rekindle kubernetes check": [
        ("0", "The cluster has all that the job needs."),
        (_FAILED, "The cluster lacks something, or does not answer."),
        (_WRONG, "The job file is not valid."),
    ],
    "rekindle kubernetes trace": [(_FAILED, "The cluster or ClusterD does not answer or refuses.")],
    "rekindle diagnose": [(_WRONG, "There is no such job, folder or step.")],
    "rekindle npu-check": [
        ("0", "Nothing is missing."),
        (_FAILED, "Something is missing."),
        (_WRONG, "A variable of HCCL is not valid."),
    ],
    "rekindle status": [
        ("0", "The state is printed, also of a job that has failed."),
        (_FAILED, "The journal has no end, and the coordinator does not answer."),
        (_WRONG, "There is no such job."),
    ],
    "rekindle incidents": [(_WRONG, "There is no such job.")],
    "rekindle approve": [(_FAILED, "The job does not run, or nothing waits for approval.")],
    "rekindle report-fault": [_ABSENT],
    "rekindle profile": [_ABSENT],
    "rekindle stop": [
        ("0", "The coordinator has the order; the job may still write its final checkpoint."),
        _ABSENT,
    ],
    "rekindle nodes": [(_FAILED, "The cluster does not answer.")],
    "rekindle release-node": [(_WRONG, "Rekindle does not know the node, or the node is in use.")],
}

_HEADS = ("Status", "Meaning")


def exit_statuses() -> str:
    """Return the page of exit statuses. Raises ValueError: a command has no row here."""
    check_names("exit_statuses", [name for name, _ in parsers(command_parser())], _OWN)
    rows = [
        (code(command), status, meaning)
        for command, meanings in _OWN.items()
        for status, meaning in meanings
    ]
    return page(
        "Exit statuses",
        "Every command ends with one of these:",
        table(_HEADS, _ALL),
        "This table has the meaning for each command. `rekindle checkpoints` also ends with 130 "
        "after Ctrl-C; a half-written checkpoint never counts as valid.",
        table(("Command", *_HEADS), rows),
        "`rekindle run` ends with 1 when a rank fails, as torchrun does. The message on stderr has "
        "the rank's own status.",
    )
