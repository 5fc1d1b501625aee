"""Namespaces: the initial ones, the default account of each, and their deletion."""

from __future__ import annotations

from collections.abc import Iterable

from cluster import kinds
from cluster.controllers.loop import Controller, Key
from cluster.deleting import DeleteOptions, delete
from cluster.refusals import Object
from cluster.store import Event

_INITIAL = ("default", "kube-system", "kube-public", "kube-node-lease")
_NOW = DeleteOptions(policy="Background")


class Namespaces(Controller):
    """Empty deleted namespaces, and give each new one its default account."""

    kind = kinds.NAMESPACES

    async def run(self) -> None:
        for name in _INITIAL:
            if self.store.look(kinds.NAMESPACES, "", name) is None:
                self.operations.create(kinds.NAMESPACES, "", {"metadata": {"name": name}})
        await super().run()

    def keys_of(self, event: Event) -> Iterable[Key]:
        yield from super().keys_of(event)
        if event.after is None and event.kind.namespaced:
            yield "", event.newest["metadata"]["namespace"]

    def sync(self, namespace: str, name: str) -> None:
        found = self.store.get(kinds.NAMESPACES, "", name)
        if found is None:
            return
        if "deletionTimestamp" not in found["metadata"]:
            if self.store.look(kinds.SERVICEACCOUNTS, name, "default") is None:
                account = {"metadata": {"name": "default"}}
                self.operations.create(kinds.SERVICEACCOUNTS, name, account)
            return
        left = 0
        for kind in self.store.kinds:
            if not kind.namespaced:
                continue
            for thing in list(self.store.all(kind, name)):
                left += 1
                if "deletionTimestamp" not in thing["metadata"]:
                    delete(self.operations, kind, name, thing["metadata"]["name"], _NOW)
                    left -= self.store.look(kind, name, thing["metadata"]["name"]) is None
        if not left:

            def release(thing: Object) -> None:
                thing["spec"]["finalizers"] = []

            self.operations.edit(kinds.NAMESPACES, found, release)
