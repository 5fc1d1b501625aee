"""Tells how much of each quota is used."""

from __future__ import annotations

from collections.abc import Iterable

from cluster import kinds, quota
from cluster.controllers.loop import Controller, Key
from cluster.store import Event


class Quotas(Controller):
    """Their status alone: pods are refused where they are created."""

    kind = kinds.QUOTAS

    def keys_of(self, event: Event) -> Iterable[Key]:
        yield from super().keys_of(event)
        if event.kind is kinds.PODS:
            namespace = event.newest["metadata"]["namespace"]
            for each in self.store.all(kinds.QUOTAS, namespace):
                yield namespace, each["metadata"]["name"]

    def sync(self, namespace: str, name: str) -> None:
        found = self.store.get(kinds.QUOTAS, namespace, name)
        if found is not None:
            self.operations.set_status(kinds.QUOTAS, found, **quota.status(self.store, found))
