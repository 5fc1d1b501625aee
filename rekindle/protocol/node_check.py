"""What is said when nodes are checked: coordinator and agents, and an agent and its checkers."""

from __future__ import annotations

import msgspec

from rekindle.protocol.rank import Message
from rekindle.recovery.node_check.evidence import Measurement


class CheckAlone(Message, frozen=True, kw_only=True):
    """Measure each device of the node, and collectives between them. serial: for the answer.

    beside_ranks: they hold most of the devices' memory, so it is to take little.
    """

    serial: int
    beside_ranks: bool = False


class CheckPair(Message, frozen=True, kw_only=True):
    """Do collectives with another node.

    host, port: the store of the first of the two; place: 0 for the first node, 1 for the second.
    beside_ranks: as in CheckAlone.
    """

    serial: int
    beside_ranks: bool = False
    host: str
    port: int
    place: int


class CheckStop(Message, frozen=True, kw_only=True):
    """What is under way is given up: the other node has failed, or it takes too long."""

    serial: int


class CheckOver(Message, frozen=True, kw_only=True):
    """Nothing more is to be measured: the devices are to be free for ranks."""


class CheckReady(Message, frozen=True, kw_only=True):
    """The node's checkers wait for work. port: of the store where another node's can meet them.

    Told anew whenever they had to be started anew.
    """

    port: int


class Checked(Message, frozen=True, kw_only=True):
    """What was measured: seconds, by part, of the slowest device; or why it was not.

    device: the one that failed, by its number on the node; -1: none in particular. note: what is to
    be said of it, and blames no node.
    """

    serial: int
    seconds: dict[Measurement, float] = msgspec.field(default_factory=dict)
    note: str = ""
    error: str = ""
    device: int = -1


# ---- agent -> checker, one process for each device


class Meet(msgspec.Struct, frozen=True, kw_only=True, tag="meet"):
    """Do collectives in a group of this many, met at a store. part: whose time it is."""

    serial: int
    beside_ranks: bool = False
    part: Measurement
    host: str
    port: int
    rank: int
    world_size: int
    timeout_s: float


class DeviceWork(msgspec.Struct, frozen=True, kw_only=True, tag="work"):
    """Work on the device alone."""

    serial: int
    beside_ranks: bool = False


# ---- checker -> agent


class Open(msgspec.Struct, frozen=True, kw_only=True, tag="open"):
    """The device can be used. port: of the store that this checker hosts, if it is the first."""

    port: int


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """What was measured, or what went wrong. note: as in Checked."""

    serial: int
    seconds: dict[Measurement, float] = {}
    note: str = ""
    error: str = ""


Task = DeviceWork | Meet
Said = Open | Done
