"""What a job asks of a namespace, and whether quotas and limits could ever grant it. Pure."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

import msgspec

from rekindle.engines.kubernetes.client.objects import plural_of
from rekindle.engines.kubernetes.manifests.quantities import amount
from rekindle.engines.kubernetes.manifests.render import Manifests, adapter
from rekindle.engines.kubernetes.manifests.settings import WorkloadKind

Manifest = dict[str, Any]
Amounts = Mapping[str, Decimal]

_COUNTED = ("pods", "services", "secrets", "configmaps")  # also without count/
_NONE = Decimal()
_SHARED = ("cpu", "memory")  # a quota for these wants every container to say how much


class Demand(msgspec.Struct, frozen=True):
    """So many pods with this spec."""

    spec: Manifest
    count: int


def demands(kind: WorkloadKind, wanted: Manifests) -> list[Demand]:
    """Return what pods a job has: its nodes and spares, and last its coordinator's.

    Of several templates all but the last are a leader's, one pod each.
    """
    adapted = adapter(kind)
    specs = [
        holder[key]["spec"]
        for manifest in (*wanted.beside, wanted.workload)
        for holder, key in adapted.templates(manifest)
    ]
    said = wanted.root["data"]
    rest = int(said["nodes"]) + int(said["spares"]) - len(specs) + 1
    found = [*(Demand(spec, 1) for spec in specs[:-1]), Demand(specs[-1], rest)]
    deployments = (one for one in wanted.around if one["kind"] == "Deployment")
    return found + [Demand(one["spec"]["template"]["spec"], 1) for one in deployments]


def asked(spec: Manifest, which: str) -> dict[str, Decimal]:
    """Return what one pod asks for at least; which: requests or limits.

    Containers run together, those of its beginning one by one before them, but for sidecars. What
    is limited and not requested is requested.
    """
    together: list[Manifest] = [*(spec.get("containers") or ())]
    before: list[Manifest] = []
    for each in spec.get("initContainers") or ():
        (together if each.get("restartPolicy") == "Always" else before).append(each)
    total: dict[str, Decimal] = {}
    for each in together:
        for name, value in _of(each, which).items():
            total[name] = total.get(name, _NONE) + value
    for each in before:
        for name, value in _of(each, which).items():
            total[name] = max(total.get(name, _NONE), value)
    return total


def _of(container: Manifest, which: str) -> dict[str, Decimal]:
    resources = container.get("resources") or {}
    limits = resources.get("limits") or {}
    said = limits if which == "limits" else limits | (resources.get("requests") or {})
    return {name: amount(value) for name, value in said.items()}


def with_defaults(spec: Manifest, ranges: Sequence[Manifest]) -> Manifest:
    """Return a pod's spec with what the namespace's LimitRanges give whoever says nothing."""
    new = copy.deepcopy(spec)
    for rule in _rules(ranges, "Container"):
        for each in (*(new.get("containers") or ()), *(new.get("initContainers") or ())):
            said = each.setdefault("resources", {})
            for which, default in (("limits", "default"), ("requests", "defaultRequest")):
                said[which] = (rule.get(default) or {}) | (said.get(which) or {})
    return new


def breaches(spec: Manifest, ranges: Sequence[Manifest]) -> Iterator[str]:
    """Yield each rule of a LimitRange that would keep a pod out for ever, in a sentence."""
    containers = [*(spec.get("containers") or ()), *(spec.get("initContainers") or ())]
    parts = [("Container", f"container {c['name']}", _both(c)) for c in containers]
    parts.append(("Pod", "the pod", (asked(spec, "requests"), asked(spec, "limits"))))
    for kind, of, (requests, limits) in parts:
        for rule in _rules(ranges, kind):
            for name, most in (rule.get("max") or {}).items():
                given = max(limits.get(name, _NONE), requests.get(name, _NONE))
                if given > amount(most):
                    yield f"{of} asks for {told(given)} of {name}, {most} is the most"
            for name, least in (rule.get("min") or {}).items():
                if requests.get(name, amount(least)) < amount(least):
                    yield f"{of} asks for {told(requests[name])} of {name}, {least} is the least"


def _both(container: Manifest) -> tuple[Amounts, Amounts]:
    return _of(container, "requests"), _of(container, "limits")


def _rules(ranges: Sequence[Manifest], kind: str) -> Iterator[Manifest]:
    for each in ranges:
        for rule in (each.get("spec") or {}).get("limits") or ():
            if rule.get("type") == kind:
                yield rule


def total(pods: Iterable[Demand], objects: Iterable[Manifest]) -> Amounts:
    """Return what a whole job asks for, under the names that quotas have for it."""
    found: dict[str, Decimal] = {}

    def add(name: str, value: Decimal) -> None:
        found[name] = found.get(name, _NONE) + value

    for each in pods:
        for name in ("pods", "count/pods"):
            add(name, Decimal(each.count))
        for name, value in asked(each.spec, "requests").items():
            add(f"requests.{name}", each.count * value)
            if name in _SHARED:
                add(name, each.count * value)
        for name, value in asked(each.spec, "limits").items():
            add(f"limits.{name}", each.count * value)
    for one in objects:
        plural, group = plural_of(one), one["apiVersion"].rpartition("/")[0]
        add(f"count/{plural}.{group}" if group else f"count/{plural}", Decimal(1))
        if not group and plural in _COUNTED:
            add(plural, Decimal(1))
    return found


def unsaid(pods: Iterable[Demand], hard: Mapping[str, str]) -> list[str]:
    """Return what a quota wants every container to say, and some do not."""
    wanted: dict[str, tuple[str, str]] = {}
    for name in hard:
        which, dot, what = name.partition(".")
        if dot and which in ("requests", "limits") and what in _SHARED:
            wanted[name] = (which, what)
        elif name in _SHARED:
            wanted[name] = ("requests", name)
    containers = [c for each in pods for c in each.spec.get("containers") or ()]
    return [
        name
        for name, (which, what) in wanted.items()
        if any(what not in _of(container, which) for container in containers)
    ]


def over(whole: Amounts, hard: Mapping[str, str], used: Mapping[str, str]) -> dict[str, str]:
    """Return what of a quota a job needs more of than there is, beside what is used."""
    return {
        name: f"{name}: {told(whole[name])} are needed, {hard[name]} are allowed"
        + (f", {used[name]} are used" if name in used else "")
        for name in hard
        if name in whole and whole[name] + amount(used.get(name, "0")) > amount(hard[name])
    }


def told(value: Decimal) -> str:
    """Return an amount as people write it."""
    for unit, size in (("Gi", 2**30), ("Mi", 2**20)):
        if value >= size and value % size == 0:
            return f"{value / size:f}{unit}"
    return f"{value.normalize():f}" if value % 1 == 0 else f"{value * 1000:.0f}m"
