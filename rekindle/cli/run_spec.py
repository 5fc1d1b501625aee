"""Make a job's description from the parsed options of `rekindle run`.

Pure except for CPU counts.
"""

from __future__ import annotations

import argparse
import operator
import os
import secrets
import time
from collections.abc import Container
from pathlib import Path
from typing import Literal

import msgspec

from rekindle import names
from rekindle.checkpoints.location import absolute
from rekindle.checkpoints.retention import Retention
from rekindle.cli.local_options import MAX_RESTARTS
from rekindle.errors import UsageError
from rekindle.job.spec import EntryKind, Framework, JobSpec, job_directory
from rekindle.recovery.node_check.evidence import NodeCheckLimits
from rekindle.recovery.policy.interval import AUTO
from rekindle.recovery.policy.policy import Policy

# Local ranks inherit the complete environment. Ranks on other machines need these variables.
KEPT = names.PROFILING_SETTINGS


# The options that describe the whole job, and their fields in its description.
_OF_JOB = {
    "nnodes": ("min_nodes", "nodes"),
    "nproc_per_node": ("processes_per_node",),
    "spares": ("spares",),
    "job_id": ("job_id",),
    "rdzv_id": ("job_id",),
    "framework": ("framework",),
    "policy": tuple(f"policy.{name}" for name in Policy.__struct_fields__),
    "max_restarts": ("policy.max_restarts",),
    "checkpoint_every": ("checkpoint_every",),
    "keep_last": ("keep.last",),
    "keep_every": ("keep.every_steps",),
    "keep_best": ("keep.best", "keep.metric", "keep.highest"),
    "keep_hours": ("keep.hours",),
    "snapshot_every": ("snapshot_every",),
    "fault_tables": ("fault_tables",),
    "allow_injection": ("allow_injection",),
    "network_check": ("network_check",),
    "exclude_straggler": ("exclude_straggler",),
    "compute_factor": ("node_check.compute_factor",),
    "link_factor": ("node_check.link_factor",),
    "node_check_timeout": ("node_check.timeout_s",),
}


def read_spec(options: argparse.Namespace) -> JobSpec:
    """Make the job's description from parsed options. Raises UsageError: an option is invalid."""
    job_id = options.job_id or options.rdzv_id
    job_id = job_id or time.strftime("run-%Y%m%d-%H%M%S-") + secrets.token_hex(3)
    directory = job_directory(job_id)
    least, most = node_counts(options.nnodes)
    return JobSpec(
        job_id=job_id,
        entry=entry_kind(options),
        target=options.script or "",
        arguments=tuple(options.arguments),
        framework=Framework(options.framework),
        nodes=most,
        min_nodes=least,
        processes_per_node=_processes(options.nproc_per_node),
        spares=options.spares,
        environment={name: os.environ[name] for name in KEPT if name in os.environ},
        working_directory=str(Path.cwd()),
        directory=str(directory),
        log_directory=str(Path(options.log_dir or directory / names.LOGS_DIRECTORY).absolute()),
        checkpoint_store=absolute(
            options.checkpoint_dir or str(directory / names.CHECKPOINT_DIRECTORY)
        ),
        snapshot_every=options.snapshot_every,
        checkpoint_every=_checkpoint_every(options.checkpoint_every),
        keep=_retention(options),
        master_addr=options.master_addr,
        master_port=options.master_port,
        role=options.role,
        redirects=_streams("redirects", options.redirects),
        tee=_streams("tee", options.tee),
        allow_injection=options.allow_injection,
        policy=_policy(options),
        network_check=options.network_check or options.exclude_straggler,
        exclude_straggler=options.exclude_straggler,
        node_check=_limits(options),
        fault_tables=str(Path(options.fault_tables).absolute()) if options.fault_tables else "",
    )


def check_joiner(options: argparse.Namespace, given: Container[str], job: JobSpec) -> None:
    """Check the options of a machine that joins a job: those of the whole job have its values.

    given: the options on the command line, by their names in `options`. Raises UsageError: a value
    differs; the text has both.
    """
    ours = msgspec.structs.replace(
        read_spec(options), job_id=options.job_id or options.rdzv_id or job.job_id
    )
    differences = []
    for name, fields in _OF_JOB.items():
        if name in given:
            pairs = [(field, _value(ours, field), _value(job, field)) for field in fields]
            differences += [
                f"--{name.replace('_', '-')}: {field} is {here} here, and {there} in the job"
                for field, here, there in pairs
                if here != there
            ]
    if differences:
        raise UsageError(
            f"this machine cannot join job {job.job_id}, because all its machines have the same "
            f"values: {'; '.join(dict.fromkeys(differences))}. Give the job's values, or leave the "
            "options out"
        )


