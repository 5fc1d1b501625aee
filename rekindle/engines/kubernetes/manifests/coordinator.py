"""Render the objects of a job's coordinator: pod, description, Services, NetworkPolicies. Pure.

The Secret has the complete description, because its environment and arguments may contain
credentials, such as those of a store.
"""

from __future__ import annotations

import base64
import copy
from pathlib import Path

import msgspec

from rekindle import names
from rekindle.engines.kubernetes import labels
from rekindle.engines.kubernetes.labels import Names, Role
from rekindle.engines.kubernetes.manifests import Manifest, given
from rekindle.engines.kubernetes.manifests.settings import KubernetesSettings, Peer
from rekindle.job.spec import JobSpec, job_directory

_USER = 65532  # a user id without an account; the image does not need to have it
_PORT = "http"
_DEAD_HOST_S = 15


def root(spec: JobSpec, pods: KubernetesSettings, own: dict[str, str]) -> Manifest:
    """Return the ConfigMap that owns all other objects.

    It names the job's objects and has no secret.

    own: its labels.
    """
    found = _object("v1", "ConfigMap", spec, pods, Names.of(spec.job_id).root)
    found["metadata"]["labels"] = own
    found["metadata"]["annotations"] = {labels.JOB_ID: spec.job_id}
    found["data"] = {
        "job-id": spec.job_id,
        "kind": pods.kind.value,
        "workload": Names.of(spec.job_id).workload,
        "nodes": str(spec.nodes),
        "spares": str(spec.spares),
    }
    return found


def secret(spec: JobSpec, pods: KubernetesSettings, value: str) -> Manifest:
    """Return the Secret with the job's secret and its description."""
    found = _object("v1", "Secret", spec, pods, Names.of(spec.job_id).secret)
    content = {names.SECRET_FILE: value.encode(), names.SPEC_FILE: msgspec.json.encode(spec)}
    found["type"] = "Opaque"
    found["data"] = {key: base64.b64encode(text).decode() for key, text in content.items()}
    return found


def deployment(spec: JobSpec, pods: KubernetesSettings) -> Manifest:
    """Return the Deployment that keeps one coordinator running."""
    found = _object("apps/v1", "Deployment", spec, pods, Names.of(spec.job_id).coordinator)
    own = labels.labels(spec.job_id, Role.COORDINATOR)
    found["metadata"]["labels"] = own
    found["spec"] = {
        "replicas": 1,
        "strategy": {"type": "Recreate"},  # never two coordinators
        "selector": {"matchLabels": own},
        "template": {"metadata": {"labels": own}, "spec": _pod(spec, pods)},
    }
    return found


def _pod(spec: JobSpec, pods: KubernetesSettings) -> Manifest:
    pull_secrets = [{"name": name} for name in pods.image_pull_secrets]
    claim = pods.coordinator.claim
    kept = {"persistentVolumeClaim": {"claimName": claim}} if claim else {"emptyDir": {}}
    secret_source = {"secretName": Names.of(spec.job_id).secret, "defaultMode": 0o440}
    return {
        **given({"imagePullSecrets": pull_secrets}),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        # By default the pod stays on a dead host for 5 minutes; agents wait less long for a
        # coordinator.
        "tolerations": [
            {
                "key": f"node.kubernetes.io/{taint}",
                "operator": "Exists",
                "effect": "NoExecute",
                "tolerationSeconds": _DEAD_HOST_S,
            }
            for taint in ("not-ready", "unreachable")
        ],
        "containers": [_container(spec, pods)],
        "volumes": [
            {"name": "record"} | kept,
            {"name": "described", "secret": secret_source},
            {"name": "tmp", "emptyDir": {}},
        ],
    }


