"""MindCluster's ConfigMaps about hosts, each read into what it tells of which host. Pure.

The device plugin writes `mindx-dl-deviceinfo-<host>`, NodeD `mindx-dl-nodeinfo-<host>`; ClusterD
puts all hosts together in `cluster-info-*`, in several parts where there are many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from rekindle.engines.kubernetes.client.api import Object
from rekindle.engines.kubernetes.client.errors import DamagedError
from rekindle.engines.kubernetes.mindcluster.device_info import DeviceList, chips, device_info
from rekindle.engines.kubernetes.mindcluster.documents import decode, name_of, text_of
from rekindle.engines.kubernetes.mindcluster.node_info import (
    Board,
    SwitchInfo,
    board_report,
    node_info,
    switch_info,
    switches,
)
from rekindle.engines.kubernetes.mindcluster.reports import Report, Told, Topic

DEVICES = "mindx-dl-deviceinfo-"
NODES = "mindx-dl-nodeinfo-"
_SWITCHES = "mindx-dl-switchinfo-"  # in ClusterD's ConfigMaps alone
_CLUSTER = "cluster-info-"
COMPLETE = (
    "cluster-info-node"  # tells of all boards with faults; those that it leaves out are sound
)
_TOPICS = {DEVICES: Topic.CHIPS, _SWITCHES: Topic.SWITCHES, NODES: Topic.BOARD}


def read(configmap: Object) -> tuple[Told, ...]:
    """Read one of these ConfigMaps; nothing comes of others. Raises DamagedError: none of it holds.

    Of a `cluster-info-*` a damaged host leaves the others as they are.
    """
    name = name_of(configmap)
    if name.startswith(DEVICES):
        host = name.removeprefix(DEVICES)
        told = [_told(host, Topic.CHIPS, lambda: device_info(configmap))]
        if text_of(configmap, "SwitchInfoCfg"):
            told.append(_told(host, Topic.SWITCHES, lambda: switch_info(configmap)))
        return tuple(told)
    if name.startswith(NODES):
        host = name.removeprefix(NODES)
        return (_told(host, Topic.BOARD, lambda: node_info(configmap)),)
    return tuple(_all_hosts(configmap)) if name.startswith(_CLUSTER) else ()


def _told(host: str, topic: Topic, reading: Callable[[], Report]) -> Told:
    try:
        return Told(host, topic, reading())
    except DamagedError as error:
        return Told(host, topic, damage=str(error))


def _all_hosts(configmap: Object) -> Iterator[Told]:
    """Read one of ClusterD's ConfigMaps, which has no check code: host by host."""
    name = name_of(configmap)
    text = text_of(configmap, name)
    if not text:  # nothing to tell, or a part that is no longer needed
        return
    for key, raw in decode(text, dict[str, msgspec.Raw], name).items():
        for prefix, topic in _TOPICS.items():
            if key.startswith(prefix):
                host = key.removeprefix(prefix)
                yield _told(host, topic, _reader(topic, raw, f"{name}: {key}"))


def _reader(topic: Topic, raw: msgspec.Raw, what: str) -> Callable[[], Report]:
    match topic:
        case Topic.CHIPS:
            return lambda: chips(decode(raw, DeviceList, what), what)
        case Topic.SWITCHES:
            return lambda: switches(decode(raw, SwitchInfo, what), what)
        case Topic.BOARD:
            return lambda: board_report(decode(raw, Board, what))
