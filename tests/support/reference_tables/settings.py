"""The pages of settings: structs of msgspec with `Meta`, and models of pydantic with `Field`."""

from __future__ import annotations

import enum
import re
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec
from pydantic import BaseModel, SecretStr

from reference_tables.markdown import code, codes, page, sentence, table
from rekindle.blocks.forms import Form
from rekindle.blocks.job import TrainingJob
from rekindle.blocks.job_fields import CheckpointDirectory, NodeCheck
from rekindle.blocks.saved import SavedCluster, SavedPolicy, SavedStore
from rekindle.checkpoints.retention import Retention
from rekindle.cli.local_options import MAX_RESTARTS
from rekindle.engines.kubernetes.manifests.ascend import Ascend
from rekindle.engines.kubernetes.manifests.settings import (
    Coordinator,
    KubernetesSettings,
    Peer,
    Volume,
)
from rekindle.recovery.policy.policy import Policy
from rekindle.settings import CHOICES, declared
from rekindle.tasks.retraining import Retraining

# A number has its unit in its name, or in this table.
_UNITS = {
    "backoff_limit": "retries",
    "best": "checkpoints",
    "compute_factor": "times",
    "devices_per_node": "devices",
    "every": "steps",
    "every_steps": "steps",
    "fault_retry_times": "retries",
    "hours": "hours",
    "last": "checkpoints",
    "link_factor": "times",
    "max_hangs_in_row": "restarts",
    "max_in_row": "recoveries",
    "max_pod_reschedules": "placements",
    "max_recoveries": "recoveries",
    "max_reschedules": "placements",
    "max_reschedules_in_row": "placements",
    "max_restarts": "restarts",
    "min_available": "pods",
    "min_nodes": "nodes",
    "nodes": "nodes",
    "processes_per_node": "ranks",
    "ra_block": "devices",
    "snapshot_every": "steps",
    "sp_block": "devices",
    "spares": "nodes",
}
_QUANTITIES = {"cpu": "CPUs", "memory": "bytes", "shared_memory": "bytes"}
_BOUNDS = (("ge", "at least"), ("gt", "above"), ("le", "at most"), ("lt", "below"))
_UNLIMITED = 2**31 - 1  # the table leaves out limits that no user reaches


class Setting(NamedTuple):
    """The row of one field in a table."""

    name: str
    type: str
    unit: str
    default: str
    meaning: str


# Rules that the descriptions of single fields do not show.
_RULES = [
    (
        "name and id of the job",
        "`name` has 1 to 40 of a-z, 0-9 and -, and begins with a letter or digit. Without "
        "`job_id` the id of the job is the name, a dash, and 12 hexadecimal digits: the last ones "
        "of the flow run's id, or for a subflow those of a digest "
        "([flow.md](../deploy/flow.md#one-job-one-id)). Reruns keep it.",
    ),
    (
        "`script`, `module`, `program`",
        "Exactly one is necessary. With more or none, the job is refused (`give a script, a module "
        "or a program; script and module are given`). "
        "[What works for a program](../train/scripts.md#a-program-with-its-own-launcher).",
    ),
    (
        "`min_nodes`",
        "0, or 1 to `nodes`. With `framework: mindspore` only 0 or the value of `nodes`, because a "
        "world of MindSpore cannot change its size.",
    ),
    (
        "`saved_cluster`, `saved_store`, `saved_policy`",
        "The block replaces these fields of the job: `nodes`, `processes_per_node`, `min_nodes` "
        "and `spares`; `checkpoint`; `policy`. Variables of the cluster block and of the job add "
        "up, and the job's value counts. A block that does not exist is an error.",
    ),
    (
        "`environment`",
        "A name that begins with `REKINDLE_` is refused. Give the key of a store in a block "
        "Rekindle Checkpoint Store.",
    ),
    (
        "`checkpoint`",
        "By default no periodic checkpoints (`every` 0, `automatic` no). With `automatic: true` "
        "Rekindle chooses the interval, and `every` has no effect. The store is `PATH/JOB-ID`, so "
        "two jobs with one path do not mix. `keep.best` and `keep.metric` go together.",
    ),
    (
        "`kubernetes`",
        "Empty: the nodes are processes of this machine. With it the nodes are pods, "
        "`working_directory` must be an absolute path in their image, and `~` is refused in "
        "`working_directory` and `fault_tables`.",
    ),
    (
        "`kubernetes.termination_grace_s`",
        "By default `policy.dump_timeout_s` and 30 s, rounded up: 630 s with the default policy. A "
        "smaller value, such as 60, is refused (`give at least 630, or 0`).",
    ),
    (
        "`node_check.exclude_straggler`",
        "It switches the check on, also without `enabled`.",
    ),
]

HEADS = ("Field", "Type", "Unit", "Default", "Meaning")


