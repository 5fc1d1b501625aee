"""The page of the files in a job directory and in the home directory."""

from __future__ import annotations

import re
from pathlib import Path

from reference_tables.markdown import check_names, code, page, table
from rekindle import names

# (path below the directory, writer, content)
_JOB = [
    (
        names.SPEC_FILE,
        "launcher",
        "The job's description, as JSON: all settings, the policy, and the job's variables. For a "
        "job of a flow these include the key of a saved store. Only the owner may read it (mode "
        "0600).",
    ),
    (
        names.SECRET_FILE,
        "launcher",
        "The job's secret: 64 hexadecimal digits, or `REKINDLE_SECRET`. Each request to the "
        "coordinator needs it. Only "
        "the owner may read it (mode 0600). An existing secret stays when the job runs again.",
    ),
    (
        names.MONITOR_FILE,
        "launcher",
        "A token for monitors on the coordinator's machine. It permits only `POST /health-events`, "
        "and only over the loopback address. Mode 0600; an existing token stays.",
    ),
    (
        names.JOURNAL_FILE,
        "coordinator",
        "The [journal](journal-events.md): one event on each line, as JSON, of all attempts. "
        "`rekindle status` and `rekindle incidents` read it.",
    ),
    (
        names.ENDPOINT_FILE,
        "coordinator",
        "Where the coordinator listens or last listened, as JSON: `host`, `port`, `pid`, "
        "`attempt`.",
    ),
    (
        f"coordinator{names.BUG_FILE}N.json",
        "coordinator",
        "Report N of a bug that ended a coordinator, as JSON: `at` (seconds since the epoch), "
        "`rekindle` (the version), `pid`, `error`, `traceback`, and `inputs`: the newest 50 inputs "
        "of the state machine. An input is a message, a timer, an order, a lost agent, a stop or "
        "the start. `rekindle status` shows the error. Only the owner may read the file. It does "
        "not contain the secret, but texts of errors of the script.",
    ),
    (
        f"flow{names.BUG_FILE}N.json",
        "flow",
        "Report N of a bug that ended a thread of a flow's process, in the same format, without "
        "`inputs`. The process continues.",
    ),
    (
        f"agent-N{names.BUG_FILE}N.json",
        "agent",
        "Report of a bug that ended the agent of a node, in the same format, without `inputs`. "
        "The node is lost, and another agent replaces it.",
    ),
    (names.LAUNCH_LOCK_FILE, "launcher", "Lock: only one process at a time launches the job."),
    (
        names.NOTICES_FILE,
        "flow",
        "The number of the last event of the journal that the flow has reported to Prefect. A "
        "rerun continues after it.",
    ),
    (
        names.DEVICES_FILE,
        "flow",
        "Names of the devices of this machine that the agents of the job hold, one on each line.",
    ),
    (names.PODS_FILE, "flow", "The settings of the pods of a job in Kubernetes."),
    (
        names.CLUSTER_FILE,
        "flow",
        "Address of the cluster that runs a job in Kubernetes.",
    ),
    (
        "coordinator.log",
        "coordinator",
        "Output of the coordinator, if a flow launched the job. See below for `rekindle run`. "
        "[Log lines](../operate/running.md#log-lines) describes the lines.",
    ),
    ("agent-N.log", "agents", "Output of the agent of node N, if a flow launched the job."),
    (
        "agent-spare.log",
        "agents",
        "Output of the agents of spare nodes, if a flow launched the job.",
    ),
    (
        f"{names.LOGS_DIRECTORY}/attempt_R/RANK/stdout.log",
        "agents",
        "Standard output of a rank after R restarts of all ranks in the attempt: 0 at first. A "
        "later attempt appends to `attempt_0`. With `--log-dir` another folder has `attempt_R`.",
    ),
    (
        f"{names.LOGS_DIRECTORY}/attempt_R/RANK/stderr.log",
        "agents",
        "Standard error of the rank.",
    ),
    (
        f"{names.LOGS_DIRECTORY}/attempt_R/RANK/{names.ERROR_FILE}",
        "ranks",
        "The exception that ended the rank with its traceback, in the format of torchrun.",
    ),
    (
        f"{names.LOGS_DIRECTORY}/attempt_R/RANK/{names.STACK_FILE}",
        "ranks",
        "Stacks of the rank's threads, after a hang.",
    ),
    (f"{names.LOGS_DIRECTORY}/scheduler_N.log", "agents", "Output of MindSpore's scheduler."),
    (
        f"{names.LOGS_DIRECTORY}/POD-UID.log",
        "flow",
        "Output of a pod of a job in Kubernetes.",
    ),
    (
        f"{names.METRICS_DIRECTORY}/rankR.jsonl",
        "ranks",
        "Step records: the values of `step.log()`, one record on each line, as JSON: `step`, "
        "`generation`, `rank`, `at` (seconds since the epoch), `metrics`. R is the rank in the "
        "full world.",
    ),
    (
        f"{names.PROFILING_DIRECTORY}/TASK/RANK/TIME",
        "ranks",
        "Records of light profiling.",
    ),
    (
        f"{names.CHECKPOINT_DIRECTORY}/step-N-gG",
        "agents",
        "Checkpoints, if the job names no other location; N is the step in 10 digits, G the "
        "generation in 6: `step-0000000130-g000002`. "
        "[Checkpoints](../recover/checkpoints.md#files-of-a-checkpoint) has the files in it.",
    ),
    (
        f"{names.NODES_DIRECTORY}/HOST",
        "joined nodes",
        "On a machine that joined with `rekindle run --coordinator`: the folders `logs`, "
        "`metrics` and `profiling` of its ranks, `job.json`, and a file `secret` that is not the "
        "job's secret and has no use. See below.",
    ),
    (names.REPORT_FILE, "flow", "The report of the job, as Markdown."),
    (names.TIMELINE_FILE, "flow", "The picture of the report."),
    (
        names.BROUGHT_DIRECTORY,
        "retrain flow",
        "The copy of a checkpoint from S3, for the evaluate command.",
    ),
    (
        names.CALLERS_FILE,
        "flow",
        "The flow runs that launched the job (`launched ID`), and the calls of a parent that have "
        "got its result (`result ID COUNT`, of the calling task run or flow run). An equal call "
        "after that, without a rerun of the parent, has another job.",
    ),
    (
        names.PREPARED_FILE,
        "retrain flow",
        "An empty file: the prepare command has succeeded. While it exists, a rerun of the flow "
        "run does not start the command again.",
    ),
    (names.PREPARE_LOCK_FILE, "retrain flow", "Lock of the prepare command."),
    (names.EVALUATE_LOCK_FILE, "retrain flow", "Lock of the evaluate command."),
]

