"""What the device plugin says of a host's chips. Pure."""

from __future__ import annotations

import msgspec

from rekindle.engines.kubernetes.client.api import Object
from rekindle.engines.kubernetes.mindcluster.documents import check, decode, name_of, text_of
from rekindle.engines.kubernetes.mindcluster.reports import ActiveCode, Report, chip_number
from rekindle.recovery.faults.tables.code_format import ascend_key, shown
from rekindle.recovery.faults.tables.verdict import Origin, Severity

# Training goes on with these: what no table lists is then no reason to end it.
_MILD = ("NotHandleFault", "SubHealthFault", "PreSeparateNPU")
_BY_HAND = "ManuallySeparateNPU"  # a level, and the key of a list of chips
_SEPARATED = "is kept out of use for its many faults, until a person releases it"
_ORIGINS = {"CardNetworkUnhealthy": Origin.NETWORK, "NodeUnhealthy": Origin.NODE}


class DeviceList(msgspec.Struct, frozen=True, rename="pascal"):
    """Names of chips and, as text once more, their faults, by the name of the resource."""

    device_list: dict[str, str] | None = None
    update_time: int = 0


class _DeviceInfo(msgspec.Struct, frozen=True, rename="pascal"):
    device_info: msgspec.Raw
    check_code: str = ""


class _Level(msgspec.Struct, frozen=True):
    fault_level: str = ""


class _CardFault(msgspec.Struct, frozen=True):
    """Of the names of its level the first is the newest; all of them mean the same."""

    fault_type: str = ""
    npu_name: str = ""
    fault_code: str = ""
    fault_handling: str = ""
    fault_level: str = ""
    large_model_fault_level: str = ""
    fault_time_and_level_map: dict[str, _Level] | None = None


def device_info(configmap: Object) -> Report:
    """Read the chips of a host's own ConfigMap. Raises DamagedError."""
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
        if key.endswith("-Fault") and text not in ("", "null"):  # a nil list in Go
            for card in decode(text, list[_CardFault], f"{what}, {key}"):
                _add_card(card, faults, remarks)
    named = {fault.chip for fault in faults} | {chip for chip, _ in remarks}
    for key, text in lists.items():
        if key.endswith("Unhealthy"):  # -Unhealthy and -NetworkUnhealthy
            numbers = [chip_number(name) for name in text.split(",") if name.strip()]
            told = f"is listed in {key}, without a code"
            remarks += [(number, told) for number in numbers if number not in named]
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
            severity = Severity.MINOR if own in _MILD else None
            origin = _ORIGINS.get(card.fault_type, Origin.CHIP)
            faults.append(ActiveCode(shown(code), chip, origin, severity))
    if level == _BY_HAND:
        remarks.append((chip, _SEPARATED))
