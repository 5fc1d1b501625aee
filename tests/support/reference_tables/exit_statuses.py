"""The page of exit statuses of all commands."""

from __future__ import annotations

from reference_tables.commands import parsers
from reference_tables.markdown import check_names, code, codes, page, table
from rekindle.cli.main import command_parser
from rekindle.errors import RekindleError, UsageError
from rekindle.recovery.faults.tables.loading import load

_FAILED, _WRONG = str(RekindleError.exit_status), str(UsageError.exit_status)

# Statuses of every command.
_ALL = [
    ("0", "The command did its work."),
    (_FAILED, "The command could not do its work. The last line on stderr has the reason."),
    (
        _WRONG,
        "The command line, a file or the environment is wrong, no job or checkpoint has this name, "
        "or a package is not installed; the "
        "message then has the command for it, such as `boto3 is not installed: pip install "
        "'rekindle[s3]'`.",
    ),
]
_ABSENT = (_FAILED, "The job does not run, or its coordinator does not answer or refuses.")

_JOINING = "rekindle run --coordinator"
_JOINED = [
    (
        "0",
        "The job succeeded. Also: the node came when training was over, or the world cannot take "
        "it, so the coordinator dismissed it.",
    ),
    (
        _FAILED,
        "The job failed or was stopped, the coordinator refused or replaced this node, or the "
        "coordinator was lost for longer than `coordinator_timeout_s`.",
    ),
    (_WRONG, "`REKINDLE_SECRET` is not set, or the command line or a file is wrong."),
    (
        "129, 130, 143",
        "SIGHUP, SIGINT or SIGTERM ended this node (128 + signal). The first signal counts.",
    ),
]

