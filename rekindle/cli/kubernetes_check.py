"""`rekindle kubernetes check`: what a cluster lacks for a job, and what to do about it."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from rekindle.cli.kubernetes import read_job
from rekindle.cli.table import table
from rekindle.engines.kubernetes.client.api import load
from rekindle.engines.kubernetes.manifests.render import Manifests, render
from rekindle.engines.kubernetes.manifests.settings import Kind, Pods
from rekindle.engines.kubernetes.manifests.validation import check_pods
from rekindle.engines.kubernetes.preflight.findings import Finding, State, lacking, missing
from rekindle.engines.kubernetes.preflight.preflight import survey
from rekindle.errors import UsageError
from rekindle.job.spec import EntryKind, JobSpec

_PATIENCE_S = 5.0  # somebody waits


def check(options: argparse.Namespace) -> int:
    """Tell all that was found; 1: a job could not be there. Raises UsageError: a wrong job file."""
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


def _job(options: argparse.Namespace) -> tuple[Kind, Manifests]:
    """Return the objects of the file's job, or of any of its kind."""
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


def _any_job(options: argparse.Namespace) -> tuple[JobSpec, Pods]:
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
    kind = Kind(options.kind or Kind.INDEXED_JOB.value)
    pods = Pods(image="train", kind=kind, namespace=options.namespace or "default")
    check_pods(pods, spec)
    return spec, pods


def _show(found: list[Finding]) -> None:
    rows = [(one.what, _state(one), one.said or "-") for one in found]
    table(("what a job needs", "state", "found"), rows)
    to_do: dict[str, list[str]] = {}
    for one in found:
        if one.do and one.state is not State.OK:
            do = f"{one.do} (optional)" if one.optional else one.do
            to_do.setdefault(do, []).append(one.what)
    for do, about in to_do.items():
        print(f"\n{', '.join(about)}:\n  {do}")


def _state(one: Finding) -> str:
    return f"{one.state.value}, optional" if one.optional else one.state.value
