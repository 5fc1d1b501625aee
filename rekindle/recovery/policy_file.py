"""A policy in a file: its own fields as YAML (or JSON), or a job of ModelArts or MindCluster."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from rekindle.errors import UsageError
from rekindle.recovery.annotations import (
    MODELARTS_PREFIX,
    from_mindcluster,
    from_modelarts,
    to_mindcluster,
    to_modelarts,
)
from rekindle.recovery.policy import Policy


def read_policy(path: Path) -> Policy:
    """Read a policy.

    A file with `metadata` is a Kubernetes object, whose labels and annotations are read: those of
    ModelArts, if there are any, else those of MindCluster. Raises UsageError: the file cannot be
    read, or says what cannot be done; the message names the field.
    """
    try:
        found = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"policy {path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"policy {path} is no YAML: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"policy {path}: write fields, as max_restarts: 3")
    try:
        if "metadata" in found:
            return _of_object(found)
        return msgspec.convert(found, Policy)
    except (msgspec.ValidationError, UsageError) as error:
        raise UsageError(f"policy {path}: {error}") from error


def _of_object(found: Mapping[str, Any]) -> Policy:
    metadata = _mapping(found, "metadata")
    labels = _texts(_mapping(metadata, "labels"))
    annotations = _texts(_mapping(metadata, "annotations"))
    if any(key.startswith(MODELARTS_PREFIX) for key in annotations):
        return from_modelarts(annotations)
    run_policy = _mapping(_mapping(found, "spec"), "runPolicy")
    limit = run_policy.get("backoffLimit")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int)):
        raise UsageError(f"spec.runPolicy.backoffLimit is {limit!r}; give a whole number")
    return from_mindcluster(labels, annotations, backoff_limit=limit)


def _mapping(found: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = found.get(name) or {}
    if not isinstance(value, dict):
        raise UsageError(f"{name} is {value!r}; write fields below it")
    return value


def _texts(found: Mapping[str, Any]) -> dict[str, str]:
    """Return labels or annotations, which Kubernetes takes as texts only."""
    for key, value in found.items():
        if not isinstance(value, str):
            raise UsageError(f"{key} is {value!r}, no text: write it in quotes")
    return dict(found)


class Form(str, enum.Enum):
    """Whose way of writing a policy."""

    OWN = "own"
    MODELARTS = "modelarts"
    MINDCLUSTER = "mindcluster"


def write_policy(policy: Policy, form: Form) -> str:
    """Return a policy as YAML: its own fields, or an object that says the most that others can."""
    if form is Form.OWN:
        return yaml.safe_dump(msgspec.to_builtins(policy), sort_keys=False)
    if form is Form.MODELARTS:
        metadata = {"annotations": to_modelarts(policy)}
    else:
        labels, annotations = to_mindcluster(policy)
        metadata = {"labels": labels, "annotations": annotations}
    return yaml.safe_dump({"metadata": metadata}, sort_keys=False)
