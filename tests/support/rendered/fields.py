"""Check the fields of Kubernetes objects.

For built-in kinds, the official client defines the fields. For other kinds, the tables below
contain the used part of their published definitions.
"""

from __future__ import annotations

import re
from typing import Any

import kubernetes.client as client

_OWN = {
    ("v1", "ConfigMap"): "V1ConfigMap",
    ("v1", "Secret"): "V1Secret",
    ("v1", "Service"): "V1Service",
    ("v1", "Namespace"): "V1Namespace",
    ("v1", "ServiceAccount"): "V1ServiceAccount",
    ("apps/v1", "Deployment"): "V1Deployment",
    ("batch/v1", "Job"): "V1Job",
    ("networking.k8s.io/v1", "NetworkPolicy"): "V1NetworkPolicy",
    ("rbac.authorization.k8s.io/v1", "Role"): "V1Role",
    ("rbac.authorization.k8s.io/v1", "RoleBinding"): "V1RoleBinding",
    ("rbac.authorization.k8s.io/v1", "ClusterRole"): "V1ClusterRole",
    ("rbac.authorization.k8s.io/v1", "ClusterRoleBinding"): "V1ClusterRoleBinding",
}

_OBJECT = {"apiVersion": "str", "kind": "str", "metadata": "V1ObjectMeta"}
_JOBSET = {
    "network": {
        "enableDNSHostnames": "bool",
        "subdomain": "str",
        "publishNotReadyAddresses": "bool",
    },
    "replicatedJobs": [
        {"name": "str", "groupName": "str", "replicas": "int", "template": "V1JobTemplateSpec"}
    ],
    "successPolicy": {"operator": "str", "targetReplicatedJobs": ["str"]},
    "failurePolicy": {"maxRestarts": "int", "restartStrategy": "str", "rules": ["object"]},
    "suspend": "bool",
    "managedBy": "str",
    "ttlSecondsAfterFinished": "int",
}
_SCHEDULING = {
    "minAvailable": "int",
    "minResources": "object",
    "priorityClass": "str",
    "queue": "str",
}
_RUN_POLICY = {
    "activeDeadlineSeconds": "int",
    "backoffLimit": "int",
    "cleanPodPolicy": "str",
    "ttlSecondsAfterFinished": "int",
    "schedulingPolicy": _SCHEDULING,
}
_ROLE = {"replicas": "int", "restartPolicy": "str", "template": "V1PodTemplateSpec"}
_OTHERS: dict[tuple[str, str], dict[str, Any]] = {
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): {"spec": _JOBSET},
    ("mindxdl.gitee.com/v1", "AscendJob"): {
        "spec": {
            "replicaSpecs": dict.fromkeys(("Master", "Scheduler", "Chief", "Worker"), _ROLE),
            "runPolicy": _RUN_POLICY,
            "schedulerName": "str",
            "successPolicy": "str",
        }
    },
    ("batch.volcano.sh/v1alpha1", "Job"): {
        "spec": {
            "schedulerName": "str",
            "minAvailable": "int",
            "queue": "str",
            "maxRetry": "int",
            "priorityClassName": "str",
            "minSuccess": "int",
            "plugins": "object",
            "ttlSecondsAfterFinished": "int",
            "policies": [{"event": "str", "events": ["str"], "action": "str", "exitCode": "int"}],
            "tasks": [
                {
                    "name": "str",
                    "replicas": "int",
                    "minAvailable": "int",
                    "maxRetry": "int",
                    "template": "V1PodTemplateSpec",
                }
            ],
        }
    },
    ("bus.volcano.sh/v1alpha1", "Command"): {"action": "str", "target": "V1OwnerReference"},
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): {
        "spec": {
            "runtimeRef": {"apiGroup": "str", "kind": "str", "name": "str"},
            "trainer": {"numNodes": "int", "image": "str", "command": ["str"]},
            "suspend": "bool",
        }
    },
    ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"): {
        "spec": {
            "mlPolicy": {"numNodes": "int"},
            "podGroupPolicy": {"coscheduling": {"scheduleTimeoutSeconds": "int"}},
            "template": {"metadata": "V1ObjectMeta", "spec": _JOBSET},
        }
    },
    ("kubeflow.org/v1", "PyTorchJob"): {
        "spec": {
            "runPolicy": _RUN_POLICY | {"suspend": "bool", "managedBy": "str"},
            "pytorchReplicaSpecs": dict.fromkeys(("Master", "Worker"), _ROLE),
        }
    },
}
_PLAIN = {"str": str, "int": int, "bool": bool, "float": float, "datetime": str, "bytes": str}


def wrong_fields(manifest: dict[str, Any]) -> list[str]:
    """Return the unknown fields and wrong types that the API server would refuse in strict mode."""
    what = (manifest["apiVersion"], manifest["kind"])
    if what in _OWN:
        return list(_of_type(manifest, _OWN[what], ""))
    return list(_of_type(manifest, _OBJECT | _OTHERS[what], ""))


def _of_type(value: Any, kind: Any, where: str) -> list[str]:
    if isinstance(kind, dict):
        return _of_table(value, kind, where)
    if isinstance(kind, list):
        return _of_list(value, kind[0], where)
    if kind == "object":
        return []
    if kind in _PLAIN:
        good = isinstance(value, _PLAIN[kind]) and (kind == "bool" or not isinstance(value, bool))
        return [] if good else [f"{where} is {value!r}, no {kind}"]
    if inner := re.fullmatch(r"[Ll]ist\[(.*)\]", kind):
        return _of_list(value, inner[1], where)
    if inner := re.fullmatch(r"[Dd]ict[\[(]str, ?(.*)[\])]", kind):
        if not isinstance(value, dict):
            return [f"{where} is {value!r}, no map"]
        return [
            text for key, one in value.items() for text in _of_type(one, inner[1], f"{where}.{key}")
        ]
    model = getattr(client, kind)
    names = {written: field for field, written in model.attribute_map.items()}
    table = {name: model.openapi_types[field] for name, field in names.items()}
    return _of_table(value, table, where)


def _of_table(value: Any, table: dict[str, Any], where: str) -> list[str]:
    if not isinstance(value, dict):
        return [f"{where} is {value!r}, no map"]
    found = []
    for key, one in value.items():
        at = f"{where}.{key}"
        found += _of_type(one, table[key], at) if key in table else [f"{at} is unknown"]
    return found


def _of_list(value: Any, kind: Any, where: str) -> list[str]:
    if not isinstance(value, list):
        return [f"{where} is {value!r}, no list"]
    return [text for n, one in enumerate(value) for text in _of_type(one, kind, f"{where}[{n}]")]