def _container(spec: JobSpec, pods: KubernetesSettings) -> Manifest:
    own = pods.coordinator
    return {
        "name": "coordinator",
        "image": own.image or pods.image,
        **given({"imagePullPolicy": pods.image_pull_policy}),
        "command": [
            *("python", "-m", "rekindle.coordinator.pod_process"),
            *("--directory", directory(spec.job_id)),
            *("--described", names.POD_DESCRIBED),
            *("--port", str(names.POD_PORT)),
        ],
        "env": [
            {"name": names.ENV_HOME, "value": names.POD_HOME},
            {"name": "PYTHONUNBUFFERED", "value": "1"},
        ],
        "ports": [{"name": _PORT, "containerPort": names.POD_PORT}],
        "readinessProbe": {"tcpSocket": {"port": _PORT}, "periodSeconds": 2},
        "resources": {
            "requests": given({"cpu": own.cpu, "memory": own.memory}),
            "limits": given({"memory": own.memory}),
        },
        "volumeMounts": [
            {"name": "record", "mountPath": names.POD_HOME},
            {"name": "described", "mountPath": names.POD_DESCRIBED, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }


def directory(job_id: str) -> str:
    """Return the job's directory in its coordinator's container."""
    return str(job_directory(job_id, Path(names.POD_HOME)))


def services(spec: JobSpec, pods: KubernetesSettings) -> list[Manifest]:
    """Return the Services: the coordinator's, and the one that gives the job's pods names."""
    own = Names.of(spec.job_id)
    coordinator = _object("v1", "Service", spec, pods, own.coordinator)
    coordinator["spec"] = {
        "selector": labels.labels(spec.job_id, Role.COORDINATOR),
        "ports": [{"name": _PORT, "port": names.POD_PORT, "targetPort": _PORT}],
    }
    nodes = _object("v1", "Service", spec, pods, own.nodes)
    nodes["spec"] = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": labels.labels(spec.job_id, Role.WORKER),
    }
    return [coordinator, nodes]


def policies(spec: JobSpec, pods: KubernetesSettings) -> list[Manifest]:
    """Return the NetworkPolicies. There are none if pods use their hosts' network."""
    if not pods.network_policy or pods.host_network:
        return []
    own = Names.of(spec.job_id)
    mates = {"podSelector": {"matchLabels": labels.labels(spec.job_id)}}
    flows = {"podSelector": {"matchLabels": {labels.ROLE: Role.FLOW.value}}}
    port = [{"protocol": "TCP", "port": names.POD_PORT}]
    coordinator = _object("networking.k8s.io/v1", "NetworkPolicy", spec, pods, own.coordinator)
    coordinator["spec"] = {
        "podSelector": {"matchLabels": labels.labels(spec.job_id, Role.COORDINATOR)},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [mates, flows, *map(_peer, pods.coordinator.peers)], "ports": port}],
    }
    nodes = _object("networking.k8s.io/v1", "NetworkPolicy", spec, pods, own.nodes)
    nodes["spec"] = {
        "podSelector": {"matchLabels": labels.labels(spec.job_id, Role.WORKER)},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [mates]}],
    }
    return [coordinator, nodes]


def _peer(peer: Peer) -> Manifest:
    if peer.cidr:
        return {"ipBlock": {"cidr": peer.cidr}}
    found: Manifest = {}
    if peer.namespace:
        place = {"kubernetes.io/metadata.name": peer.namespace}
        found["namespaceSelector"] = {"matchLabels": place}
    if peer.labels:
        found["podSelector"] = {"matchLabels": dict(peer.labels)}
    return found


def owned(obj: Manifest, owner_uid: str) -> Manifest:
    """Return a copy that the cluster deletes with the job's ConfigMap, which has this uid."""
    new = copy.deepcopy(obj)
    new["metadata"]["ownerReferences"] = [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "name": Names(obj["metadata"]["labels"][labels.JOB]).root,
            "uid": owner_uid,
            "controller": False,
            # Blocking needs the right to change finalizers.
            "blockOwnerDeletion": False,
        }
    ]
    return new


def _object(
    version: str, kind: str, spec: JobSpec, pods: KubernetesSettings, name: str
) -> Manifest:
    metadata = {
        "name": name,
        "namespace": pods.namespace,
        "labels": labels.labels(spec.job_id),
    }
    return {"apiVersion": version, "kind": kind, "metadata": metadata}
