"""List what a job needs before its launch, as far as the flow's process can see it.

Each check names a field. It raises UsageError for a mistake that no repetition helps, and
CheckpointError or JobError if a store, a cluster or Prefect does not answer. A check whose result
may be wrong on purpose returns a warning.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound, PrefectException

from rekindle import names
from rekindle.blocks.job import TrainingJob
from rekindle.checkpoints.location import absolute
from rekindle.checkpoints.probe import probe
from rekindle.errors import JobError, UsageError
from rekindle.job.ascend import count_npus
from rekindle.job.spec import JobSpec, check, check_elsewhere, home
from rekindle.recovery.faults.tables.tables import Tables
from rekindle.tasks.retraining import Retraining

_VISIBLE = ("ASCEND_RT_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
_DEVICES = Path("/dev")
_STAYS = (".set_working_directory", ".run_shell_script", ".pip_install_requirements")
_GPU = re.compile(r"nvidia[0-9]+")


class Check(NamedTuple):
    """One check. field: what a person changes. look: returns a warning, if it returns a text."""

    field: str
    look: Callable[[], object]


def checks_of_job(job: TrainingJob, job_id: str, store: str) -> Iterator[Check]:
    """Yield the checks of a job whose blocks are filled in, the cheapest first.

    store: the name of its block with the location of checkpoints, or an empty text.
    In a cluster only the pods see the script, the devices and the store.
    """
    spec = job.unchecked_spec(job_id)
    yield Check("job.annotations", lambda: "; ".join(job.notices))
    if job.kubernetes is not None:
        from rekindle.engines.kubernetes.engine import check_cluster  # imports the client

        yield Check("job", partial(check_elsewhere, spec))
        yield Check("job.kubernetes", partial(check_cluster, spec, job.kubernetes))
        return
    yield Check("job", partial(check, spec))
    if job.module:
        yield Check("job.module", partial(_find_module, job.module, spec))
    if spec.fault_tables:
        yield Check("job.fault_tables", partial(Tables.load, Path(spec.fault_tables)))
    yield Check("job.processes_per_node", partial(_count_devices, spec))
    yield Check(names.ENV_HOME, partial(probe, str(home())))
    place = f"checkpoint.path of block {store!r}" if store else "job.checkpoint.path"
    yield Check(place, partial(_probe_store, spec))


def checks_of_places(
    job: TrainingJob, around: Retraining | None, deployment: UUID | None
) -> Iterator[Check]:
    """Yield the checks that no relative location is in a folder that Prefect removes.

    deployment: the deployment of the flow run, or None. A process worker clones the repository of
    a deployment into a folder for one run. A process in an image has no such folder.
    """
    if (
        deployment is None
        or job.kubernetes is not None
        or Path(job.working_directory).is_absolute()
    ):
        return
    places = {"job.checkpoint.path": job.checkpoint.path}
    if around is not None:
        places["around.publish_to"] = around.publish_to
    for field, place in places.items():
        if is_relative(place):
            yield Check(field, partial(_refuse_clone, place, deployment))


def is_relative(place: str) -> bool:
    """Return whether a location depends on the working directory."""
    return bool(place) and "://" not in place and not Path(place).expanduser().is_absolute()


def makes_folder(steps: Sequence[Mapping[str, Any]] | None) -> bool:
    """Return whether pull steps of a deployment bring the code into a folder for one run."""
    return any(not name.endswith(_STAYS) for step in steps or () for name in step)


def _refuse_clone(place: str, deployment: UUID) -> None:
    try:
        with get_client(sync_client=True) as client:
            steps = client.read_deployment(deployment).pull_steps
    except ObjectNotFound:
        return
    except (httpx.HTTPError, PrefectException) as error:
        raise JobError(f"Prefect's API does not answer: {error}") from error
    if makes_folder(steps):
        raise UsageError(
            f"{place!r} is in the copy of the repository that the deployment's pull steps make, "
            "and Prefect removes that copy after the run; give an absolute path, or an s3:// "
            "location"
        )


def checks_of_retraining(job: TrainingJob, around: Retraining) -> Iterator[Check]:
    """Yield the checks of the steps after the training."""
    folder = Path(job.working_directory).expanduser().absolute()
    yield Check("around.prepare", partial(_find_command, around.prepare, folder))
    if not around.prepare:  # the preparation may make the evaluation
        yield Check("around.evaluate", partial(_find_command, around.evaluate, folder))
    yield Check("around", partial(_compare_limits, around))
    yield Check("job.checkpoint.every", partial(_require_checkpoints, job))
    if around.downstream:
        yield Check("around.downstream", partial(_find_deployments, around.downstream))
    place = absolute(around.publish_to, folder)
    environment = os.environ | job.unchecked_spec("-").environment
    yield Check("around.publish_to", partial(probe, place, environment))


def _find_module(module: str, spec: JobSpec) -> None:
    """Check that Python finds the module, without an import of it."""
    package = module.partition(".")[0]
    paths = spec.environment.get("PYTHONPATH", "").split(os.pathsep)
    for folder in (spec.working_directory, *filter(None, paths)):
        at = Path(spec.working_directory, folder, package)
        if at.is_dir() or at.with_suffix(".py").is_file():
            return
    if importlib.util.find_spec(package) is None:
        raise UsageError(
            f"Python finds no module {package!r} in {spec.working_directory}; correct the name, or "
            "install the module"
        )


def _probe_store(spec: JobSpec) -> str:
    refused = probe(spec.checkpoint_store, os.environ | spec.environment)
    if refused and not spec.keep.keeps_all:
        raise UsageError(
            f"{refused}. The job removes older checkpoints, so give it the right to delete, or set "
            "no rule in checkpoint.keep"
        )
    return refused


def _count_devices(spec: JobSpec) -> str:
    """Return a warning if ranks must share devices. Scripts may do so on purpose."""
    seen = count_devices(os.environ | spec.environment, _DEVICES)
    if not 0 < seen < spec.world_size:
        return ""
    return (
        f"this machine shows {seen} devices to {spec.world_size} ranks, so ranks share them; give "
        "fewer ranks or nodes, unless the script intends that"
    )


def count_devices(environment: Mapping[str, str], devices: Path) -> int:
    """Return the number of NPUs and GPUs that ranks see here; 0: none, or unknown."""
    for name in _VISIBLE:
        if visible := environment.get(name, "").strip():
            return len(visible.split(","))
    gpus = sum(_GPU.fullmatch(each.name) is not None for each in devices.glob("nvidia*"))
    return gpus or count_npus(devices)


def _find_command(command: Sequence[str], folder: Path) -> None:
    if not command:
        return
    program = command[0]
    at = str(folder / program) if "/" in program else program
    if shutil.which(at) is None:
        raise UsageError(
            f"there is no program {program!r} that this user may run in {folder}; correct the "
            "command, or install the program"
        )


def _compare_limits(around: Retraining) -> None:
    for name, limits in (("at_least", around.at_least), ("at_most", around.at_most)):
        for metric, limit in limits.items():
            if not math.isfinite(limit):
                raise UsageError(f"{name} has {limit} for {metric}; give a finite number")
        if limits and not around.evaluate:
            raise UsageError(
                f"{name} limits {', '.join(limits)}, but nothing measures that; give evaluate a "
                "command"
            )
    for metric in around.at_least.keys() & around.at_most.keys():
        least, most = around.at_least[metric], around.at_most[metric]
        if least > most:
            raise UsageError(
                f"no {metric} is at_least {least:g} and at_most {most:g}; correct one of them"
            )


def _require_checkpoints(job: TrainingJob) -> None:
    if not job.checkpoint.interval:
        raise UsageError(
            "the job writes no checkpoint that could be published; give the steps between two "
            "checkpoints"
        )


def _find_deployments(downstream: Sequence[str]) -> None:
    try:
        with get_client(sync_client=True) as client:
            for name in downstream:
                if name.count("/") != 1:
                    raise UsageError(f"{name!r} is no deployment; write flow/deployment")
                with contextlib.suppress(ObjectNotFound):
                    client.read_deployment_by_name(name)
                    continue
                raise UsageError(f"Prefect has no deployment {name!r}; deploy it, or correct it")
    except (httpx.HTTPError, PrefectException) as error:
        raise JobError(f"Prefect's API does not answer: {error}") from error
