"""MindCluster's ConfigMaps about hosts: the reader reads each known form, and no damaged one."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from mindcluster import (
    RESOURCE,
    board,
    card,
    cluster_info,
    code_of,
    configmap,
    device_info,
    device_list,
    go,
    node_info,
    switch_event,
    switch_list,
)

pytest.importorskip("kubernetes.client")
from rekindle.engines.kubernetes.client.api_errors import DamagedError
from rekindle.engines.kubernetes.mindcluster.host_reports import HostReports, read
from rekindle.engines.kubernetes.mindcluster.reports import ActiveCode, Report, Topic, TopicReport
from rekindle.recovery.faults.tables.verdict import FaultOrigin, Severity

SWITCH = "[0x00f1fef5,155912,npu,na]"


def chips_of(thing: dict[str, Any]) -> Report:
    """Return the report about chips of a host's ConfigMap; it must be valid."""
    found = read(thing)[0]
    assert found.topic is Topic.CHIPS
    assert found.report is not None, found.damage
    return found.report


def damage_of(thing: dict[str, Any]) -> str:
    found = read(thing)[0]
    assert found.report is None
    return found.damage


def changed(thing: dict[str, Any], key: str, text: Any) -> dict[str, Any]:
    return thing | {"data": thing["data"] | {key: text}}


def test_faults_of_chips() -> None:
    """read() returns each code of each chip with its origin and MindCluster's severity."""
    thing = device_info(
        "a",
        card(4, "A8028801, 80e18402", "SeparateNPU"),
        card(0, "81078603", "PreSeparateNPU", fault_type="CardNetworkUnhealthy"),
        card("", "120001001", "SeparateNPU", fault_type="NodeUnhealthy"),
        card("npu-3", "80C98006", "NotHandleFault"),
        card("Ascend910-2c-100-6", "80CB8006", "SubHealthFault"),
    )
    report = chips_of(thing)
    assert report == Report(
        faults=(
            ActiveCode("A8028801", 4, FaultOrigin.CHIP, Severity.CRITICAL),
            ActiveCode("80E18402", 4, FaultOrigin.CHIP, Severity.CRITICAL),
            ActiveCode("81078603", 0, FaultOrigin.NETWORK, Severity.NOTICE),
            ActiveCode("120001001", -1, FaultOrigin.NODE, Severity.CRITICAL),
            ActiveCode("80C98006", 3, FaultOrigin.CHIP, Severity.NOTICE),
            ActiveCode("80CB8006", 6, FaultOrigin.CHIP, Severity.NOTICE),
        ),
        updated=1744182144,
    )
    assert [found.host for found in read(thing)] == ["a"]


def test_check_code_as_the_real_plugin_makes_it() -> None:
    """The check code agrees with a ConfigMap of a real device plugin (UpdateTime 1763713955)."""
    names = ",".join(f"Ascend910-{number}" for number in range(8))
    info = device_list(updated=1763713955)
    info["DeviceList"][RESOURCE] = names
    assert code_of(go(info)) == "e5cc7a2c30df99b05fb3415484369006515105b0228fc26b097744dceede93ca"
    cover = {"DeviceInfo": info, "RackID": 6, "TopoCheck": "OK", "CheckCode": code_of(go(info))}
    thing = configmap("mindx-dl-deviceinfo-a", {"DeviceInfoCfg": go(cover)})
    assert chips_of(thing) == Report(updated=1763713955)


@pytest.mark.parametrize("name", ["fault_handling", "fault_level", "large_model_fault_level"])
def test_names_of_the_level_by_version(name: str) -> None:
    """Older plugins have one level for all codes of a chip, under one of three names."""
    old = {
        "fault_type": "CardUnhealthy",
        "npu_name": "Ascend910-1",
        "fault_code": "80C98006,80CB8006",
        name: "NotHandleFault",
    }
    faults = chips_of(device_info("a", old)).faults
    assert [fault.severity for fault in faults] == [Severity.NOTICE] * 2


def test_newer_resources_and_fields() -> None:
    """read() accepts the A5's resource huawei.com/npu, and skips unknown fields."""
    info = {
        "DeviceList": {"huawei.com/npu-Fault": go([card("npu-1", "80E01801") | {"new": [1]}])},
        "UpdateTime": 5,
        "Other": {},
    }
    cover = {"DeviceInfo": info, "CheckCode": code_of(go(info)), "RackID": 7}
    thing = configmap("mindx-dl-deviceinfo-a", {"DeviceInfoCfg": go(cover)})
    assert chips_of(thing).faults == (ActiveCode("80E01801", 1, FaultOrigin.CHIP, Severity.MAJOR),)


