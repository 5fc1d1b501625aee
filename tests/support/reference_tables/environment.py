"""The page of the environment variables that Rekindle reads or sets."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from repository import ROOT

from reference_tables.environment_rows import GROUPS
from reference_tables.markdown import check_names, code, page, table

_ABOUT = (
    "This page lists every variable that Rekindle reads or sets. [Commands and options]"
    "(commands.md) has the options of the command line, and [Fields of a training job](job.md) has "
    "the fields of a job."
)
_RULES = table(
    ("Case", "What happens"),
    [
        (
            "The user sets a variable of the section In ranks (such as `RANK`)",
            "Rekindle replaces the value.",
        ),
        (
            "The user sets a variable that has user and agent in the column Set by",
            "The value of the user stays. `PYTHONUNBUFFERED` is always 1.",
        ),
        (
            "The world changes its size while a rank runs",
            "The Session sets `RANK`, `WORLD_SIZE`, `GROUP_RANK`, `GROUP_WORLD_SIZE`, `ROLE_RANK` "
            "and `ROLE_WORLD_SIZE` in `os.environ` to the new values. `REKINDLE_SLOT` and "
            "`REKINDLE_FULL_WORLD` stay.",
        ),
        (
            "A job's field `environment` has a name that begins with `REKINDLE_`",
            "The job is refused. Give the key of a store in a block Rekindle Checkpoint Store.",
        ),
        (
            "`REKINDLE_PROFILING_...` is not a number in its limits",
            "Training continues with the default, and stderr has a line about it.",
        ),
        (
            "`REKINDLE_LOG_FORMAT` has another value",
            "The process uses `auto`, and writes a line about it.",
        ),
        (
            "`MA_FAILOVER_TERMINATION_GRACE_PERIOD_SECONDS` or a variable of HCCL is not valid, or "
            "contradicts the policy",
            "The job does not start: exit status 2.",
        ),
        (
            "Only one of the two keys `REKINDLE_STORE_..._KEY...` is set",
            "The job or command is refused: exit status 2.",
        ),
        (
            "Nodes join from other machines",
            "They get `REKINDLE_PROFILING_...` from the first `rekindle run`, and all other "
            "variables from their own machine. Pods get the whole `environment` of their job.",
        ),
    ],
)
_HEADS = ("Variable", "Meaning", "Unit", "Default", "Set by", "Read by")

# Texts above the table of a group.
_ABOVE = {
    "In pods": "`XDL_IP` and the variables below it exist only with `kubernetes.ascend.env`; this "
    "is the default if MindCluster recovers the job (`kubernetes.recovery: mindcluster`).",
}

# Texts of the source that look like a variable but are not.
_OTHERS = re.compile(
    r"F[68]_E\w+|RS_\w+|(?:DTYPE_CODES|TORCH_DTYPES|CONTACT_SUPPORT|SC_CLK_TCK|KILL_WORKER"
    r"|START_ALL_WORKER|WRONG_VERSION_NUMBER|REKINDLE_ROOT|MS_SCHED|MS_WORKER|RAISE_VARARGS"
    r"|CONFIG_UPSTREAMIP_KEY|LOCAL_HOST)"
)
_NAME = re.compile(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+")
# Variables of one word, and one that only a library reads.
_WORDS = {"RANK", "PATH", "PYTHONUNBUFFERED", "KUBECONFIG"}


def in_source() -> set[str]:
    """Return the names of all environment variables in the source."""
    files = (ROOT / "rekindle").rglob("*.py")
    found = {name for file in files for name in _texts(ast.parse(file.read_text()))}
    return {
        name for name in found if _NAME.fullmatch(name) and not _OTHERS.fullmatch(name)
    } | _WORDS


def _texts(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.arg


def environment() -> str:
    """Return the page of environment variables.

    Raises ValueError: a variable has no row here.
    """
    check_names("environment", in_source(), [name for rows in GROUPS.values() for name in rows])
    parts = [
        _ABOUT,
        "A rank gets the environment of its agent and the field `environment` of the job. Agents "
        "of `rekindle run` have its environment, without `REKINDLE_SECRET`. An agent on another "
        "machine has the environment of that machine.",
        "An empty cell in the column Default means that Rekindle sets the variable in the "
        "processes of that section, and that its value has no default. *none* means that the "
        "variable is usually not set.",
        _RULES,
    ]
    for title, rows in GROUPS.items():
        parts += [f"## {title}", *([_ABOVE[title]] if title in _ABOVE else [])]
        parts += [table(_HEADS, [_cells(name, *row) for name, row in rows.items()])]
    return page("Environment variables", *parts)


def _cells(
    name: str, set_by: str, read_by: str, unit: str, default: str, meaning: str
) -> tuple[str, ...]:
    return code(name), meaning, unit, default, set_by, read_by
