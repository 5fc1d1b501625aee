"""Manifests of the objects that tests of clusters create."""

from __future__ import annotations

import os
from typing import Any

Object = dict[str, Any]

# A real cluster needs an image with a shell and python3. The simulated cluster uses the programs of
# this machine.
IMAGE = os.environ.get("REKINDLE_TEST_IMAGE", "python:3-slim")


def pod_spec(script: str = "exec sleep 60", container: str = "main", **more: Any) -> Object:
    """Return the spec of a pod with one container that runs this shell script."""
    spec = {"name": container, "image": IMAGE, "command": ["sh", "-c", script]}
    return {
        "containers": [{**spec, **more}],
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 2,
    }


def pod(name: str, script: str = "exec sleep 60", **metadata: Any) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, **metadata},
        "spec": pod_spec(script),
    }


def config_map(name: str, **data: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name},
        "data": data,
    }


def job(name: str, script: str = "exec sleep 60", ranks: int = 3, **spec: Any) -> Object:
    """Return an Indexed Job whose ranks run this shell script."""
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {
            "completionMode": "Indexed",
            "completions": ranks,
            "parallelism": ranks,
            "backoffLimit": 6,
            "template": {"spec": pod_spec(script)},
            **spec,
        },
    }


def rules(name: str, account: str, namespace: str, *listed: Object) -> tuple[Object, Object]:
    """Return a Role with these rules, and its binding to an account."""
    role = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": {"name": name},
        "rules": list(listed),
    }
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": namespace}],
    }
    return role, binding


def jobset(name: str, script: str = "exec sleep 60", **spec: Any) -> Object:
    """Return a JobSet of two Jobs `w` with two pods each."""
    template = job("x", script, ranks=2, backoffLimit=0)["spec"]
    replicated = {"name": "w", "replicas": 2, "template": {"spec": template}}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {"replicatedJobs": [replicated], **spec},
    }


def ascend_job(name: str, script: str = "exec sleep 60", workers: int = 2, **run: Any) -> Object:
    """Return a PyTorch AscendJob: a master and workers. `run` is its runPolicy."""
    template = {"spec": pod_spec(script, "ascend")}
    policy = {"restartPolicy": "Never", "template": template}
    return {
        "apiVersion": "mindxdl.gitee.com/v1",
        "kind": "AscendJob",
        "metadata": {"name": name, "labels": {"framework": "pytorch"}},
        "spec": {
            "schedulerName": "volcano",
            "runPolicy": run,
            "replicaSpecs": {
                "Master": {"replicas": 1, **policy},
                "Worker": {"replicas": workers, **policy},
            },
        },
    }


def pytorch_job(name: str, script: str = "exec sleep 60") -> Object:
    """Return a PyTorchJob: a master and two workers."""
    each = {"restartPolicy": "Never", "template": {"spec": pod_spec(script, "pytorch")}}
    replicas = {"Master": {"replicas": 1, **each}, "Worker": {"replicas": 2, **each}}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": name},
        "spec": {"pytorchReplicaSpecs": replicas},
    }


def volcano_job(name: str, script: str = "exec sleep 60", **spec: Any) -> Object:
    """Return a Volcano Job of one task `w` with three pods."""
    task = {"name": "w", "replicas": 3, "template": {"spec": pod_spec(script)}}
    return {
        "apiVersion": "batch.volcano.sh/v1alpha1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {
            "schedulerName": "volcano",
            "minAvailable": 3,
            "queue": "default",
            "tasks": [task],
            **spec,
        },
    }


def training_runtime(name: str, script: str = "exec sleep 60", **spec: Any) -> Object:
    """Return a TrainingRuntime. `spec` extends the spec of its JobSet."""
    template = job("x", script, ranks=1, backoffLimit=0)["spec"]
    template["template"]["spec"] = pod_spec(script, "node")
    label = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    replicated = {"name": "node", "template": {"metadata": {"labels": label}, "spec": template}}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {"name": name},
        "spec": {
            "mlPolicy": {"numNodes": 2},
            "template": {"spec": {"replicatedJobs": [replicated], **spec}},
        },
    }


def train_job(name: str, runtime: str, **spec: Any) -> Object:
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": name},
        "spec": {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "TrainingRuntime",
                "name": runtime,
            },
            **spec,
        },
    }
