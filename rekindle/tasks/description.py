"""Compare the descriptions of two jobs: one table of all fields. Pure.

A field counts if a run without a fault could give another result because of it: other values of
the model, or other checkpoints. A field that decides only what happens after a fault, where the
nodes run, or what is printed does not count. So a person can correct it and continue the job.

The script counts by its name, not by its content: a corrected script continues its job.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePath
from typing import NamedTuple

import msgspec

from rekindle import names
from rekindle.checkpoints.location import S3Location, above, parse
from rekindle.engines.kubernetes.manifests.settings import KubernetesSettings
from rekindle.job.spec import EntryKind, JobSpec

_MOST_CHARACTERS = 60  # of a value in a message
_FAULTS = "decides what happens after a fault"
_PLACE = "decides where and how the nodes run"
_OUTPUT = "decides what is printed or recorded"
_FROM_ID = "follows from the job id"
_NOT_IN_FORM = "a job of a flow does not set it"

# Variables that no result depends on: keys that people rotate, the reaction to faults, limits of
# records, log levels.
_KEYS = (
    *names.STORE_KEYS,
    names.ENV_FAILOVER_GRACE,
    *names.PROFILING_SETTINGS,
)
_UNCOUNTED = re.compile(
    r"AWS_(ACCESS_KEY_ID|SECRET_ACCESS_KEY|SESSION_TOKEN)|LOG_?LEVEL|GLOG_\w+"
    r"|PYTHON(UNBUFFERED|FAULTHANDLER)"
    r"|(TORCH|NCCL|HCCL|ASCEND|PREFECT)_(\w+_)?(S?LOGS?|LOGGING|DEBUG)(_\w+)?"
)


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """A job as described, and how to compare it.

    secret_variables: the variables whose values a block keeps; they do not count, because people
    rotate secrets. below: the number of folders in a relative working directory of the form. None:
    it is absolute. Each run may have another folder of its process, such as a new clone. So only
    the folders count that the form names.
    """

    spec: JobSpec
    pods: KubernetesSettings | None = None
    secret_variables: frozenset[str] = frozenset()
    below: int | None = None


class Row(NamedTuple):
    """A row of the table.

    `form` is the field's name in the form; empty: the form has no such field. `why` is the reason
    why it does or does not count. `view` returns the value that counts; None: it does not count.
    """

    form: str
    why: str
    view: Callable[[Description], object] | None = None


class Differences(NamedTuple):
    """`counting`: the fields that make another job, with both values. `others`: names of others."""

    counting: tuple[str, ...]
    others: tuple[str, ...]


def _spec(name: str) -> Callable[[Description], object]:
    return lambda described: getattr(described.spec, name)


def _pods(name: str) -> Callable[[Description], object]:
    return lambda described: getattr(described.pods, name, None) or None


def _target(described: Description) -> str:
    spec = described.spec
    if spec.entry is not EntryKind.SCRIPT:
        return spec.target
    return _from(str(Path(spec.working_directory, spec.target)), spec.working_directory)


def _working_directory(described: Description) -> str:
    path = described.spec.working_directory
    if described.below is None:
        return path
    return "/".join(PurePath(path).parts[-described.below :]) if described.below else ""


def _environment(described: Description) -> dict[str, str]:
    given = described.spec.environment
    return {name: value for name, value in given.items() if _is_input(name, described)}


def _is_input(variable: str, described: Description) -> bool:
    """Return whether the program's result may depend on a variable."""
    secret = variable in _KEYS or variable in described.secret_variables
    return not secret and _UNCOUNTED.fullmatch(variable) is None


def _checkpoint_store(described: Description) -> str:
    """Return the location that the form gives, without the job's own folder below it."""
    spec = described.spec
    if spec.checkpoint_store == str(PurePath(spec.directory, names.CHECKPOINT_DIRECTORY)):
        return ""
    location = parse(above(spec.checkpoint_store)[0])
    if isinstance(location, S3Location):
        return f"{location.endpoint or ''} {location.url()}"
    return _from(str(location), spec.working_directory)