def test_what_has_no_code_is_a_remark() -> None:
    """Chips that a person separated, or that are unhealthy without a code, lead to remarks."""
    report = chips_of(
        device_info(
            "a",
            card(1, "", "ManuallySeparateNPU"),
            card(2, "Autofill"),
            manual="Ascend910-1,Ascend910-5",
            Unhealthy="Ascend910-1,Ascend910-7",
        )
    )
    assert report.faults == ()
    about = dict(report.remarks)
    assert set(about) == {1, 2, 5, 7}
    assert "until a person releases it" in about[1]
    assert "unknown form" in about[2]
    assert "without a code" in about[7]


@pytest.mark.parametrize(
    "entry",
    [go(switch_event(SWITCH)), switch_event(SWITCH), SWITCH],
    ids=["text", "object", "code"],
)
def test_bus_switches(entry: Any) -> None:
    """Faults of bus switches are faults of the host, without ended ones.

    Damage there does not affect the report about chips.
    """
    over = go(switch_event("[0x08520003,na,npu,na]", assertion=0))
    thing = device_info("a", card(0, "80E01801"), switches=[entry, over])
    chips, switches = read(thing)
    assert switches.topic is Topic.SWITCHES
    assert switches.report is not None
    assert switches.report.faults == (ActiveCode(SWITCH, -1, FaultOrigin.NODE),)
    chips, switches = read(changed(thing, "SwitchInfoCfg", '{"FaultCode":['))
    assert chips.report is not None
    assert "SwitchInfoCfg" in switches.damage


def test_boards() -> None:
    """The codes of NodeD are codes of the host."""
    (found,) = read(node_info("a", "2C000031", "0100000D"))
    assert (found.host, found.topic) == ("a", Topic.BOARD)
    assert found.report is not None
    assert [fault.code for fault in found.report.faults] == ["2C000031", "0100000D"]
    assert {fault.origin for fault in found.report.faults} == {FaultOrigin.NODE}


def torn(thing: dict[str, Any], key: str) -> list[dict[str, Any]]:
    text = thing["data"][key]
    return [changed(thing, key, text[:length]) for length in range(0, len(text), 7)]


def test_whatever_is_torn_is_not_trusted() -> None:
    """read() reports each truncated text as damaged."""
    for thing in torn(device_info("a", card(0, "80E01801")), "DeviceInfoCfg"):
        assert "mindx-dl-deviceinfo-a: DeviceInfoCfg" in damage_of(thing)
    for thing in torn(node_info("a", "2C000031"), "NodeInfo"):
        assert "mindx-dl-nodeinfo-a: NodeInfo" in damage_of(thing)


def test_whatever_was_changed_is_not_trusted() -> None:
    """If a person changed a code by hand, read() refuses it because of the check code."""
    thing = device_info("a", card(0, "80E01801"))
    forged = changed(thing, "DeviceInfoCfg", thing["data"]["DeviceInfoCfg"].replace("801", "802"))
    assert "check code" in damage_of(forged)
    cover = json.loads(thing["data"]["DeviceInfoCfg"]) | {"CheckCode": ""}
    assert "check code" in damage_of(changed(thing, "DeviceInfoCfg", go(cover)))


HOSTILE = [
    *(None, "", "null", "[]", "{}", "7", '"x"', "\x00", "{" * 100_000, "[" * 100_000),
    *('{"DeviceInfo":' * 5000, '{"DeviceInfo":{},"CheckCode":7}', "\ud800", "1e400"),
    '{"DeviceInfo":{"DeviceList":{"a-Fault":7},"UpdateTime":1},"CheckCode":"x"}',
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("mindx-dl-deviceinfo-a", "DeviceInfoCfg"),
        ("mindx-dl-nodeinfo-a", "NodeInfo"),
        ("cluster-info-device-0", "cluster-info-device-0"),
        ("cluster-info-node-cm", "cluster-info-node-cm"),
    ],
)
def test_hostile_text(name: str, key: str, text: Any) -> None:
    """For invalid text, read() returns no report and raises only DamagedError."""
    thing = configmap(name, {} if text is None else {key: text})
    found: tuple[TopicReport, ...] = ()
    with contextlib.suppress(DamagedError):
        found = read(thing)
    assert all(one.report is None for one in found)