_CASES = [
    (
        "`rekindle run`: output of coordinator and agents",
        "It goes to the terminal of the command. The files `coordinator.log` and `agent-N.log` do "
        "not exist.",
    ),
    (
        "A machine joined with `rekindle run --coordinator`, and `REKINDLE_HOME` is set there",
        "Logs and records of its ranks stay on that machine, in `jobs/JOB/nodes/HOST`; HOST is its "
        "hostname.",
    ),
    (
        "The same without `REKINDLE_HOME`",
        "They are in a temporary folder `rekindle-node-...`. The command removes it at its end.",
    ),
    (
        "A job in Kubernetes",
        "Logs and records of ranks are in their pods, and Kubernetes removes them with the pods. "
        "With the field `kubernetes.home` they are in `jobs/JOB/nodes/HOST` below this folder, "
        "on a volume.",
    ),
    (
        "The disk is full",
        "Training continues. Journal events use the 256 KiB that the file has in advance, and then "
        "wait in memory until the file can take them. Lines of "
        "logs and step records can be lost, and a message reports the loss. A checkpoint that "
        "cannot be written is an incident of kind `storage`.",
    ),
    (
        "The job runs again with the same id",
        "The secret stays, the journal and the logs continue, and `job.json` is replaced.",
    ),
]

_HOME = [
    ("jobs/JOB", "launcher", "The directory of a job."),
    (
        names.HOSTS_FILE,
        "launcher",
        "Faults, isolation, release and checks of hosts, as JSON lines. All jobs of the user share "
        "it; `rekindle nodes` prints it.",
    ),
    (f"{names.HOSTS_DIRECTORY}/NAME", "launcher", "Lock of a simulated host."),
    (
        f"{names.DEVICES_DIRECTORY}/NAME",
        "launcher",
        "Lock of a device that a job of a flow holds, and the id of the job.",
    ),
    (
        f"{names.HOSTS_DIRECTORY}/NAME{names.CONDITION_SUFFIX}",
        "user",
        "Simulated faults of a host, as JSON: `broken`, `sick_devices`.",
    ),
]

_HEADS = ("Path", "Written by", "Content")


def files() -> str:
    """Return the page of files.

    Raises ValueError: a name of the source has no row here.
    """
    known = {
        value: name
        for name, value in vars(names).items()
        if name.endswith(("_FILE", "_DIRECTORY", "_SUFFIX")) and not name.startswith("ENV_")
    }
    used = {
        value for value in known for path, *_ in (*_JOB, *_HOME) if value in path.replace("/", " ")
    }
    check_names("files", known, used)
    return page(
        "Files of a job",
        "This page lists the files that Rekindle writes for a job and for all jobs of a user. The "
        "events of the journal are in [Journal events](journal-events.md). The layout of a store "
        "of checkpoints is in [Stores](../recover/stores.md#what-a-store-contains).",
        "## Job directory",
        "The directory of a job is `jobs/JOB` in the home directory (`REKINDLE_HOME`, by default "
        "`~/.rekindle`), so `~/.rekindle/jobs/JOB`. The coordinator of a job in Kubernetes has its "
        f"home in {code(names.POD_HOME)}. Rekindle never removes a job directory. Remove it "
        "yourself when you do not need the job any more.",
        _table(_JOB),
        table(("Case", "What happens"), _CASES),
        "## Home directory",
        _table(_HOME),
    )


def unlisted(home: Path) -> list[str]:
    """Return the files of all job directories below a home directory that have no row here."""
    known = re.compile("|".join(f"({_pattern(path)})(/.*)?" for path, *_ in _JOB))
    found = (path.relative_to(home / "jobs") for path in home.glob("jobs/**/*") if path.is_file())
    return sorted(
        path.as_posix() for path in found if not known.fullmatch("/".join(path.parts[1:]))
    )


def _pattern(path: str) -> str:
    """Return a regular expression for the paths of a row, in which words in capitals vary."""
    if path.startswith(names.CHECKPOINT_DIRECTORY):
        return names.CHECKPOINT_DIRECTORY  # the page of stores has the rest
    return re.sub(r"[A-Z]+(?:\\-[A-Z]+)?", "[^/]+", re.escape(path))


def _table(rows: list[tuple[str, str, str]]) -> str:
    return table(_HEADS, [(code(path), *rest) for path, *rest in rows])
