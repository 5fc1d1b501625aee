"""`rekindle kubernetes render`: what a job would be in a cluster, without one."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from rekindle.blocks.job import TrainingJob
from rekindle.engines.kubernetes.manifests.render import render
from rekindle.engines.kubernetes.manifests.settings import Pods
from rekindle.errors import UsageError
from rekindle.job.spec import JobSpec
from rekindle.recovery.policy.strict_yaml import Document, Refused

_HIDDEN = "(hidden)"
_FIRST = ("apiVersion", "kind", "metadata")


def run(options: argparse.Namespace) -> int:
    """Print the objects."""
    path = Path(options.file)
    spec, pods = read_job(path, kind=options.kind, job_id=options.job_id)
    try:
        manifests = render(spec, pods, secret=_HIDDEN, avoid=tuple(options.avoid))
    except UsageError as error:
        raise UsageError(f"{path}: kubernetes: {error}") from error
    print(stream(map(_without_secrets, manifests.every)), end="")
    return 0


def read_job(
    path: Path, *, kind: str | None, job_id: str | None, namespace: str | None = None
) -> tuple[JobSpec, Pods]:
    """Read a job file: the fields of a training job, `kubernetes` among them.

    kind, namespace: instead of the file's. job_id: default: the job's name. Raises UsageError: the
    file cannot be read, or says what cannot be; the message names field and line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"job {path} cannot be read: {error}") from error
    try:
        document = Document(text)
    except Refused as error:
        where = f"{path}:{error.line}" if error.line else str(path)
        raise UsageError(f"job {where}: {error}") from error
    found = document.value
    if not isinstance(found, dict):
        raise UsageError(f"job {path}: write fields, as script: train.py")
    if not isinstance(found.get("kubernetes"), dict):
        raise UsageError(f"job {path}: write what its pods are like below kubernetes:, image first")
    instead = {"kind": kind, "namespace": namespace}
    found["kubernetes"] |= {key: said for key, said in instead.items() if said is not None}
    try:
        job = TrainingJob.model_validate(found)
        spec = job.to_spec(job_id or job.name)
    except ValidationError as error:
        raise UsageError(_wrong(path, document, error)) from error
    except UsageError as error:
        raise UsageError(f"job {_where(path, document, str(error))}: {error}") from error
    assert job.kubernetes is not None
    return spec, job.kubernetes


def _wrong(path: Path, document: Document, error: ValidationError) -> str:
    """Say each mistake with its field, and where that is."""
    said = []
    for one in error.errors(include_url=False, include_input=False, include_context=False):
        field = ".".join(map(str, one["loc"]))
        text = one["msg"].removeprefix("Value error, ")
        named = f"{field}: {text}" if field else text
        keys = " ".join(str(part) for part in one["loc"] if isinstance(part, str))
        own = one["loc"][-1] if one["loc"] else ""
        about = str(own) if isinstance(own, str) and one["type"] != "value_error" else text
        said.append(f"job {_where(path, document, about or keys)}: {named}")
    return "\n  ".join(said)


def _where(path: Path, document: Document, about: str) -> str:
    line = document.line_of(about)
    return f"{path}:{line}" if line else str(path)


def stream(manifests: Any) -> str:
    """Return the objects as a stream of YAML, in the order in which people read."""
    return "".join(
        "---\n" + yaml.dump(_ordered(one), Dumper=_Plain, sort_keys=False, width=100)
        for one in manifests
    )


def _ordered(manifest: dict[str, Any]) -> dict[str, Any]:
    first = {key: manifest[key] for key in _FIRST if key in manifest}
    return first | {key: value for key, value in manifest.items() if key not in _FIRST}


def _without_secrets(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the object as anybody may see it."""
    if manifest["kind"] != "Secret":
        return manifest
    hidden = dict.fromkeys(manifest["data"], _HIDDEN)
    return {key: value for key, value in manifest.items() if key != "data"} | {"stringData": hidden}


class _Plain(yaml.SafeDumper):
    """Writes equal parts out each time: kubectl's readers do not like references."""

    def ignore_aliases(self, data: Any) -> bool:
        return True
