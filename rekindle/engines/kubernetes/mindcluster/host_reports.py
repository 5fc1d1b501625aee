"""Read the state of all hosts from MindCluster's ConfigMaps on devices, switches, boards. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from rekindle.engines.kubernetes.client.api import Object
from rekindle.engines.kubernetes.client.api_errors import DamagedError
from rekindle.engines.kubernetes.mindcluster.reports import (
    ActiveCode,
    Report,
    Topic,
    TopicReport,
    check,
    chip_number,
    decode,
    name_of,
    text_of,
)
from rekindle.recovery.faults.tables.keys import ascend_key, shown
from rekindle.recovery.faults.tables.verdict import FaultOrigin, Severity

_OVER = 0  # a switch's event that reports the end of a fault

# The severity of a code that no table lists, by the level that MindCluster gives it: training
# continues, a restart or a reset helps, or nothing does.
_SEVERITIES = {
    **dict.fromkeys(("NotHandleFault", "SubHealthFault", "PreSeparateNPU"), Severity.NOTICE),
    **dict.fromkeys(
        ("RestartRequest", "RestartBusiness", "FreeRestartNPU", "RestartNPU"), Severity.MAJOR
    ),
    **dict.fromkeys(("SeparateNPU", "ManuallySeparateNPU"), Severity.CRITICAL),
}
_BY_HAND = "ManuallySeparateNPU"  # a level, and the key of a list of chips
_SEPARATED = "is excluded because of its many faults, until a person releases it"
_ORIGINS = {"CardNetworkUnhealthy": FaultOrigin.NETWORK, "NodeUnhealthy": FaultOrigin.NODE}
DEVICES = "mindx-dl-deviceinfo-"
NODES = "mindx-dl-nodeinfo-"
_SWITCHES = "mindx-dl-switchinfo-"  # only ClusterD's ConfigMaps have switches in this form
_CLUSTER = "cluster-info-"
COMPLETE = "cluster-info-node"  # it lists all boards with faults; the other boards are healthy
_TOPICS = {DEVICES: Topic.CHIPS, _SWITCHES: Topic.SWITCHES, NODES: Topic.BOARD}
_Place = tuple[str, Topic]  # a host, and a topic of it


class _SwitchFault(msgspec.Struct, frozen=True, rename="pascal"):
    assembled_fault_code: str
    assertion: int = 1


class SwitchInfo(msgspec.Struct, frozen=True, rename="pascal"):
    """The faults of all switches."""

    fault_code: list[Any] | None = None
    update_time: int = 0


def switch_info(configmap: Object) -> Report:
    """Read the switches from a host's own ConfigMap. Raises DamagedError."""
    what = f"{name_of(configmap)}: SwitchInfoCfg"
    return switches(decode(text_of(configmap, "SwitchInfoCfg") or "", SwitchInfo, what), what)


def switches(info: SwitchInfo, what: str) -> Report:
    """Read faults of switches. Raises DamagedError.

    Their form depends on MindCluster's version: objects, objects as text, or only codes.
    """
    faults, remarks = [], []
    for one in info.fault_code or ():
        code = one
        if isinstance(one, dict) or (isinstance(one, str) and one.lstrip().startswith("{")):
            text = one if isinstance(one, str) else msgspec.json.encode(one).decode()
            event = decode(text, _SwitchFault, what)
            if event.assertion == _OVER:
                continue
            code = event.assembled_fault_code
        if isinstance(code, str) and ascend_key(code) is not None:
            faults.append(ActiveCode(shown(code), -1, FaultOrigin.NODE))
        else:
            remarks.append((-1, f"has a bus switch with a fault of unknown form: {str(code)[:80]}"))
    return Report(tuple(dict.fromkeys(faults)), tuple(dict.fromkeys(remarks)), info.update_time)


class _FaultDev(msgspec.Struct, frozen=True, rename="pascal"):
    device_type: str = ""
    device_id: int = -1
    fault_code: list[str] | None = None


class Board(msgspec.Struct, frozen=True, rename="pascal"):
    """The devices of a board that have faults."""

    fault_dev_list: list[_FaultDev] | None = None


class _NodeInfo(msgspec.Struct, frozen=True, rename="pascal"):
    node_info: msgspec.Raw
    check_code: str = ""


