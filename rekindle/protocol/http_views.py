"""The JSON bodies of the coordinator's HTTP interface."""

from __future__ import annotations

import msgspec


class RankView(msgspec.Struct, frozen=True, kw_only=True):
    """One rank; pid 0: it has no process at present."""

    rank: int
    node: int
    pid: int
    finished: int
    status: str


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """One node's agent; node -1: a spare. copies: steps of the copies it keeps, by their rank."""

    node: int
    address: str
    pid: int
    copies: dict[int, tuple[int, ...]] = {}


class MoveView(msgspec.Struct, frozen=True, kw_only=True):
    """A planned move that is not over. ready: its new ranks wait for a pause."""

    node: int
    reason: str
    spare: bool
    ready: bool


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """The present state of the job.

    total: the steps that the script wants; 0: not known yet. wire: the WIRE_VERSION of the
    coordinator; 0: an earlier one, without this field.
    """

    job_id: str
    state: str
    attempt: int
    generation: int
    world_size: int
    finished: int
    total: int
    ranks: list[RankView]
    nodes: list[NodeView]
    holder: str
    metrics: dict[str, float]
    moves: list[MoveView] = []
    wire: int = 0


class Drain(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A person moves a node to another agent; by: the person.

    deadline_s: the seconds until the node may end; 0: no deadline.
    """

    node: int
    by: str
    deadline_s: float = 0.0


class Stop(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A person requests the end of the job; by: the person."""

    by: str


class Renewal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The holder of the lease renews it. token: as in its request for the lease."""

    token: str