def _checkpoints(described: Description) -> bool:
    return described.spec.checkpoint_every != 0


def _from(path: str, folder: str) -> str:
    """Return a path relative to a folder, if it is inside; the folder may be a clone."""
    inside = PurePath(path).is_relative_to(folder)
    return str(PurePath(path).relative_to(folder)) if inside else path


def _without_effect(why: str, *fields: str, prefix: str = "") -> dict[str, Row]:
    return {f"{prefix}{field}": Row(f"{prefix}{field}", why) for field in fields}


# Every field of JobSpec, and every field of KubernetesSettings after "kubernetes.".
TABLE: dict[str, Row] = {
    "entry": Row("script, module or program", "is the program", _spec("entry")),
    "target": Row("script, module or program", "is the program", _target),
    "arguments": Row("arguments", "are the program's input", _spec("arguments")),
    "framework": Row("framework", "computes the values", _spec("framework")),
    "nodes": Row("nodes", "is a part of the world size", _spec("nodes")),
    "processes_per_node": Row(
        "processes_per_node", "is a part of the world size", _spec("processes_per_node")
    ),
    "environment": Row("environment", "is the program's input", _environment),
    "working_directory": Row(
        "working_directory", "holds the program and its data", _working_directory
    ),
    "checkpoint_store": Row("checkpoint.path", "holds the result", _checkpoint_store),
    "checkpoint_every": Row(
        "checkpoint.every", "decides whether there are checkpoints to publish", _checkpoints
    ),
    "job_id": Row("", "is what the comparison is for"),
    "directory": Row("", _FROM_ID),
    "log_directory": Row("", _FROM_ID),
    **_without_effect(_FAULTS, "min_nodes", "spares", "snapshot_every", "policy", "fault_tables"),
    "network_check": Row("node_check.enabled", _PLACE),
    "exclude_straggler": Row("node_check.exclude_straggler", _PLACE),
    "node_check": Row("node_check", _PLACE),
    "keep": Row("checkpoint.keep", "removes only older checkpoints"),
    "allow_injection": Row("allow_injection", _FAULTS),
    "master_addr": Row("", _NOT_IN_FORM),
    "master_port": Row("", _NOT_IN_FORM),
    "role": Row("", _NOT_IN_FORM),
    "redirects": Row("", _OUTPUT),
    "tee": Row("", _OUTPUT),
    "engine": Row("", _NOT_IN_FORM),
    "keeps_off": Row("", _NOT_IN_FORM),
    "kubernetes.image": Row("kubernetes.image", "holds the program", _pods("image")),
    "kubernetes.volumes": Row("kubernetes.volumes", "hold the data", _pods("volumes")),
    "kubernetes.env_from_secrets": Row(
        "kubernetes.env_from_secrets", "are the program's input", _pods("env_from_secrets")
    ),
    "kubernetes.overrides": Row(
        "kubernetes.overrides", "may change image, volumes or command", _pods("overrides")
    ),
    "kubernetes.pod_overrides": Row(
        "kubernetes.pod_overrides", "may change image, volumes or command", _pods("pod_overrides")
    ),
    **_without_effect(
        _PLACE,
        *("kind", "namespace", "device", "devices_per_node", "cpu", "memory", "shared_memory"),
        *("service_account", "image_pull_policy", "image_pull_secrets", "queue", "home"),
        *("priority_class", "node_selector", "tolerations", "anti_affinity", "topology_key"),
        *("gang", "termination_grace_s", "labels", "annotations", "host_network"),
        *("network_policy", "coordinator", "ascend"),
        prefix="kubernetes.",
    ),
    **_without_effect(
        _FAULTS, "isolated_hosts", "recovery", "recover_strategy", prefix="kubernetes."
    ),
}