def _value(spec: JobSpec, field: str) -> object:
    """Return the value of a field in simple types; a dot leads into a nested record."""
    return msgspec.to_builtins(operator.attrgetter(field)(spec))


def entry_kind(options: argparse.Namespace) -> EntryKind:
    """Return the kind of the positional argument.

    Raises UsageError: -m and --no-python are both given.
    """
    if options.module and options.no_python:
        raise UsageError(
            "-m is for a Python module and --no-python for any program; give one of them"
        )
    if options.module:
        return EntryKind.MODULE
    return EntryKind.PROGRAM if options.no_python else EntryKind.SCRIPT


def host_and_port(text: str, option_name: str) -> tuple[str, int]:
    """Split HOST:PORT. Raises UsageError: the text has another form."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"{option_name} {text!r}: give HOST:PORT, such as 10.0.0.1:29400")
    return host, int(port)


def _checkpoint_every(text: str) -> int | Literal["auto"]:
    if text == AUTO:
        return AUTO
    try:
        return int(text)
    except ValueError as error:
        raise UsageError(f"--checkpoint-every {text!r}: give steps, or {AUTO}") from error


def _retention(options: argparse.Namespace) -> Retention:
    """Read the rules for the checkpoints to keep; without an option all. Raises UsageError."""
    best, _, metric = options.keep_best.partition(":")
    name, _, end = metric.rpartition(":") if metric.endswith(":max") else (metric, "", "")
    if options.keep_best and not (best.isdecimal() and int(best) and name):
        raise UsageError(f"--keep-best {options.keep_best!r}: give N:NAME, or N:NAME:max")
    try:
        return Retention(
            last=options.keep_last,
            every_steps=options.keep_every,
            best=int(best or 0),
            metric=name,
            highest=end == "max",
            hours=options.keep_hours,
        )
    except ValueError as error:
        option = str(error).replace("retention: ", "--keep-").replace("every_steps", "every")
        raise UsageError(option) from error


def _limits(options: argparse.Namespace) -> NodeCheckLimits:
    try:
        return NodeCheckLimits(
            compute_factor=options.compute_factor,
            link_factor=options.link_factor,
            timeout_s=options.node_check_timeout,
        )
    except ValueError as error:
        raise UsageError(str(error)) from error


def _policy(options: argparse.Namespace) -> Policy:
    policy = Policy(max_restarts=MAX_RESTARTS)
    if options.policy:
        from rekindle.recovery.policy.policy_file import read_policy

        policy = read_policy(Path(options.policy))
    if options.max_restarts is None:
        return policy
    try:
        return msgspec.structs.replace(policy, max_restarts=options.max_restarts)
    except ValueError as error:
        raise UsageError(str(error)) from error


def node_counts(text: str) -> tuple[int, int]:
    """Return the least and the largest number of nodes. Raises UsageError: the text is wrong."""
    first, colon, second = text.partition(":")
    least = _count("--nnodes", first)
    most = _count("--nnodes", second) if colon else least
    if least > most:
        raise UsageError(f"--nnodes {text}: give MIN:MAX, the smaller number first")
    return least, most


def _processes(text: str) -> int:
    if text == "cpu":
        return os.cpu_count() or 1
    if text in ("auto", "gpu"):
        import torch  # only here, because torch takes a second to import

        devices = torch.cuda.device_count()
        if text == "gpu" and not devices:
            raise UsageError("--nproc-per-node gpu: this machine has no GPU that torch can use")
        return devices or os.cpu_count() or 1
    return _count("--nproc-per-node", text)


def _count(name: str, text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise UsageError(f"{name} {text!r}: give a number of at least 1")
    return int(text)


def _streams(name: str, text: str) -> int:
    if text not in ("0", "1", "2", "3"):
        raise UsageError(f"--{name} {text!r}: give 0 (none), 1 (stdout), 2 (stderr) or 3 (both)")
    return int(text)
