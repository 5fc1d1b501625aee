"""Read and write a policy in YAML: own fields, or a job of ModelArts or MindCluster."""

from __future__ import annotations

import difflib
import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from rekindle.errors import UsageError
from rekindle.recovery.policy.annotations import (
    KNOWN,
    from_mindcluster,
    from_modelarts,
    notices,
    to_mindcluster,
    to_modelarts,
)
from rekindle.recovery.policy.dialect import (
    MODELARTS_PREFIX,
    RECOVER_STRATEGY,
    WAIT_RESCHEDULE,
    Dialect,
    dialect_of,
)
from rekindle.recovery.policy.policy import Policy
from rekindle.user_file import place_of
from rekindle.yaml_file import Document

BACKOFF_LIMIT = "backoffLimit"  # of `runPolicy`, next to the labels and annotations
_ANNOTATIONS = (RECOVER_STRATEGY, WAIT_RESCHEDULE)
_ALIKE = 0.9  # a key with at least this similarity (of 1) to a known key is a misspelling


def read_policy(path: Path) -> Policy:
    """Return the policy of a file.

    A file with `metadata` is a Kubernetes object, with the annotations of ModelArts, or the labels
    and annotations of MindCluster. Raises UsageError: the file is unreadable or invalid, or has
    those of both; the message names the field, and its line.
    """
    document = Document(path, "policy file")
    try:
        return _policy_of(document.value)
    except msgspec.ValidationError as error:
        problem, place = place_of(error)
        raise document.error(error, place, problem) from error
    except UsageError as error:
        raise document.error(error, about=str(error)) from error


def notices_about(path: Path) -> list[str]:
    """Return sentences about labels and annotations of a file that `read_policy` accepts."""
    found = Document(path, "policy file").value
    if not isinstance(found, dict) or "metadata" not in found:
        return []
    metadata = _mapping(found, "metadata")
    return notices(_mapping(metadata, "labels"), _mapping(metadata, "annotations"))


def policy_of_keys(keys: Mapping[str, str]) -> tuple[Policy, list[str]]:
    """Return the policy of the labels and annotations of a job, and `notices` about them.

    keys: labels and annotations together; no label has the name of an annotation. The key
    `backoffLimit` is that of the job's `runPolicy`. Raises UsageError: as `read_policy` does, and
    for a key that does not concern recovery, because it would have no effect.
    """
    given = {key: value for key, value in keys.items() if key != BACKOFF_LIMIT}
    _check_known(tuple(given))
    for key in given:
        if key not in KNOWN and not key.startswith(MODELARTS_PREFIX):
            raise UsageError(f"{key} does not concern recovery; remove it")
    metadata: dict[str, dict[str, str]] = {"labels": {}, "annotations": {}}
    for key, value in given.items():
        of_annotation = key in _ANNOTATIONS or key.startswith(MODELARTS_PREFIX)
        metadata["annotations" if of_annotation else "labels"][key] = value
    found: dict[str, Any] = {"metadata": metadata}
    if limit := keys.get(BACKOFF_LIMIT):
        if not (limit.isascii() and limit.isdigit()):
            raise UsageError(f"{BACKOFF_LIMIT} is {limit!r}; give a whole number")
        found["spec"] = {"runPolicy": {BACKOFF_LIMIT: int(limit)}}
    return _of_object(found), notices(metadata["labels"], metadata["annotations"])


def _policy_of(found: object) -> Policy:
    if not isinstance(found, dict):
        raise UsageError("write fields, for example max_restarts: 3")
    if "metadata" not in found:
        return msgspec.convert(found, Policy)
    beside = [name for name in found if name in Policy.__struct_fields__]
    if beside:
        raise UsageError(
            f"{beside[0]} and metadata exclude each other, because metadata describes the whole "
            "policy; remove one"
        )
    return _of_object(found)


def _of_object(found: Mapping[str, Any]) -> Policy:
    metadata = _mapping(found, "metadata")
    labels = _texts(_mapping(metadata, "labels"))
    annotations = _texts(_mapping(metadata, "annotations"))
    _check_known((*labels, *annotations))
    if dialect_of((*labels, *annotations)) is Dialect.MODELARTS:
        return from_modelarts(annotations)
    run_policy = _mapping(_mapping(found, "spec"), "runPolicy")
    limit = run_policy.get(BACKOFF_LIMIT)
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int)):
        raise UsageError(f"spec.runPolicy.{BACKOFF_LIMIT} is {limit!r}; give a whole number")
    return from_mindcluster(labels, annotations, backoff_limit=limit)


def _check_known(keys: tuple[str, ...]) -> None:
    """Check that the keys concern recovery and are spelled correctly. Raises UsageError."""
    for key in keys:
        like = difflib.get_close_matches(key, KNOWN, n=1, cutoff=_ALIKE)
        if like and key not in KNOWN:
            raise UsageError(f"{key} is unknown; did you mean {like[0]}?")
    if not any(key in KNOWN or key.startswith(MODELARTS_PREFIX) for key in keys):
        raise UsageError(
            f"metadata has no label or annotation about recovery; known ones are {', '.join(KNOWN)}"
        )


def _mapping(found: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = found.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UsageError(f"{name} is {value!r}; write fields below it")
    return value


def _texts(found: Mapping[str, Any]) -> dict[str, str]:
    """Return labels or annotations, which must be text in Kubernetes."""
    for key, value in found.items():
        if not isinstance(value, str):
            raise UsageError(f"{key} is {value!r}, which is not text; write it in quotes")
    return dict(found)


class PolicyFormat(str, enum.Enum):
    """Name the formats of a policy."""

    OWN = "own"
    MODELARTS = "modelarts"
    MINDCLUSTER = "mindcluster"


def write_policy(policy: Policy, form: PolicyFormat) -> str:
    """Return a policy as YAML: its own fields, or an object in the format of another platform.

    The object expresses as much of the policy as possible. Raises UsageError: the format cannot
    express any of it.
    """
    if form is PolicyFormat.OWN:
        return yaml.safe_dump(msgspec.to_builtins(policy), sort_keys=False)
    written: dict[str, Any]
    if form is PolicyFormat.MODELARTS:
        written = {"metadata": {"annotations": to_modelarts(policy)}}
    else:
        labels, annotations, limit = to_mindcluster(policy)
        written = {"metadata": {"labels": labels, "annotations": annotations}}
        written |= {"spec": {"runPolicy": {BACKOFF_LIMIT: limit}}} if limit else {}
    return yaml.safe_dump(written, sort_keys=False)
