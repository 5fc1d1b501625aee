"""A policy in a YAML file: own fields, or a job of ModelArts or MindCluster."""

from __future__ import annotations

import difflib
import enum
import re
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from rekindle.errors import UsageError
from rekindle.recovery.policy.annotations import (
    KNOWN,
    MODELARTS_PREFIX,
    from_mindcluster,
    from_modelarts,
    to_mindcluster,
    to_modelarts,
)
from rekindle.recovery.policy.policy import Policy

_SHOWN = 40  # characters of a value that cannot be read


class StrictYamlError(Exception):
    """What cannot be read; line: where, from 1; 0: nobody knows."""

    def __init__(self, text: str, line: int = 0) -> None:
        super().__init__(text)
        self.line = line


class Document:
    """What a text says. Raises StrictYamlError."""

    def __init__(self, text: str) -> None:
        loader = _Loader(text)
        try:
            self.value: Any = loader.get_single_data()
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            said = error.problem or error.context
            raise StrictYamlError(f"is no YAML: {said}", mark.line + 1 if mark else 0) from error
        except yaml.YAMLError as error:
            raise StrictYamlError(f"is no YAML: {error}") from error
        except RecursionError as error:
            raise StrictYamlError("is nested too deeply to be meant so") from error
        finally:
            loader.dispose()
        self._lines = loader.lines

    def line_of(self, message: str) -> int:
        """Return the line of the key that a message is about: the longest that it names; or 0."""
        named = [key for key in self._lines if _names(message, key)]
        return self._lines[max(named, key=len)] if named else 0


def _names(message: str, key: str) -> bool:
    return bool(re.search(rf"(?<![\w/-]){re.escape(key)}(?![\w/-])", message))


class _Loader(yaml.SafeLoader):
    """PyYAML takes the last of two equal keys, and lets errors of values through as they are."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lines: dict[str, int] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        own: set[str] = set()
        for key_node, _ in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            if key_node.tag != "tag:yaml.org,2002:str":
                said = getattr(key_node, "value", None)
                what = repr(said) if isinstance(said, str) else "what stands before the colon"
                raise StrictYamlError(
                    f"{what} is no text, as a key has to be: write it in quotes", line
                )
            if key_node.value in own:
                raise StrictYamlError(f"{key_node.value} is given twice; keep one", line)
            own.add(key_node.value)
            self.lines.setdefault(key_node.value, line)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except ValueError as error:  # a number of many digits, a date that is none
            shown = str(node.value)[:_SHOWN]
            text = f"{shown!r} cannot be read as a value: {error}"
            raise StrictYamlError(text, node.start_mark.line + 1) from error


_ALIKE = 0.9  # of 1: a key that is so like a known one is that, misspelt


def read_policy(path: Path) -> Policy:
    """Read a policy.

    A file with `metadata` is a Kubernetes object, whose labels and annotations are read: those of
    ModelArts, if there are any, else those of MindCluster. Raises UsageError: the file cannot be
    read, or says what cannot be done; the message names the field, and its line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"policy {path} cannot be read: {error}") from error
    try:
        document = Document(text)
    except StrictYamlError as error:
        raise _wrong(path, error.line, error) from error
    try:
        return _policy_of(document.value)
    except (msgspec.ValidationError, UsageError) as error:
        raise _wrong(path, document.line_of(str(error)), error) from error


def _wrong(path: Path, line: int, error: Exception) -> UsageError:
    where = f"{path}:{line}" if line else str(path)
    return UsageError(f"policy {where}: {error}")


def _policy_of(found: object) -> Policy:
    if not isinstance(found, dict):
        raise UsageError("write fields, as max_restarts: 3")
    if "metadata" not in found:
        return msgspec.convert(found, Policy)
    beside = [name for name in found if name in Policy.__struct_fields__]
    if beside:
        raise UsageError(f"{beside[0]} cannot stand beside metadata, which says it all; drop one")
    return _of_object(found)


def _of_object(found: Mapping[str, Any]) -> Policy:
    metadata = _mapping(found, "metadata")
    labels = _texts(_mapping(metadata, "labels"))
    annotations = _texts(_mapping(metadata, "annotations"))
    _check_known((*labels, *annotations))
    if any(key.startswith(MODELARTS_PREFIX) for key in annotations):
        return from_modelarts(annotations)
    run_policy = _mapping(_mapping(found, "spec"), "runPolicy")
    limit = run_policy.get("backoffLimit")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int)):
        raise UsageError(f"spec.runPolicy.backoffLimit is {limit!r}; give a whole number")
    return from_mindcluster(labels, annotations, backoff_limit=limit)


def _check_known(keys: tuple[str, ...]) -> None:
    """Refuse an object that says nothing of recovery, or that misspells it. Raises UsageError."""
    for key in keys:
        like = difflib.get_close_matches(key, KNOWN, n=1, cutoff=_ALIKE)
        if like and key not in KNOWN:
            raise UsageError(f"{key} is not known; is {like[0]} meant?")
    if not any(key in KNOWN or key.startswith(MODELARTS_PREFIX) for key in keys):
        raise UsageError(
            f"metadata has no label or annotation that says what may be done; known are "
            f"{', '.join(KNOWN)}"
        )


def _mapping(found: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = found.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UsageError(f"{name} is {value!r}; write fields below it")
    return value


def _texts(found: Mapping[str, Any]) -> dict[str, str]:
    """Return labels or annotations, which Kubernetes takes as texts only."""
    for key, value in found.items():
        if not isinstance(value, str):
            raise UsageError(f"{key} is {value!r}, no text: write it in quotes")
    return dict(found)


class PolicyFormat(str, enum.Enum):
    """Whose way of writing a policy."""

    OWN = "own"
    MODELARTS = "modelarts"
    MINDCLUSTER = "mindcluster"


def write_policy(policy: Policy, form: PolicyFormat) -> str:
    """Return a policy as YAML: its own fields, or an object that says the most that others can.

    Raises UsageError: they have no words for any of it.
    """
    if form is PolicyFormat.OWN:
        return yaml.safe_dump(msgspec.to_builtins(policy), sort_keys=False)
    written: dict[str, Any]
    if form is PolicyFormat.MODELARTS:
        written = {"metadata": {"annotations": to_modelarts(policy)}}
    else:
        labels, annotations, limit = to_mindcluster(policy)
        written = {"metadata": {"labels": labels, "annotations": annotations}}
        written |= {"spec": {"runPolicy": {"backoffLimit": limit}}} if limit else {}
    return yaml.safe_dump(written, sort_keys=False)