def node_info(configmap: Object) -> Report:
    """Read the board from a host's own ConfigMap. Raises DamagedError."""
    what = f"{name_of(configmap)}: NodeInfo"
    cover = decode(text_of(configmap, "NodeInfo") or "", _NodeInfo, what)
    check(bytes(cover.node_info), cover.check_code, what)
    return board_report(decode(cover.node_info, Board, what))


def board_report(board: Board) -> Report:
    """Read the devices of a board that have faults."""
    faults: list[ActiveCode] = []
    remarks: list[tuple[int, str]] = []
    for device in board.fault_dev_list or ():
        for code in device.fault_code or ():
            if ascend_key(code) is None:
                where = f"{device.device_type} {device.device_id}"
                remarks.append((-1, f"has a fault of unknown form in {where}: {code[:40]!r}"))
            else:
                faults.append(ActiveCode(shown(code), -1, FaultOrigin.NODE))
    return Report(tuple(dict.fromkeys(faults)), tuple(dict.fromkeys(remarks)))


class DeviceList(msgspec.Struct, frozen=True, rename="pascal"):
    """The names of chips and, as JSON text, their faults, by the name of the resource."""

    device_list: dict[str, str] | None = None
    update_time: int = 0


class _DeviceInfo(msgspec.Struct, frozen=True, rename="pascal"):
    device_info: msgspec.Raw
    check_code: str = ""


class _Level(msgspec.Struct, frozen=True):
    fault_level: str = ""


class _CardFault(msgspec.Struct, frozen=True):
    """A fault of a chip. The names of its level mean the same; the first is the newest name."""

    fault_type: str = ""
    npu_name: str = ""
    fault_code: str = ""
    fault_handling: str = ""
    fault_level: str = ""
    large_model_fault_level: str = ""
    fault_time_and_level_map: dict[str, _Level] | None = None


def device_info(configmap: Object) -> Report:
    """Read the chips from a host's own ConfigMap. Raises DamagedError."""
    what = f"{name_of(configmap)}: DeviceInfoCfg"
    cover = decode(text_of(configmap, "DeviceInfoCfg") or "", _DeviceInfo, what)
    check(bytes(cover.device_info), cover.check_code, what)
    found = chips(decode(cover.device_info, DeviceList, what), what)
    listed = (text_of(configmap, _BY_HAND) or "").split(",")
    by_hand = tuple((chip_number(name), _SEPARATED) for name in listed if name.strip())
    remarks = tuple(dict.fromkeys((*found.remarks, *by_hand)))
    return msgspec.structs.replace(found, remarks=remarks)


def chips(info: DeviceList, what: str) -> Report:
    """Read the lists of chips. Raises DamagedError."""
    faults: list[ActiveCode] = []
    remarks: list[tuple[int, str]] = []
    lists = info.device_list or {}
    for key, text in lists.items():
        if key.endswith("-Fault") and text not in ("", "null"):  # Go writes null for a nil list
            for card in decode(text, list[_CardFault], f"{what}, {key}"):
                _add_card(card, faults, remarks)
    named = {fault.chip for fault in faults} | {chip for chip, _ in remarks}
    for key, text in lists.items():
        if key.endswith("Unhealthy"):  # -Unhealthy and -NetworkUnhealthy
            numbers = [chip_number(name) for name in text.split(",") if name.strip()]
            remark = f"is listed in {key}, without a code"
            remarks += [(number, remark) for number in numbers if number not in named]
    return Report(tuple(dict.fromkeys(faults)), tuple(dict.fromkeys(remarks)), info.update_time)


def _add_card(card: _CardFault, faults: list[ActiveCode], remarks: list[tuple[int, str]]) -> None:
    chip = chip_number(card.npu_name)
    level = card.fault_handling or card.fault_level or card.large_model_fault_level
    levels = card.fault_time_and_level_map or {}
    for code in filter(None, card.fault_code.replace(" ", "").split(",")):
        own = levels[code].fault_level if code in levels else level
        if ascend_key(code) is None:
            remarks.append((chip, f"has a fault of unknown form: {code[:40]!r} ({own})"))
        else:
            severity = _SEVERITIES.get(own)
            origin = _ORIGINS.get(card.fault_type, FaultOrigin.CHIP)
            faults.append(ActiveCode(shown(code), chip, origin, severity))
    if level == _BY_HAND:
        remarks.append((chip, _SEPARATED))