@pytest.mark.parametrize(
    "inner",
    [
        {"DeviceList": {f"{RESOURCE}-Fault": "[{"}, "UpdateTime": 1},
        {"DeviceList": {f"{RESOURCE}-Fault": '{"fault_code":"80E01801"}'}, "UpdateTime": 1},
        {"DeviceList": {f"{RESOURCE}-Fault": '[{"fault_code":80}]'}, "UpdateTime": 1},
        {"DeviceList": [], "UpdateTime": 1},
        {"DeviceList": {}, "UpdateTime": "now"},
    ],
)
def test_wrong_forms_with_a_right_check_code(inner: Any) -> None:
    """read() refuses a wrong form, also with a correct check code."""
    cover = {"DeviceInfo": inner, "CheckCode": code_of(go(inner))}
    thing = configmap("mindx-dl-deviceinfo-a", {"DeviceInfoCfg": go(cover)})
    assert damage_of(thing)


def test_all_hosts_of_clusterd() -> None:
    """A damaged host does not affect other hosts, and read() skips unknown keys."""
    hosts = {
        "mindx-dl-deviceinfo-a": device_list(card(1, "80E01801")) | {"CmName": "x"},
        "mindx-dl-deviceinfo-b": {"DeviceList": 7},
        "mindx-dl-switchinfo-a": switch_list(go(switch_event(SWITCH))),
        "something-else": 7,
    }
    found = read(cluster_info("cluster-info-device-0", hosts))
    assert [(one.host, one.topic) for one in found] == [
        *(("a", Topic.CHIPS), ("b", Topic.CHIPS), ("a", Topic.SWITCHES))
    ]
    assert found[0].report is not None
    assert found[0].report.faults == (ActiveCode("80E01801", 1, FaultOrigin.CHIP, Severity.MAJOR),)
    assert "mindx-dl-deviceinfo-b" in found[1].damage


def codes(known: HostReports, host: str) -> set[str]:
    return {fault.code for report in known.of(host) for fault in report.faults}


def test_damage_leaves_what_is_known() -> None:
    """While a ConfigMap is damaged, the last valid report holds, and the damage has a reason."""
    known = HostReports()
    thing = device_info("a", card(0, "80E01801"))
    known.take(thing, there=True)
    known.take(changed(thing, "DeviceInfoCfg", "{"), there=True)
    assert codes(known, "a") == {"80E01801"}
    assert len(known.damage("a")) == 1
    assert known.damage("b") == []
    known.take(device_info("a"), there=True)
    assert (codes(known, "a"), known.damage("a")) == (set(), [])


def test_what_is_removed() -> None:
    """If NodeD removes its ConfigMap, the board is healthy.

    If the ConfigMap of a device plugin is removed, its chips stay faulty.
    """
    known = HostReports()
    things = [device_info("a", card(0, "80E01801")), node_info("a", "2C000031")]
    for thing in things:
        known.take(thing, there=True)
    for thing in things:
        known.take(thing, there=False)
    assert codes(known, "a") == {"80E01801"}
    known.take(things[1], there=False)
    known.take(node_info("b"), there=False)


def part(number: int, *hosts: str, updated: int = 1, code: str = "80E01801") -> dict[str, Any]:
    return cluster_info(
        f"cluster-info-device-{number}",
        {f"mindx-dl-deviceinfo-{h}": device_list(card(0, code), updated=updated) for h in hosts},
    )


def test_hosts_that_move_between_clusterds_parts() -> None:
    """A host that no part lists for a moment keeps its faults; the newer of two entries counts."""
    known = HostReports()
    known.take(part(0, "a", "b"), there=True)
    known.take(part(0, "b"), there=True)
    assert codes(known, "a") == {"80E01801"}
    known.take(part(1, "a", updated=3, code="80E18402"), there=True)
    known.take(part(0, "a", updated=2), there=True)
    assert codes(known, "a") == {"80E18402"}
    known.take(part(1), there=True)  # ClusterD no longer uses this part
    known.take(part(0, "a", updated=4), there=True)
    assert codes(known, "a") == {"80E01801"}


def test_clusterds_boards_are_all_there_are() -> None:
    """If ClusterD no longer lists a board, the board is healthy."""
    known = HostReports()
    hosts = {f"mindx-dl-nodeinfo-{host}": board("2C000031") for host in ("a", "b")}
    known.take(cluster_info("cluster-info-node-cm", hosts), there=True)
    del hosts["mindx-dl-nodeinfo-a"]
    known.take(cluster_info("cluster-info-node-cm", hosts), there=True)
    assert (codes(known, "a"), codes(known, "b")) == (set(), {"2C000031"})
    known.take(cluster_info("cluster-info-node-cm", {}), there=True)
    assert codes(known, "b") == set()
