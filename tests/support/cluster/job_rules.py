"""Validation of Jobs: the rules for their fields, and the fields that can change."""

from __future__ import annotations

from cluster.pod_rules import Cause, brief, check
from cluster.refusals import Object
from cluster.store import fresh

_IMMUTABLE = "field is immutable"


def rules(name: str, spec: Object) -> list[Cause]:
    causes = check(spec["template"].get("spec") or {}, "spec.template.spec")
    restart = spec["template"].get("spec", {}).get("restartPolicy")
    where = "spec.template.spec.restartPolicy"
    if restart not in ("OnFailure", "Never"):
        text = f'"{restart}": supported values: "OnFailure", "Never"'
        causes.append((where, "NotSupported", text))
    if spec.get("completionMode") == "Indexed":
        if "completions" not in spec:
            text = "when completion mode is Indexed"
            causes.append(("spec.completions", "Required", text))
        elif len(f"{name}-{max(spec['completions'], 1) - 1}") > 63:
            text = f'"{name}": will not able to create pod with valid DNS subdomain'
            causes.append(("metadata.name", "Invalid", f"{text}: must be no more than 63 bytes"))
    for field in ("parallelism", "completions", "backoffLimit"):
        if spec.get(field, 0) < 0:
            text = f"{spec[field]}: must be greater than or equal to 0"
            causes.append((f"spec.{field}", "Invalid", text))
    return causes


def changes(before: Object, after: Object) -> list[Cause]:
    old, new = before["spec"], after["spec"]
    causes: list[Cause] = []
    for field in ("selector", "completionMode"):
        if old.get(field) != new.get(field):
            causes.append((f"spec.{field}", "Invalid", f"{brief(new.get(field))}: {_IMMUTABLE}"))
    if old.get("managedBy") != new.get("managedBy"):
        causes.append(("spec.managedBy", "Invalid", f"{brief(new.get('managedBy'))}: {_IMMUTABLE}"))
    if old.get("completions") != new.get("completions"):
        elastic = new.get("completionMode") == "Indexed" and (
            new.get("completions") == new.get("parallelism")
            and old.get("completions") == old.get("parallelism")
        )
        if new.get("completionMode") != "Indexed":
            causes.append(
                ("spec.completions", "Invalid", f"{new.get('completions')}: {_IMMUTABLE}")
            )
        elif not elastic:
            text = f"{new.get('completions')}: can only be modified in tandem with spec.parallelism"
            causes.append(("spec.completions", "Invalid", text))
    status = before.get("status") or {}
    idle = old.get("suspend") and not status.get("active")
    first, second = old["template"], new["template"]
    if idle:
        first, second = _without_directives(first), _without_directives(second)
    if first != second:
        causes.append(("spec.template", "Invalid", f"{brief(new['template'])}: {_IMMUTABLE}"))
    return causes


def _without_directives(template: Object) -> Object:
    """Return the template without the fields that a suspended Job can change."""
    template = fresh(template)
    metadata = template.get("metadata") or {}
    metadata.pop("labels", None)
    metadata.pop("annotations", None)
    spec = template["spec"]
    for name in ("affinity", "nodeSelector", "tolerations", "schedulingGates"):
        spec.pop(name, None)
    for container in (spec.get("containers") or []) + (spec.get("initContainers") or []):
        container.pop("resources", None)
    return {**template, "metadata": metadata}
