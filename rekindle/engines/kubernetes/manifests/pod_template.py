"""Render the pod of an agent, which is one node of the job. Pure."""

from __future__ import annotations

import copy
from collections.abc import Iterable

from rekindle import names
from rekindle.engines.kubernetes import labels
from rekindle.engines.kubernetes.labels import Names, Role
from rekindle.engines.kubernetes.manifests import Manifest, ascend, given
from rekindle.engines.kubernetes.manifests.settings import (
    KubernetesSettings,
    Volume,
    WorkloadKind,
    devices,
    grace_s,
)
from rekindle.engines.kubernetes.manifests.strategic_merge import merge
from rekindle.errors import UsageError
from rekindle.job.spec import JobSpec

# The container name that the operator of a kind requires.
_CONTAINERS = {
    WorkloadKind.ASCENDJOB: "ascend",
    WorkloadKind.PYTORCHJOB: "pytorch",
    WorkloadKind.TRAINJOB: "node",
}
_OTHER_CONTAINER = "training"
_SHM = "/dev/shm"

JOIN_S = "600"  # seconds; a node may have to pull the coordinator's image first

# The field of a pod's volume for each source, and the field below it that names the source.
_SOURCES = {
    "claim": ("persistentVolumeClaim", "claimName"),
    "host_path": ("hostPath", "path"),
    "config_map": ("configMap", "name"),
    "secret": ("secret", "secretName"),
}


def container_name(kind: WorkloadKind) -> str:
    """Return the name of the container in which the agent runs."""
    return _CONTAINERS.get(kind, _OTHER_CONTAINER)


def address(spec: JobSpec, pods: KubernetesSettings) -> str:
    """Return the address of the job's coordinator inside the cluster."""
    service = Names.of(spec.job_id).coordinator
    return f"{service}.{pods.namespace}.svc:{names.POD_PORT}"


def pod_template(
    spec: JobSpec, pods: KubernetesSettings, *, attempt: int, restart: str
) -> Manifest:
    """Return the template of the job's pods, with the user's patch.

    restart: the restartPolicy; "": the kind has it elsewhere. Raises UsageError: the patch of the
    template does not fit.
    """
    extras = ascend.extras(
        pods.ascend,
        ascend.Place(
            workload=Names.of(spec.job_id).workload, namespace=pods.namespace, device=pods.device
        ),
        by_mindcluster=pods.by_mindcluster,
        process_level=pods.process_level,
    )
    shared = given({"sizeLimit": pods.shared_memory})
    template = {
        "metadata": given(
            {"labels": _labels(spec, pods, attempt), "annotations": dict(pods.annotations)}
        ),
        "spec": {
            **_placed(spec, pods),
            **given({"restartPolicy": restart}),
            "terminationGracePeriodSeconds": grace_s(spec, pods),
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            **_network(spec, pods),
            "containers": [_container(spec, pods, extras)],
            "volumes": [
                {"name": "shm", "emptyDir": {"medium": "Memory"} | shared},
                *map(_source, pods.volumes),
                *extras.volumes,
            ],
        },
    }
    _refuse_our_names(pods.pod_overrides)
    new = merge(template, pods.pod_overrides, "pod_overrides")
    keep_our_labels(template, new, "pod_overrides")
    return new


def _labels(spec: JobSpec, pods: KubernetesSettings, attempt: int) -> dict[str, str]:
    kind = given({ascend.ACCELERATOR: pods.ascend.accelerator})
    return pods.labels | kind | labels.labels(spec.job_id, Role.WORKER, attempt=attempt)


def _container(spec: JobSpec, pods: KubernetesSettings, extras: ascend.Extras) -> Manifest:
    command = ["rekindle", "run", "--coordinator", address(spec, pods)]
    command += ["--join-timeout", JOIN_S, "--local-addr", f"$({names.ENV_POD_IP})"]
    env = [
        {
            "name": names.ENV_SECRET,
            "valueFrom": {
                "secretKeyRef": {"name": Names.of(spec.job_id).secret, "key": names.SECRET_FILE}
            },
        },
        ascend.field_of_pod(names.ENV_POD_IP, "status.podIP"),
        ascend.field_of_pod(names.ENV_HOST_NAME, "spec.nodeName"),
        *([{"name": names.ENV_HOME, "value": pods.home}] if pods.home else []),
        {"name": "PYTHONUNBUFFERED", "value": "1"},
        *extras.env,
    ]
    return {
        "name": container_name(pods.kind),
        "image": pods.image,
        **given({"imagePullPolicy": pods.image_pull_policy}),
        "command": command,
        "env": env,
        **given(
            {
                "envFrom": [{"secretRef": {"name": name}} for name in pods.env_from_secrets],
                "ports": extras.ports,
            }
        ),
        "resources": _resources(spec, pods),
        "volumeMounts": [
            {"name": "shm", "mountPath": _SHM},
            *map(_mount, pods.volumes),
            *extras.mounts,
        ],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {"allowPrivilegeEscalation": False},
    }


