"""Amounts of resources: `500m`, `2Gi`, and sums of them."""

from __future__ import annotations

from cluster.refusals import Object

_FACTORS = {
    "m": 1e-3,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "Ki": 2.0**10,
    "Mi": 2.0**20,
    "Gi": 2.0**30,
    "Ti": 2.0**40,
}


def amount(text: object) -> float:
    text = str(text)
    for length in (2, 1):
        if text[-length:] in _FACTORS:
            return float(text[:-length]) * _FACTORS[text[-length:]]
    return float(text)


def requests(spec: Object) -> dict[str, float]:
    """Return the resources that a pod requests. A limit without a request counts as a request."""
    total: dict[str, float] = {}
    for container in spec.get("containers") or []:
        resources = container.get("resources") or {}
        asked = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
        for name, value in asked.items():
            total[name] = total.get(name, 0.0) + amount(value)
    for container in spec.get("initContainers") or []:
        for name, value in ((container.get("resources") or {}).get("requests") or {}).items():
            total[name] = max(total.get(name, 0.0), amount(value))
    return total