def read(configmap: Object) -> tuple[TopicReport, ...]:
    """Read a ConfigMap of devices, nodes or the cluster; return an empty tuple for others.

    In a `cluster-info-*` a damaged host does not affect the others. Raises DamagedError: all of the
    ConfigMap is damaged.
    """
    name = name_of(configmap)
    if name.startswith(DEVICES):
        host = name.removeprefix(DEVICES)
        reports = [_read_topic(host, Topic.CHIPS, lambda: device_info(configmap))]
        if text_of(configmap, "SwitchInfoCfg"):
            reports.append(_read_topic(host, Topic.SWITCHES, lambda: switch_info(configmap)))
        return tuple(reports)
    if name.startswith(NODES):
        host = name.removeprefix(NODES)
        return (_read_topic(host, Topic.BOARD, lambda: node_info(configmap)),)
    return tuple(_all_hosts(configmap)) if name.startswith(_CLUSTER) else ()


def _read_topic(host: str, topic: Topic, reading: Callable[[], Report]) -> TopicReport:
    try:
        return TopicReport(host, topic, reading())
    except DamagedError as error:
        return TopicReport(host, topic, damage=str(error))


def _all_hosts(configmap: Object) -> Iterator[TopicReport]:
    """Read one of ClusterD's ConfigMaps, which has no check code, host by host."""
    name = name_of(configmap)
    text = text_of(configmap, name)
    if not text:  # an empty part, or one that is no longer in use
        return
    for key, raw in decode(text, dict[str, msgspec.Raw], name).items():
        for prefix, topic in _TOPICS.items():
            if key.startswith(prefix):
                host = key.removeprefix(prefix)
                yield _read_topic(host, topic, _reader(topic, raw, f"{name}: {key}"))


def _reader(topic: Topic, raw: msgspec.Raw, what: str) -> Callable[[], Report]:
    match topic:
        case Topic.CHIPS:
            return lambda: chips(decode(raw, DeviceList, what), what)
        case Topic.SWITCHES:
            return lambda: switches(decode(raw, SwitchInfo, what), what)
        case Topic.BOARD:
            return lambda: board_report(decode(raw, Board, what))


class HostReports:
    """The last valid report of each host and topic, and the damaged parts."""

    def __init__(self) -> None:
        self._reports: dict[str, dict[Topic, tuple[str, Report]]] = {}  # with its ConfigMap
        self._damage: dict[_Place, str] = {}
        self._broken: dict[str, str] = {}  # ConfigMaps that are completely damaged

    def take(self, configmap: Object, *, there: bool) -> None:
        """Take a ConfigMap that is new, has changed, or is gone. Damaged parts change no report."""
        name = name_of(configmap)
        self._broken.pop(name, None)
        if not there:
            # NodeD removes the ConfigMap of a healthy board. The silence of a device plugin does
            # not mean that its chips are healthy.
            if name.startswith(NODES):
                self._forget(name.removeprefix(NODES), Topic.BOARD, name)
            return
        try:
            reports = read(configmap)
        except DamagedError as error:
            self._broken[name] = str(error)
            return
        for one in reports:
            self._take_topic(name, one)
        if name.startswith(COMPLETE):
            hosts = {one.host for one in reports}
            for host in [host for host in self._reports if host not in hosts]:
                self._forget(host, Topic.BOARD, name)

    def of(self, host: str) -> list[Report]:
        """Return the reports on a host."""
        return [report for _, report in self._reports.get(host, {}).values()]

    def damage(self, host: str) -> list[str]:
        """Return the parts that were damaged when they were last read, of one host."""
        own = [text for (where, _), text in self._damage.items() if where == host]
        return own + list(self._broken.values())

    def _take_topic(self, name: str, news: TopicReport) -> None:
        if news.report is None:
            self._damage[news.host, news.topic] = news.damage
            return
        self._damage.pop((news.host, news.topic), None)
        topics = self._reports.setdefault(news.host, {})
        by, before = topics.get(news.topic, (name, Report()))
        # A host may move from one of ClusterD's parts to another. For a short time both list it.
        if by == name or news.report.updated >= before.updated:
            topics[news.topic] = name, news.report

    def _forget(self, host: str, topic: Topic, name: str) -> None:
        if self._reports.get(host, {}).get(topic, ("",))[0] == name:
            del self._reports[host][topic]
            self._damage.pop((host, topic), None)