def _resources(spec: JobSpec, pods: KubernetesSettings) -> Manifest:
    """Return requests and limits. CPUs have no limit, so that a pod may use idle ones."""
    count = devices(spec, pods)
    limits = given({"memory": pods.memory, pods.device: str(count) if count else ""})
    return given({"requests": given({"cpu": pods.cpu}) | limits, "limits": limits})


def _placed(spec: JobSpec, pods: KubernetesSettings) -> Manifest:
    return given(
        {
            "serviceAccountName": pods.service_account,
            "imagePullSecrets": [{"name": name} for name in pods.image_pull_secrets],
            "priorityClassName": pods.priority_class,
            "nodeSelector": dict(pods.node_selector),
            "affinity": _affinity(spec, pods),
            "tolerations": [dict(one) for one in pods.tolerations],
        }
    )


def _affinity(spec: JobSpec, pods: KubernetesSettings) -> Manifest:
    mates = {"matchLabels": labels.labels(spec.job_id, Role.WORKER)}
    found: Manifest = {}
    if pods.one_per_host:
        apart = {"labelSelector": mates, "topologyKey": labels.HOSTNAME}
        found["podAntiAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}
    if pods.topology_key:
        near = {"labelSelector": mates, "topologyKey": pods.topology_key}
        wish = {"weight": 100, "podAffinityTerm": near}
        found["podAffinity"] = {"preferredDuringSchedulingIgnoredDuringExecution": [wish]}
    return found


def _network(spec: JobSpec, pods: KubernetesSettings) -> Manifest:
    found: Manifest = {"subdomain": Names.of(spec.job_id).nodes}
    if pods.host_network:
        found |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    return found


def _source(volume: Volume) -> Manifest:
    for field, (kind, name) in _SOURCES.items():
        if source := getattr(volume, field):
            return {"name": volume.name, kind: {name: source}}
    return {"name": volume.name, "emptyDir": {}}


def _mount(volume: Volume) -> Manifest:
    found: Manifest = {"name": volume.name, "mountPath": volume.mount_path}
    return found | {"readOnly": True} if volume.read_only else found


def _refuse_our_names(patch: Manifest) -> None:
    """Check a patch. Raises UsageError: it sets a variable that Rekindle sets for the agent."""
    spec = patch.get("spec")
    containers = spec.get("containers") if isinstance(spec, dict) else None
    for container in containers if isinstance(containers, list) else ():
        env = container.get("env") if isinstance(container, dict) else None
        for variable in env if isinstance(env, list) else ():
            name = variable.get("name") if isinstance(variable, dict) else None
            if isinstance(name, str) and name.startswith("REKINDLE_"):
                raise UsageError(f"pod_overrides: Rekindle sets {name}; leave it out")


def keep_our_labels(manifest: Manifest, patched: Manifest, name: str) -> None:
    """Check a patch of this name.

    Raises UsageError: it changes a label by which Rekindle finds the job's objects.
    """
    kept = (patched.get("metadata") or {}).get("labels") or {}
    for key, value in manifest["metadata"]["labels"].items():
        if key.startswith(labels.PREFIX) and kept.get(key) != value:
            raise UsageError(f"{name}: Rekindle sets the label {key}; leave it out")


def keep_off(template: Manifest, avoid: Iterable[str]) -> Manifest:
    """Return the template with the requirement that its pods avoid these nodes.

    Existing requirements for nodes stay.
    """
    nodes = sorted(set(avoid))
    if not nodes:
        return template
    off = {"key": labels.HOSTNAME, "operator": "NotIn", "values": nodes}
    new = copy.deepcopy(template)
    affinity = _below(_below(new, "spec"), "affinity")
    demanded = _below(
        _below(affinity, "nodeAffinity"), "requiredDuringSchedulingIgnoredDuringExecution"
    )
    terms = demanded.get("nodeSelectorTerms") or [{}]  # a node that meets one of them is acceptable
    demanded["nodeSelectorTerms"] = [
        term | {"matchExpressions": [*term.get("matchExpressions", []), off]} for term in terms
    ]
    return new


def _below(manifest: Manifest, key: str) -> Manifest:
    if not manifest.get(key):
        manifest[key] = {}
    found: Manifest = manifest[key]
    return found
