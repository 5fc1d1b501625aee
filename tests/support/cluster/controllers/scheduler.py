"""Assign pods to nodes that have room for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from cluster import kinds
from cluster.controllers.fitting import Room, holds, obstacle
from cluster.controllers.loop import Controller, Key, is_deleted
from cluster.refusals import Object
from cluster.store import Event
from cluster.subresources import bind, set_condition

_ALL: Key = ("", "")


class Scheduler(Controller):
    """The default scheduler and Volcano's, in one, without gang scheduling or preemption."""

    kind = kinds.PODS
    owned = (kinds.NODES,)

    def keys_of(self, event: Event) -> Iterable[Key]:
        if event.kind is kinds.NODES:
            yield _ALL
        elif event.kind is kinds.PODS:
            if (
                event.after is None
                or not event.after["spec"].get("nodeName")
                or not holds(event.after)
            ):
                yield _ALL

    def sync(self, namespace: str, name: str) -> None:
        pods = list(self.store.all(kinds.PODS))
        rooms = {
            node["metadata"]["name"]: Room(node)
            for node in self.store.all(kinds.NODES)
            if not is_deleted(node)
        }
        for pod in pods:
            room = rooms.get(pod["spec"].get("nodeName", ""))
            if room is not None and holds(pod):
                room.add(pod)
        waiting = [
            pod
            for pod in pods
            if not pod["spec"].get("nodeName") and not is_deleted(pod) and holds(pod)
        ]
        waiting.sort(key=lambda pod: (-pod["spec"].get("priority", 0), pod["metadata"]["name"]))
        for pod in waiting:
            if pod["spec"].get("schedulingGates"):
                text = "Scheduling is blocked due to non-empty scheduling gates"
                self._cannot(pod, "SchedulingGated", text)
            else:
                self._place(pod, list(rooms.values()))

    def _place(self, pod: Object, rooms: list[Room]) -> None:
        obstacles = {room.name: obstacle(pod, room, rooms) for room in rooms}
        free = [room for room in rooms if not obstacles[room.name]]
        if free:
            best = min(free, key=lambda room: (room.load, room.name))
            bind(self.operations, pod, best.name)
            best.add(pod)
            return
        counted = sorted(f"{count} {why}" for why, count in Counter(obstacles.values()).items())
        reasons = f": {', '.join(counted)}." if counted else "."
        message = (
            f"0/{len(rooms)} nodes are available{reasons} preemption: 0/{len(rooms)} nodes are"
            f" available: {len(rooms)} Preemption is not helpful for scheduling."
        )
        if not rooms:
            message = "no nodes available to schedule pods"
        self._cannot(pod, "Unschedulable", message)

    def _cannot(self, pod: Object, reason: str, message: str) -> None:
        condition = {
            "type": "PodScheduled",
            "status": "False",
            "reason": reason,
            "message": message,
        }
        conditions = (pod.get("status") or {}).get("conditions") or []
        if any(condition.items() <= each.items() for each in conditions):
            return
        self.operations.edit(kinds.PODS, pod, lambda thing: set_condition(thing, condition))
        if reason == "Unschedulable":
            self.operations.event(kinds.PODS, pod, "Warning", "FailedScheduling", message)