# The end of a rank: status or signal, and its meaning. The tables of faults have the kind.
_RANKS: list[tuple[tuple[int | str, ...], str]] = [
    ((0,), "Only if the others regroup or wait for this rank; see above."),
    ((1,), "An error of the script, as after an exception."),
    ((2,), "Wrong arguments of the script."),
    ((14,), "By a convention of nvidia-smi and DLRover: the infoROM of the GPU is damaged."),
    (
        (126, 127),
        "The command does not exist, or cannot run. With `--no-python` the status is 127 in both "
        "cases.",
    ),
    ((201,), "By DLRover's convention: the driver of the GPU failed. A reset may help."),
    ((202,), "By DLRover's convention: another process holds the GPU. A reset may help."),
    ((247,), "A child of the process got signal 9, usually because memory was short."),
    (
        ("SIGKILL",),
        "Killed from outside. The kind is `host-out-of-memory` if the kernel killed processes for "
        "lack of memory just before.",
    ),
    (("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"), "Ended from outside, or by a terminal."),
    (
        ("SIGABRT", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE"),
        "Native code failed.",
    ),
    (("SIGXCPU", "SIGXFSZ"), "The process reached a limit of CPU time or file size (`ulimit`)."),
    (("SIGSYS",), "Native code made a system call that is not allowed."),
    (("SIGPIPE",), "The reader of its output ended."),
]

# Statuses of one command that add to those above.
_OWN: dict[str, list[tuple[str, str]]] = {
    "rekindle run": [
        ("0", "The job succeeded: all ranks ended with status 0."),
        (
            _FAILED,
            "The job failed (whatever the status of its ranks); the terminal shows the first fault "
            "and its traceback. Or `rekindle stop` stopped the job; the terminal shows `the job "
            "was stopped`. Or another process runs the job.",
        ),
        (
            _WRONG,
            "The job could not start: an option, the policy, an environment variable or a place "
            "for checkpoints is not valid, the address of `--listen` is in use, the script or the "
            "framework does not exist, or too few hosts are not isolated.",
        ),
        (
            "129, 130, 143",
            "SIGHUP, SIGINT or SIGTERM stopped the job (128 + signal). The first signal counts: "
            "SIGINT and then SIGTERM give 130.",
        ),
    ],
    "rekindle adapt": [
        ("0", "The diff is complete, or the file has a `Session` already."),
        ("1", "A report names something that the diff does not change."),
        (_WRONG, "The file is missing, is no Python, has no training loop, or is not writable."),
    ],
    "rekindle inject": [_ABSENT],
    "rekindle drain": [_ABSENT],
    "rekindle policy": [(_WRONG, "The policy is not valid.")],
    "rekindle simulate": [
        (_WRONG, "A file or an option is not valid, or a file cannot be written.")
    ],
    "rekindle checkpoints ls": [
        ("0", "The list is complete, also if it has damaged checkpoints."),
    ],
    "rekindle checkpoints verify": [
        (
            "0",
            "All checkpoints are intact, or the store is empty. An unfinished checkpoint does not "
            "count as damaged.",
        ),
        (_FAILED, "A checkpoint is damaged or cannot be read."),
    ],
    "rekindle checkpoints pull": [
        (_FAILED, "There is no intact checkpoint to copy."),
    ],
    "rekindle checkpoints push": [
        (_FAILED, "There is no intact checkpoint to copy."),
    ],
    "rekindle checkpoints prune": [(_WRONG, "`--keep` is below 1, or there is no such store.")],
    "rekindle checkpoints pin": [(_FAILED, "The step has no complete checkpoint.")],
    "rekindle checkpoints unpin": [(_WRONG, "The step has no pin of this name.")],
    "rekindle checkpoints export": [
        (_FAILED, "There is no intact checkpoint, or it cannot become one state."),
        (_WRONG, "OUT exists, or there is no such store, step or object."),
    ],
    "rekindle checkpoints import": [
        (_FAILED, "The source is damaged, or has more than tensors and plain values."),
        (_WRONG, "The source does not exist, has no number of steps, or lacks a state."),
    ],
    "rekindle kubernetes render": [(_WRONG, "The job file is not valid.")],
    "rekindle kubernetes check": [
        (
            "0",
            "No required row is `missing`. Rows that are `unknown` or `missing, optional` do not "
            "change the status.",
        ),
        (_FAILED, "A required row is `missing`, or the cluster does not answer."),
        (_WRONG, "The job file is not valid."),
    ],
    "rekindle kubernetes trace": [(_FAILED, "The cluster or ClusterD does not answer or refuses.")],
    "rekindle kubernetes signals": [
        (_FAILED, "The cluster or ClusterD does not answer or refuses.")
    ],
    "rekindle diagnose": [
        ("0", "The records are printed, also if a rank is slow."),
        (
            _WRONG,
            "There is no such job, folder or step, or there are no records: profiling was never "
            "on, or no step has ended.",
        ),
    ],
    "rekindle npu-check": [
        ("0", "Nothing is missing."),
        (
            _FAILED,
            "One of these is missing: torch-npu, torch of its version, CANN, the driver, devices.",
        ),
        (_WRONG, "A variable of HCCL is not valid."),
    ],
    "rekindle status": [
        ("0", "The state is printed, also of a job that has failed."),
        (_FAILED, "The journal has no end, and the coordinator does not answer."),
        (_WRONG, "There is no such job."),
    ],
    "rekindle incidents": [(_WRONG, "There is no such job.")],
    "rekindle jobs": [("0", "The list is printed, also if it is empty.")],
    "rekindle logs": [
        ("0", "The output is printed; with `--follow`, the job has ended."),
        (_WRONG, "There is no such job, or this machine has no such output of it."),
    ],
    "rekindle report": [(_WRONG, "There is no such job.")],
    "rekindle completion": [("0", "The code is printed.")],
    "rekindle approve": [(_FAILED, "The job does not run, or nothing waits for approval.")],
    "rekindle report-fault": [_ABSENT],
    "rekindle profile": [_ABSENT],
    "rekindle stop": [
        ("0", "The coordinator has the order; the job may still write its final checkpoint."),
        _ABSENT,
    ],
    "rekindle setup": [
        (
            "0",
            "The server has every object, or the dry run is complete; objects that differ may "
            "have stayed as they are.",
        ),
        (_FAILED, "No Prefect server answers."),
        (
            _WRONG,
            "An option, the file or the address of the server is not valid, or the server refuses "
            "a request.",
        ),
    ],
    "rekindle nodes": [(_FAILED, "The cluster does not answer.")],
    "rekindle release-node": [
        (_FAILED, "The cluster does not answer or refuses."),
        (_WRONG, "Rekindle has no record of the node."),
    ],
}

# Additional rows for one form of a command.
_FURTHER = {"rekindle run": [(_JOINING, _JOINED)]}

_HEADS = ("Status", "Meaning")


def exit_statuses() -> str:
    """Return the page of exit statuses.

    Raises ValueError: a command has no row here.
    """
    check_names("exit_statuses", [name for name, _ in parsers(command_parser())], _OWN)
    rows = [
        (code(command), status, meaning)
        for own, meanings in _OWN.items()
        for command, each in ((own, meanings), *_FURTHER.get(own, ()))
        for status, meaning in each
    ]
    return page(
        "Exit statuses",
        "This page lists the exit statuses of all commands, and how Rekindle reads the exit status "
        "of a rank. Reasons and remedies are in [Troubleshooting](../operate/troubleshooting.md).",
        "Every command ends with one of these:",
        table(_HEADS, _ALL),
        "A command also ends with 141 (128 + SIGPIPE) if the reader of its output ends early, "
        "as in `rekindle status JOB | head -1`. `rekindle checkpoints` ends with 130 after Ctrl-C; "
        "a half-written checkpoint never counts as valid.",
        "This table has the meaning for each command. Where it has no row, the table above holds.",
        table(("Command", *_HEADS), rows),
        "`rekindle run` ends with 1 when a rank fails and the job with it, as torchrun does. If a "
        "rank ends with `sys.exit(3)`, the status is 1. The message on stderr, the journal and "
        "`rekindle incidents` have the rank's own status.",
        "## Exit statuses of ranks",
        "The job succeeds if all ranks end with status 0. A rank may end with 0 earlier than the "
        "others. That is a fault only if the others regroup or all wait for it. The fault has the "
        "kind `user-code`: `rank R ended with exit status 0 before the others had finished`.",
        "Every other status and every signal is a fault. An exception that the rank wrote to its "
        "error file decides before the status. An `[[exit]]` entry in a file of your own "
        "(`--fault-tables FILE`, field `fault_tables`) gives a status another meaning. It goes "
        "before the entries below. [Faults](../recover/faults.md) describes the kinds and the "
        "file.",
        table(("Exit status or signal", "Kind of fault", "Meaning"), list(map(_rank_row, _RANKS))),
        "Another signal has the kind `process`. Another status above 128 means the signal with the "
        "number status - 128, if there is such a signal: 137 is SIGKILL. Every other status, also "
        "255, is the script's own choice, kind `user-code`.",
    )


def _rank_row(row: tuple[tuple[int | str, ...], str]) -> tuple[str, str, str]:
    ends, meaning = row
    kinds = {load(None).by_key["exit"][end].kind.value for end in ends}
    return ", ".join(map(str, ends)), codes(sorted(kinds)), meaning
