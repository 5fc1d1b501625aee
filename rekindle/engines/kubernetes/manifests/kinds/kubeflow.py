"""What AscendJob and PyTorchJob have in common: both come from Kubeflow's first operators. Pure."""

from __future__ import annotations

from rekindle.engines.kubernetes.manifests.kinds.base import (
    Manifest,
    Observed,
    Phase,
    Rendered,
    conditions,
    next_attempt,
    observed,
)

_PHASES = {
    "Created": Phase.PENDING,
    "Running": Phase.RUNNING,
    "Restarting": Phase.RUNNING,
    "Suspended": Phase.SUSPENDED,
    "Succeeded": Phase.SUCCEEDED,
    "Failed": Phase.FAILED,
}
_OVER = ("Failed", "Succeeded")
WORKER = "Worker"


def replica_specs(job: Rendered, leader: str, restart: str) -> Manifest:
    """Return one leader, if the operator wants one, and the rest as workers: to us all the same."""
    counts = {leader: 1, WORKER: job.replicas - 1} if leader else {WORKER: job.replicas}
    return {
        role: {"replicas": count, "restartPolicy": restart, "template": job.template}
        for role, count in counts.items()
        if count
    }


def replica_templates(specs: Manifest) -> list[tuple[Manifest, str]]:
    """Return where the templates of all roles are."""
    return [(role, "template") for role in specs.values()]


def role_patches(specs: Manifest) -> Manifest:
    """Return the part of a merge patch that has the pods of all roles go on like these."""
    return {role: {"template": next_attempt(one["template"])} for role, one in specs.items()}


def last_condition(obj: Manifest) -> Observed:
    """Return the state as these operators tell it: by the last condition that holds."""
    held = [one for one in conditions(obj) if one["type"] in _PHASES]
    if not held:
        return Observed(Phase.PENDING)
    over = [one for one in held if one["type"] in _OVER]
    last = (over or held)[-1]
    return observed(_PHASES[last["type"]], last)
