"""Files of a job directory and of the home directory."""

from __future__ import annotations

from reference_tables.markdown import check_names, code, page, table
from rekindle import names
from rekindle.tasks.report import REPORT_FILE, TIMELINE_FILE
from rekindle.tasks.retraining import BROUGHT_DIRECTORY

# (path below the directory, who writes it, content)
_JOB = [
    (names.SPEC_FILE, "launcher", "The job's description, as JSON. It has the job's variables."),
    (names.SECRET_FILE, "launcher", "The job's secret. Only the owner may read it (mode 0600)."),
    (
        names.JOURNAL_FILE,
        "coordinator",
        "The [journal](journal-events.md): one event on each line.",
    ),
    (names.ENDPOINT_FILE, "coordinator", "Address, process id and attempt of the coordinator."),
    (names.LAUNCH_LOCK_FILE, "launcher", "Lock: only one process at a time launches the job."),
    (names.PODS_FILE, "flow", "The settings of the pods of a job in Kubernetes."),
    (
        names.CLUSTER_FILE,
        "flow",
        "Address of the cluster that runs a job in Kubernetes.",
    ),
    ("coordinator.log", "coordinator", "Output of the coordinator, if a flow launched the job."),
    ("agent-N.log", "agents", "Output of the agent of node N, if a flow launched the job."),
    (
        "agent-spare.log",
        "agents",
        "Output of the agents of spare nodes, if a flow launched the job.",
    ),
    (
        f"{names.LOGS_DIRECTORY}/attempt_R/RANK/stdout.log",
        "agents",
        "Standard output of a rank after R restarts of all ranks. `stderr.log` is beside it.",
    ),
    (
        f"{names.LOGS_DIRECTORY}/attempt_R/RANK/{names.ERROR_FILE}",
        "ranks",
        "The exception that ended the rank, in the format of torchrun.",
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
    (f"{names.METRICS_DIRECTORY}/rankR.jsonl", "ranks", "Step records: one step on each line."),
    (
        f"{names.PROFILING_DIRECTORY}/TASK/RANK/TIME",
        "ranks",
        "Records of light profiling.",
    ),
    (
        f"{names.CHECKPOINT_DIRECTORY}/step-N-gG",
        "agents",
        "Checkpoints, if the job names no other location.",
    ),
    (
        f"{names.NODES_DIRECTORY}/HOST",
        "joined nodes",
        "The same folders for a node that joined from another machine with REKINDLE_HOME.",
    ),
    (REPORT_FILE, "flow", "The report of the job, as Markdown."),
    (TIMELINE_FILE, "flow", "The picture of the report."),
    (
        BROUGHT_DIRECTORY,
        "retrain flow",
        "The copy of a checkpoint from S3, for the evaluate command.",
    ),
    ("evaluate.lock", "retrain flow", "Lock of the evaluate command."),
]

_HOME = [
    ("jobs/JOB", "launcher", "The directory of a job."),
    (names.HOSTS_FILE, "launcher", "Faults, isolation and checks of hosts, as JSON lines."),
    (f"{names.HOSTS_DIRECTORY}/NAME", "launcher", "Lock of a simulated host."),
    (
        f"{names.HOSTS_DIRECTORY}/NAME{names.CONDITION_SUFFIX}",
        "user",
        "Simulated faults of a host, as JSON: `broken`, `sick_devices`.",
    ),
]

_HEADS = ("Path", "Written by", "Content")


def files() -> str:
    """Return the page of files. Raises ValueError: a name of the source has no row here."""
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
        "## Job directory",
        "The directory of a job is `jobs/JOB` in the home directory (`REKINDLE_HOME`, by default "
        "`~/.rekindle`). The coordinator of a job in Kubernetes has its home in "
        f"{code(names.POD_HOME)}.",
        _table(_JOB),
        "## Home directory",
        _table(_HOME),
    )


def _table(rows: list[tuple[str, str, str]]) -> str:
    return table(_HEADS, [(code(path), *rest) for path, *rest in rows])
