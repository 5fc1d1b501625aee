"""What AscendJob and PyTorchJob have in common: both come from Kubeflow's first operators. Pure."""

from __future__ import annotations

from rekindle.engines.kubernetes.kinds.base import (
    Manifest,
    Observed,
    Phase,
    Rendered,
    conditions,
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


def replica_specs(job: Rendered, leader: str, restart: str) -> Manifest:
    """Return one leader and the rest as workers; to us they are all the same."""
    found = {leader: {"replicas": 1, "restartPolicy": restart, "template": job.template}}
    if job.replicas > 1:
        rest = {"replicas": job.replicas - 1, "restartPolicy": restart, "template": job.template}
        found["Worker"] = rest
    return found


def replica_templates(specs: Manifest) -> list[tuple[Manifest, str]]:
    """Return where the templates of all roles are."""
    return [(role, "template") for role in specs.values()]


def last_condition(obj: Manifest) -> Observed:
    """Return the state as these operators tell it: by the last condition that holds."""
    held = [one for one in conditions(obj) if one["type"] in _PHASES]
    if not held:
        return Observed(Phase.PENDING)
    over = [one for one in held if one["type"] in _OVER]
    last = (over or held)[-1]
    return observed(_PHASES[last["type"]], last)
