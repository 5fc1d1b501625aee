"""The messages of a node check: between coordinator and agents, and between agent and checkers."""

from __future__ import annotations

import msgspec

from rekindle.protocol.rank import Message
from rekindle.recovery.node_check.evidence import Measurement


class CheckAlone(Message, frozen=True, kw_only=True):
    """Measure each device of the node, and collectives between them. serial: the answer repeats it.

    beside_ranks: ranks hold most of the devices' memory, so the check takes little.
    """

    serial: int
    beside_ranks: bool = False


class CheckPair(Message, frozen=True, kw_only=True):
    """Run collectives with another node.

    host, port: the store of the first of the two; place: 0 for the first node, 1 for the second.
    beside_ranks: as in CheckAlone.
    """

    serial: int
    beside_ranks: bool = False
    host: str
    port: int
    place: int


class CheckStop(Message, frozen=True, kw_only=True):
    """Stop the running check: the other node has failed, or the check takes too long."""

    serial: int


class CheckOver(Message, frozen=True, kw_only=True):
    """The check has ended: free the devices for ranks."""


class CheckReady(Message, frozen=True, kw_only=True):
    """The node's checkers wait for work. port: the store where checkers of another node meet them.

    The agent sends it again after each restart of the checkers.
    """

    port: int


class Checked(Message, frozen=True, kw_only=True):
    """The measured seconds of the slowest device, by part; or the reason for a failure.

    device: the one that failed, by its number on the node, or -1. note: a remark that does not
    report a fault of the node.
    """

    serial: int
    seconds: dict[Measurement, float] = msgspec.field(default_factory=dict)
    note: str = ""
    error: str = ""
    device: int = -1


# ---- agent -> checker, one process for each device


class Meet(msgspec.Struct, frozen=True, kw_only=True, tag="meet"):
    """Run collectives in a group of `world_size`, which meets at a store. part: the measurement."""

    serial: int
    beside_ranks: bool = False
    part: Measurement
    host: str
    port: int
    rank: int
    world_size: int
    timeout_s: float


class DeviceWork(msgspec.Struct, frozen=True, kw_only=True, tag="work"):
    """Measure the device alone."""

    serial: int
    beside_ranks: bool = False


# ---- checker -> agent


class Open(msgspec.Struct, frozen=True, kw_only=True, tag="open"):
    """The device works. port: of the store that this checker hosts, if it is the first one."""

    port: int


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """The measurements, or the error. note: as in Checked."""

    serial: int
    seconds: dict[Measurement, float] = {}
    note: str = ""
    error: str = ""


Task = DeviceWork | Meet
CheckerAnswer = Open | Done