# Every field of TrainingJob: the rows of the table that its value decides.
FORM: dict[str, tuple[str, ...]] = {
    "name": (),  # of the id
    "job_id": (),
    "script": ("entry", "target"),
    "module": ("entry", "target"),
    "program": ("entry", "target"),
    "arguments": ("arguments",),
    "framework": ("framework",),
    "nodes": ("nodes",),
    "processes_per_node": ("processes_per_node",),
    "min_nodes": ("min_nodes",),
    "spares": ("spares",),
    "environment": ("environment",),
    "working_directory": ("working_directory",),
    "checkpoint": ("checkpoint_store", "checkpoint_every", "keep"),
    "snapshot_every": ("snapshot_every",),
    "allow_injection": ("allow_injection",),
    "saved_cluster": ("nodes", "processes_per_node", "min_nodes", "spares", "environment"),
    "saved_store": ("checkpoint_store", "checkpoint_every", "keep", "environment"),
    "saved_policy": ("policy",),
    "fault_tables": ("fault_tables",),
    "devices": (),
    "only_newest": (),
    "policy": ("policy",),
    "annotations": ("policy",),
    "node_check": ("network_check", "exclude_straggler", "node_check"),
    "kubernetes": tuple(name for name in TABLE if name.startswith("kubernetes.")),
}


def digest(described: Description) -> str:
    """Return a digest of all that counts: 64 hexadecimal digits, without any secret.

    An empty value is left out, so a new row of the table does not change the digests of jobs that
    do not use it.
    """
    views = {name: row.view(described) for name, row in TABLE.items() if row.view is not None}
    counting = {name: value for name, value in views.items() if value}
    return hashlib.sha256(msgspec.json.encode(counting, order="deterministic")).hexdigest()


def differences(known: Description, wanted: Description) -> Differences:
    """Compare a job that exists with the job that a run describes.

    No text contains the value of a variable, which may be a secret.
    """
    known = msgspec.structs.replace(
        known, secret_variables=wanted.secret_variables, below=wanted.below
    )
    counting: list[str] = []
    others: list[str] = []
    for name, row in TABLE.items():
        if row.view is not None:
            before, now = row.view(known), row.view(wanted)
            if before != now:
                counting += _in_words(row.form, before, now)
        elif row.form:
            others += _names(row.form, _value(known, name), _value(wanted, name))
    changed = _changed(known.spec.environment, wanted.spec.environment)
    others += [f"environment.{name}" for name in changed if not _is_input(name, wanted)]
    return Differences(tuple(dict.fromkeys(counting)), tuple(others))


def _value(described: Description, name: str) -> object:
    of_pods, _, field = name.rpartition(".")
    return getattr(described.pods if of_pods else described.spec, field, None)


def _names(form: str, before: object, now: object) -> Iterable[str]:
    """Return the names of the fields that differ, also of the fields of a struct."""
    if before == now:
        return []
    if isinstance(before, msgspec.Struct) and isinstance(now, type(before)):
        fields = before.__struct_fields__
        return [f"{form}.{each}" for each in fields if getattr(before, each) != getattr(now, each)]
    return [form]


def _in_words(form: str, before: object, now: object) -> list[str]:
    if isinstance(before, dict) and isinstance(now, dict) and form == "environment":
        return [f"{form}.{name}" for name in _changed(before, now)]
    if isinstance(before, tuple) and isinstance(now, tuple):
        pairs = itertools.zip_longest(before, now)
        place = next(place for place, (old, new) in enumerate(pairs) if old != new)
        old, new = ([*before, None][place:][:1], [*now, None][place:][:1])
        return [f"{form} ({_short(*old)}, now {_short(*new)}, at place {place + 1})"]
    return [f"{form} ({_short(before)}, now {_short(now)})"]


def _changed(before: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    return [name for name in dict.fromkeys((*before, *now)) if before.get(name) != now.get(name)]


def _short(value: object) -> str:
    text = "none" if value in (None, "") else str(msgspec.to_builtins(value))
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."
