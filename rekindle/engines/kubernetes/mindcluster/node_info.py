"""What is said of a host's bus switches (the device plugin) and of its board (NodeD). Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from rekindle.engines.kubernetes.client.api import Object
from rekindle.engines.kubernetes.mindcluster.documents import check, decode, name_of, text_of
from rekindle.engines.kubernetes.mindcluster.reports import ActiveCode, Report
from rekindle.recovery.faults.tables.code_format import ascend_key, shown
from rekindle.recovery.faults.tables.verdict import Origin

_OVER = 0  # a switch's event that tells of the end of a fault


class _SwitchFault(msgspec.Struct, frozen=True, rename="pascal"):
    assembled_fault_code: str
    assertion: int = 1


class SwitchInfo(msgspec.Struct, frozen=True, rename="pascal"):
    """The faults of all switches."""

    fault_code: list[Any] | None = None
    update_time: int = 0


def switch_info(configmap: Object) -> Report:
    """Read the switches of a host's own ConfigMap. Raises DamagedError."""
    what = f"{name_of(configmap)}: SwitchInfoCfg"
    return switches(decode(text_of(configmap, "SwitchInfoCfg") or "", SwitchInfo, what), what)


def switches(info: SwitchInfo, what: str) -> Report:
    """Read faults of switches: objects, or the same as text, or codes alone, by version.

    Raises DamagedError.
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
            faults.append(ActiveCode(shown(code), -1, Origin.NODE))
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
    """Read the board of a host's own ConfigMap. Raises DamagedError."""
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
                faults.append(ActiveCode(shown(code), -1, Origin.NODE))
    return Report(tuple(dict.fromkeys(faults)), tuple(dict.fromkeys(remarks)))