def policy() -> str:
    """Return the page of the policy."""
    return page(
        "Policy fields",
        "This page lists the fields of a policy with their types, limits, defaults and errors. "
        "[The recovery policy](../recover/policy.md) has the strategies, their order for each kind "
        "of fault, and approvals.",
        "The defaults are the same wherever a policy is written:",
        table(("Where", "How"), _POLICIES),
        f"`rekindle run` without `--policy` has the same defaults, except that `--max-restarts` is "
        f"{code(MAX_RESTARTS)}, as for torchrun. With `--policy` the number of the file counts, or "
        f"its default of {code(Policy().max_restarts)}; `--max-restarts N` replaces both.",
        "```yaml\n# policy.yaml\nstrategies: [recover-in-place, recover, restart, dump]\n"
        "max_restarts: 3\napprove: [restart]\n```",
        "`rekindle policy FILE` checks a file and prints all its fields. A value that no strategy "
        "of the policy reads is no mistake: `rekindle policy` and `rekindle run` print a line "
        "about it. The policy of a job that runs does not change; `job.json` in its job directory "
        "has it.",
        "## Fields",
        _table(of_struct(Policy)),
        "A strategy that `strategies` does not name is not used; `fail` (the job ends) is always "
        "possible. No limit counts an eviction. For a strategy in `approve` the ranks wait until "
        "the form of the flow run or `rekindle approve JOB` (`--deny`) answers.",
        "## Errors",
        "A wrong policy ends the command before the job starts, with exit status 2 and a line with "
        "the file, the line in it and the field:",
        "```text\nrekindle: policy.yaml:1: Object contains unknown field `max_restart`\n```",
        table(("Mistake", "Example"), _POLICY_ERRORS),
        "In Python `rekindle.Policy` raises `ValueError`. The form of a flow marks the field.",
        "## Policies of ModelArts and MindCluster",
        "A file with `metadata` is read as a Kubernetes object. If it has annotations "
        "`fault-tolerance/...` of ModelArts, these make the policy; otherwise the labels and "
        "annotations of MindCluster do. `rekindle policy FILE --to modelarts` (or `mindcluster`, "
        "`own`) prints a policy in another format. "
        "[The recovery policy](../recover/policy.md#policies-of-modelarts-and-mindcluster) lists "
        "the names.",
    )


_POLICIES = (
    ("policy file", "YAML with the fields below; `rekindle run --policy FILE`"),
    ("Python", '`rekindle.Policy(approve=["restart"])`'),
    ("job of a flow", "`TrainingJob(policy=...)`, the form of the train flow"),
    ("job file of `rekindle kubernetes`", "`policy:`, with the fields below"),
    ("Prefect block", "of type Rekindle Policy"),
)


_POLICY_ERRORS = (
    ("an unknown or misspelled field", "`max_restart: 3`"),
    ("a value of another type, or outside its limits", "`max_restarts: -1`, `hang_timeout_s: 0`"),
    ("a strategy that occurs twice", "`strategies: [retry, retry]`"),
    ("a strategy that cannot be chosen", "`strategies: [fail]`, `approve: [dump]`"),
    ("fields next to `metadata`", "`max_restarts` in a file of ModelArts"),
    ("a file that cannot be read", "a wrong path"),
)


def job() -> str:
    """Return the page of the job, its blocks, and its pods."""
    parts: list[str] = [
        "This page lists every field of a job for Prefect and of a job file, with type, unit, "
        "default and limits. [Flows](../deploy/flow.md) shows how to run a job, and "
        "[Kubernetes](../deploy/kubernetes.md) shows complete job files. The options of "
        "`rekindle run` are in [Commands and options](commands.md).",
        "The train flow has one parameter, a `TrainingJob`. A job file of `rekindle kubernetes` "
        "has the same fields, as YAML. An unknown field, or a value outside its limits, is "
        "refused before anything starts.",
        table(("Rule", "What it means"), _RULES),
        "## TrainingJob",
        _table(of_model(TrainingJob)),
    ]
    for title, kind in (("checkpoint", CheckpointDirectory), ("node_check", NodeCheck)):
        parts += [f"## {title}", sentence(kind.__doc__ or ""), _table(of_model(kind))]
    parts += ["## checkpoint.keep", _doc(Retention), _table(of_struct(Retention))]
    parts += ["## policy", "The fields are on the page [Policy fields](policy-fields.md)."]
    for title, struct in (
        ("kubernetes", KubernetesSettings),
        ("kubernetes.coordinator", Coordinator),
        ("kubernetes.coordinator.peers", Peer),
        ("kubernetes.volumes", Volume),
        ("kubernetes.ascend", Ascend),
    ):
        parts += [f"## {title}", _doc(struct), _table(of_struct(struct))]
    parts += ["## Retraining", "The retrain flow has this second parameter.", _doc(Retraining)]
    parts += [_table(of_model(Retraining)), "## Blocks"]
    parts += ["Prefect stores these blocks. A job names them in `saved_cluster` and so on."]
    for block in (SavedCluster, SavedStore, SavedPolicy):
        parts += [f"### {block._block_type_name}", _doc(block), _table(_own(block))]
    return page("Fields of a training job", *parts)


