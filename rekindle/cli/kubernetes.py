"""Implement `rekindle kubernetes`: render a job's objects, and check a cluster for it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import msgspec
import yaml
from pydantic import ValidationError

from rekindle.blocks.job import TrainingJob
from rekindle.cli.terminal_output import table
from rekindle.engines.kubernetes.client.api import load
from rekindle.engines.kubernetes.manifests.render import Manifests, render
from rekindle.engines.kubernetes.manifests.settings import KubernetesSettings, WorkloadKind
from rekindle.engines.kubernetes.manifests.validation import check_pods
from rekindle.engines.kubernetes.preflight.namespace_checks import (
    FindingState,
    PreflightFinding,
    lacking,
    missing,
)
from rekindle.engines.kubernetes.preflight.preflight import survey
from rekindle.errors import UsageError
from rekindle.job.spec import EntryKind, JobSpec
from rekindle.yaml_file import Document

_HIDDEN = "(hidden)"
_FIRST = ("apiVersion", "kind", "metadata")
_PATIENCE_S = 5.0  # a user waits for the result


def run(options: argparse.Namespace) -> None:
    """Print the objects."""
    path = Path(options.file)
    spec, pods = read_job(path, kind=options.kind, job_id=options.job_id)
    try:
        manifests = render(spec, pods, secret=_HIDDEN, avoid=tuple(options.avoid))
    except UsageError as error:
        raise UsageError(f"{path}: kubernetes: {error}") from error
    print(stream(map(_without_secrets, manifests.every)), end="")


def read_job(
    path: Path, *, kind: str | None, job_id: str | None, namespace: str | None = None
) -> tuple[JobSpec, KubernetesSettings]:
    """Read a job file: the fields of a training job, `kubernetes` among them.

    kind, namespace: replace the file's values. job_id: default: the file's, or the job's name.
    Raises UsageError: the file is unreadable or invalid; the message names field and line.
    """
    document = Document(path, "job file")
    found = document.value
    if not isinstance(found, dict):
        raise UsageError(f"{path}: write fields, for example script: train.py")
    if not isinstance(found.get("kubernetes"), dict):
        raise UsageError(
            f"{path}: the field kubernetes is missing; describe the pods there, at least with image"
        )
    instead = {"kind": kind, "namespace": namespace}
    found["kubernetes"] |= {key: value for key, value in instead.items() if value is not None}
    try:
        job = TrainingJob.model_validate(found)
        spec = job.to_spec(job_id or job.job_id or job.name)
    except ValidationError as error:
        raise _wrong(document, error) from error
    except UsageError as error:
        raise document.error(error, about=str(error)) from error
    assert job.kubernetes is not None
    return spec, job.kubernetes


def _wrong(document: Document, error: ValidationError) -> UsageError:
    """Return all mistakes as one error, each with its field and line."""
    mistakes = []
    for one in error.errors(include_url=False, include_input=False, include_context=False):
        field = ".".join(map(str, one["loc"]))
        text = one["msg"].removeprefix("Value error, ")
        named = f"{field}: {text}" if field else text
        about = text if one["type"] == "value_error" else ""
        mistakes.append(str(document.error(named, one["loc"], about)))
    return UsageError("\n  ".join(mistakes))


def stream(manifests: Any) -> str:
    """Return the objects as a stream of YAML, with their fields in the usual order."""
    return "".join(
        "---\n" + yaml.dump(_ordered(one), Dumper=_Plain, sort_keys=False, width=100)
        for one in manifests
    )


def _ordered(manifest: dict[str, Any]) -> dict[str, Any]:
    first = {key: manifest[key] for key in _FIRST if key in manifest}
    return first | {key: value for key, value in manifest.items() if key not in _FIRST}


def _without_secrets(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the object with the values of a Secret hidden."""
    if manifest["kind"] != "Secret":
        return manifest
    hidden = dict.fromkeys(manifest["data"], _HIDDEN)
    return {key: value for key, value in manifest.items() if key != "data"} | {"stringData": hidden}


class _Plain(yaml.SafeDumper):
    """Writes equal parts repeatedly, without references, for readers of kubectl's input."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def check(options: argparse.Namespace) -> int:
    """Print all findings; return 1 if a job could not run. Raises UsageError: a wrong job file."""
    kind, wanted = _job(options)
    try:
        api = load(options.kubeconfig, options.context, patience_s=_PATIENCE_S)
    except UsageError as error:
        found = [missing("kubeconfig", str(error))]
    else:
        try:
            found = survey(api, kind, wanted)
        finally:
            api.close()
    if options.json:
        print(msgspec.json.encode(found).decode())
    else:
        _show(found)
    return 1 if lacking(found) else 0


def _job(options: argparse.Namespace) -> tuple[WorkloadKind, Manifests]:
    """Return the objects of the file's job, or of an example job of the kind."""
    if options.file is None:
        spec, pods = _any_job(options)
    else:
        path = Path(options.file)
        spec, pods = read_job(
            path, kind=options.kind, job_id=options.job_id, namespace=options.namespace
        )
    try:
        return pods.kind, render(spec, pods, secret="-")
    except UsageError as error:
        where = f"{options.file}: kubernetes: " if options.file else ""
        raise UsageError(f"{where}{error}") from error


def _any_job(options: argparse.Namespace) -> tuple[JobSpec, KubernetesSettings]:
    folder = "/var/lib/rekindle"
    spec = JobSpec(
        job_id=options.job_id or "rekindle-check",
        entry=EntryKind.SCRIPT,
        target="train.py",
        working_directory=folder,
        directory=folder,
        log_directory=folder,
        checkpoint_store=folder,
    )
    kind = WorkloadKind(options.kind or WorkloadKind.INDEXED_JOB.value)
    pods = KubernetesSettings(image="train", kind=kind, namespace=options.namespace or "default")
    check_pods(pods, spec)
    return spec, pods


def _show(found: list[PreflightFinding]) -> None:
    rows = [(one.what, _state(one), one.result or "-") for one in found]
    table(("what a job needs", "state", "found"), rows)
    to_do: dict[str, list[str]] = {}
    for one in found:
        if one.do and one.state is not FindingState.OK:
            do = f"{one.do} (optional)" if one.optional else one.do
            to_do.setdefault(do, []).append(one.what)
    for do, about in to_do.items():
        print(f"\n{', '.join(about)}:\n  {do}")


def _state(one: PreflightFinding) -> str:
    return f"{one.state.value}, optional" if one.optional else one.state.value
