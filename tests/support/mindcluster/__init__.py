"""The ConfigMaps of MindCluster's components, in the format of the real components.

The format is from github.com/Ascend/mind-cluster: JSON in the encoding of Go, and a check code over
the inner document (component/ascend-device-plugin/pkg/kubeclient, component/noded,
component/clusterd/pkg/domain).
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

Object = dict[str, Any]

CHIP_LABEL, CLUSTERD_LABEL = "mx-consumer-cim", "mx-consumer-volcano"
RESOURCE = "huawei.com/Ascend910"


def go(value: Any) -> str:
    """Return JSON in the encoding of Go."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def code_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def configmap(name: str, data: Object, namespace: str = "kube-system", **labels: str) -> Object:
    metadata = {"name": name, "namespace": namespace, "labels": labels}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def card(chip: int | str, codes: str, level: str = "RestartBusiness", **more: Any) -> Object:
    """Return one entry of a list of faults. All its codes have the same level."""
    name = f"Ascend910-{chip}" if isinstance(chip, int) else chip
    names = [code.strip() for code in codes.split(",") if code.strip()]
    return {
        "fault_type": "CardUnhealthy",
        "npu_name": name,
        "large_model_fault_level": level,
        "fault_level": level,
        "fault_handling": level,
        "fault_code": codes,
        "fault_time_and_level_map": {
            code: {"fault_time": 1744167455784, "fault_level": level} for code in names
        },
    } | more


def device_list(*cards: Object, updated: int = 1744182144, **lists: str) -> Object:
    """Return the device plugin's data about the chips of a host.

    `lists`: texts of further lists, by the suffix of their names.
    """
    return {
        "DeviceList": {
            RESOURCE: "Ascend910-0,Ascend910-1",
            f"{RESOURCE}-Fault": go(list(cards)),
            f"{RESOURCE}-NetworkUnhealthy": lists.get("NetworkUnhealthy", ""),
            f"{RESOURCE}-Recovering": "",
            f"{RESOURCE}-Unhealthy": lists.get("Unhealthy", ""),
        },
        "UpdateTime": updated,
    }


def device_info(host: str, *cards: Object, **more: Any) -> Object:
    """Return the device plugin's ConfigMap of a host.

    `more`: arguments of device_list, and `manual` and `switches`.
    """
    manual, switches = more.pop("manual", ""), more.pop("switches", None)
    inner = device_list(*cards, **more)
    cover = {
        "DeviceInfo": inner,
        "SuperPodID": -2,
        "ServerIndex": -2,
        "CheckCode": code_of(go(inner)),
    }
    data = {"DeviceInfoCfg": go(cover), "ManuallySeparateNPU": manual, "Description": "of chips"}
    if switches is not None:
        data["SwitchInfoCfg"] = go(switch_list(*switches))
    return configmap(f"mindx-dl-deviceinfo-{host}", data, **{CHIP_LABEL: "true"})


def switch_event(code: str, assertion: int = 1) -> Object:
    return {
        "EventType": 1,
        "AssembledFaultCode": code,
        "PeerPortDevice": 0,
        "SwitchChipId": 2,
        "SwitchPortId": 7,
        "Severity": 2,
        "Assertion": assertion,
        "AlarmRaisedTime": 1744167455784,
    }


def switch_list(*codes: Any) -> Object:
    return {
        "FaultCode": list(codes),
        "FaultLevel": "NotHandle",
        "UpdateTime": 1744182144,
        "NodeStatus": "Healthy",
        "FaultTimeAndLevelMap": {},
    }


def board(*codes: str) -> Object:
    device = {"DeviceType": "CPU", "DeviceId": 1, "FaultCode": list(codes), "FaultLevel": "x"}
    return {"FaultDevList": [device] if codes else [], "NodeStatus": "UnHealthy"}


def node_info(host: str, *codes: str) -> Object:
    """Return NodeD's ConfigMap of a host."""
    inner = board(*codes)
    data = {"NodeInfo": go({"NodeInfo": inner, "CheckCode": code_of(go(inner))})}
    return configmap(f"mindx-dl-nodeinfo-{host}", data, "mindx-dl", **{CHIP_LABEL: "true"})


def cluster_info(name: str, hosts: Object) -> Object:
    """Return one of ClusterD's ConfigMaps of all hosts. Its text is empty without hosts."""
    text = go(hosts) if hosts else ""
    return configmap(name, {name: text}, "mindx-dl", **{CLUSTERD_LABEL: "true"})


def reset_config(workload: str, namespace: str = "default", **fields: Any) -> Object:
    """Return a ConfigMap of ClusterD or the device plugin about the recovery of a job.

    `fields`: by their names in Go.
    """
    inner = {
        "RankList": [],
        "UpdateTime": 1744182144,
        "RetryTime": 0,
        "FaultFlushing": False,
        "GracefulExit": 0,
        "RestartFaultProcess": False,
    } | fields
    data = {"reset.json": go(inner), "checkCode": code_of(go(inner)), "restartType": "hotReset"}
    return configmap(f"reset-config-{workload}", data, namespace, reset="true")


def rank(number: int, status: str = "fault", policy: str = "", codes: str = "") -> Object:
    return {
        "RankId": number,
        "LogicId": 0,
        "Status": status,
        "Policy": policy,
        "InitialPolicy": policy,
        "ErrorCode": None,
        "ErrorCodeHex": codes,
    }