def _own(block: type[BaseModel]) -> Iterator[Setting]:
    return (each for each in of_model(block) if each.name in block.__annotations__)


def _doc(kind: type) -> str:
    return " ".join((kind.__doc__ or "").split())


def _table(rows: Iterator[Setting]) -> str:
    return table(HEADS, [(code(row.name), *row[1:]) for row in rows])


def of_struct(struct: type[msgspec.Struct]) -> Iterator[Setting]:
    """Yield the fields of a struct.

    Raises ValueError: a field has no description, or a number has no unit.
    """
    hints = get_type_hints(struct, include_extras=True)
    for field in msgspec.structs.fields(struct):
        hint = hints[field.name]
        meta = declared(hint)
        default = field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        required = default is msgspec.NODEFAULT
        shown = "required" if required else _default(default)
        text = meta.description if meta is not None else ""
        yield _setting(struct, field.name, hint, shown, text or "")


def of_model(model: type[BaseModel]) -> Iterator[Setting]:
    """Yield the fields of a model.

    Raises ValueError: a field has no description, or a number has no unit.
    """
    for name, field in model.model_fields.items():
        hint = field.annotation
        if field.metadata:
            hint = Annotated[(hint, *field.metadata)]
        default = (
            "required"
            if field.is_required()
            else _default(field.get_default(call_default_factory=True))
        )
        yield _setting(model, name, hint, default, field.description or "")


def _setting(kind: type, name: str, hint: Any, default: str, text: str) -> Setting:
    shown = _type(hint)
    unit = _unit(name, shown)
    if not text or (unit is None and re.search(r"\b(?:integer|number)\b", shown)):
        raise ValueError(f"{kind.__name__}.{name}: give it a description, and a unit if a number")
    limits = _limits(hint)
    return Setting(name, shown + (f" ({limits})" if limits else ""), unit or "", default, text)


def _unit(name: str, shown: str) -> str | None:
    if name.endswith("_s"):
        return "seconds"
    if name in _QUANTITIES and shown == "text":
        return _QUANTITIES[name]
    return _UNITS.get(name) if "integer" in shown or "number" in shown else ""


def _default(value: Any) -> str:
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if isinstance(value, (msgspec.Struct, BaseModel)):
        return "its own defaults"
    if isinstance(value, enum.Enum):
        return code(value.value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple) and value:
        return codes(each.value if isinstance(each, enum.Enum) else each for each in value)
    if value is None or value in ("", (), [], {}) or not str(value).strip("*"):
        return "empty"
    if type(value).__name__ == "SecretDict":
        return "empty"
    return code(value)


_PLAIN = {str: "text", int: "integer", float: "number", bool: "yes or no", SecretStr: "secret text"}


def _type(hint: Any) -> str:
    meta = declared(hint)
    choices = (meta.extra or {}).get(CHOICES) if meta is not None else None
    bare, arguments = get_origin(hint), get_args(hint)
    if bare is Annotated:
        return _one(arguments[0], choices)
    return _one(hint, None)


def _one(hint: Any, choices: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is str and choices:
        return "one of " + codes(each or '""' for each in choices)
    if origin is Annotated:
        return _type(hint)
    if origin is Literal:
        return "one of " + codes(arguments)
    if origin in (list, tuple):
        if choices:
            return "list of " + codes(getattr(each, "value", each) for each in choices)
        return "list of " + _type(arguments[0])
    if origin is dict or hint is dict:
        return "mapping"
    if origin in (Union, types.UnionType):
        return " or ".join("empty" if each is type(None) else _type(each) for each in arguments)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return "one of " + codes(each.value for each in hint)
    if isinstance(hint, type) and issubclass(hint, (msgspec.Struct, BaseModel)):
        return "fields"
    return _PLAIN.get(hint, "mapping" if "Dict" in str(hint) else "")


def _limits(hint: Any) -> str:
    found: dict[str, Any] = {}
    for each in _metadata(hint):
        if isinstance(each, Form):
            continue
        for name, words in _BOUNDS:
            value = getattr(each, name, None)
            if value is not None and value != _UNLIMITED:
                found.setdefault(words, value)
    return ", ".join(f"{words} {value}" for words, value in found.items())


def _metadata(hint: Any) -> Iterator[Any]:
    yield from getattr(hint, "__metadata__", ())
    for each in get_args(hint):
        yield from _metadata(each)
