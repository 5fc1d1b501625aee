"""What a pod names, and what therefore has to be there before it can start. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

Manifest = dict[str, Any]


class Mention(msgspec.Struct, frozen=True):
    """An object that a pod names. api_version, plural: where it is looked for."""

    kind: str
    name: str
    api_version: str
    plural: str
    everywhere: bool = False  # it is none of a namespace


def mentions(spec: Manifest) -> Iterator[Mention]:
    """Yield what a pod's spec names and does not call optional; one may come twice."""
    if name := spec.get("serviceAccountName"):
        yield Mention("ServiceAccount", name, "v1", "serviceaccounts")
    if name := spec.get("priorityClassName"):
        yield Mention("PriorityClass", name, "scheduling.k8s.io/v1", "priorityclasses", True)
    if name := spec.get("runtimeClassName"):
        yield Mention("RuntimeClass", name, "node.k8s.io/v1", "runtimeclasses", True)
    for each in spec.get("imagePullSecrets") or ():
        yield from _secret(each)
    for volume in spec.get("volumes") or ():
        if name := (volume.get("persistentVolumeClaim") or {}).get("claimName"):
            yield Mention("PersistentVolumeClaim", name, "v1", "persistentvolumeclaims")
        found = volume.get("secret") or {}
        yield from _secret(found | {"name": found.get("secretName")})
        yield from _config_map(volume.get("configMap"))
    for container in (*(spec.get("initContainers") or ()), *(spec.get("containers") or ())):
        for source in container.get("envFrom") or ():
            yield from _secret(source.get("secretRef"))
            yield from _config_map(source.get("configMapRef"))
        for variable in container.get("env") or ():
            source = variable.get("valueFrom") or {}
            yield from _secret(source.get("secretKeyRef"))
            yield from _config_map(source.get("configMapKeyRef"))


def _secret(where: Manifest | None) -> Iterator[Mention]:
    if where and where.get("name") and not where.get("optional"):
        yield Mention("Secret", where["name"], "v1", "secrets")


def _config_map(where: Manifest | None) -> Iterator[Mention]:
    if where and where.get("name") and not where.get("optional"):
        yield Mention("ConfigMap", where["name"], "v1", "configmaps")
