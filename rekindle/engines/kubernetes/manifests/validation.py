"""Check the settings of a job's pods. Pure. Each error names the correction."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePosixPath

import msgspec

from rekindle.checkpoints.location import S3Location, parse
from rekindle.engines.kubernetes.labels import PREFIX
from rekindle.engines.kubernetes.manifests import quantities as check
from rekindle.engines.kubernetes.manifests.division import check_division
from rekindle.engines.kubernetes.manifests.settings import (
    KubernetesSettings,
    Volume,
    WorkloadKind,
    final_checkpoint_s,
    replicas,
)
from rekindle.errors import UsageError
from rekindle.job.spec import Framework, JobSpec
from rekindle.settings import check_limits, choices_of

_TOLERATION = ("key", "operator", "value", "effect", "tolerationSeconds")

_MOST_ASCEND = 20_000
_MINDCLUSTER = (WorkloadKind.ASCENDJOB, WorkloadKind.VOLCANO_JOB)
_GANGS = (
    WorkloadKind.ASCENDJOB,
    WorkloadKind.VOLCANO_JOB,
    WorkloadKind.TRAINJOB,
    WorkloadKind.PYTORCHJOB,
)


def check_pods(pods: KubernetesSettings, spec: JobSpec) -> None:
    """Check the settings of a job's pods. Raises UsageError: the field and its valid values."""
    check_words(pods)
    _check_grace(pods, spec)
    _check_checkpoints(pods, spec)
    _check_home(pods)
    if pods.kind is WorkloadKind.ASCENDJOB and replicas(spec) > _MOST_ASCEND:
        raise UsageError(
            f"an ascendjob has at most {_MOST_ASCEND} replicas, but nodes and spares are "
            f"{replicas(spec)} together"
        )
    # MindCluster's operator creates other roles and variables for it.
    mindspore = Framework.MINDSPORE.value
    if (
        spec.framework.value == mindspore != pods.ascend.framework
        and pods.kind is WorkloadKind.ASCENDJOB
    ):
        raise UsageError(
            f"ascend.framework is {pods.ascend.framework}, but the job's framework is "
            f"{mindspore}; use {mindspore} in both"
        )


def check_words(pods: KubernetesSettings) -> None:
    """Check the settings that do not depend on a job. Raises UsageError: a value is invalid."""
    try:
        check_limits(pods, "kubernetes")
        check_limits(pods.ascend, "ascend")
    except ValueError as error:
        raise UsageError(str(error)) from error
    if not pods.image.strip() or any(character.isspace() for character in pods.image):
        raise UsageError(f"image is {pods.image!r}; name the image that holds the training script")
    _check_choices(pods)
    _check_choices(pods.ascend, "ascend.")
    _check_names(pods)
    _check_amounts(pods)
    _check_keys(pods)
    _check_volumes(pods)
    _check_coordinator(pods)
    _check_recovery(pods)
    check_division(pods)
    for name in ("accelerator", "custom_job_key", "custom_job_id"):
        check.value(f"ascend.{name}", getattr(pods.ascend, name))


def _check_choices(settings: msgspec.Struct, prefix: str = "") -> None:
    """Check the texts that have choices. Raises UsageError: one of them is not a choice."""
    for name, choices in choices_of(type(settings)).items():
        given = getattr(settings, name)
        for word in (given,) if isinstance(given, str) else given:
            if word not in choices:
                raise check.no_choice(f"{prefix}{name}", word, filter(None, choices))


def _check_names(pods: KubernetesSettings) -> None:
    check.label("namespace", pods.namespace)
    for where, name in (
        ("service_account", pods.service_account),
        ("priority_class", pods.priority_class),
        *(("image_pull_secrets", name) for name in pods.image_pull_secrets),
        *(("env_from_secrets", name) for name in pods.env_from_secrets),
    ):
        if name or where.endswith("secrets"):
            check.subdomain(where, name)
    if pods.queue:
        check.subdomain("queue", pods.queue)
    if pods.device:
        check.device(pods.device)
    if pods.topology_key:
        check.key("topology_key", pods.topology_key)


def _check_amounts(pods: KubernetesSettings) -> None:
    for name in ("cpu", "memory", "shared_memory"):
        check.quantity(name, getattr(pods, name))
    if pods.devices_per_node and not pods.device:
        raise UsageError("devices_per_node needs device; give it, for example nvidia.com/gpu")


def _check_grace(pods: KubernetesSettings, spec: JobSpec) -> None:
    least = final_checkpoint_s(spec)
    if pods.termination_grace_s < 0 or 0 < pods.termination_grace_s < least:
        raise UsageError(
            f"termination_grace_s is {pods.termination_grace_s}; give at least {least}, or 0, "
            "because an agent may write the final checkpoint for policy.dump_timeout_s, "
            f"{spec.policy.dump_timeout_s:g} s"
        )


def _check_keys(pods: KubernetesSettings) -> None:
    for where, found in (("labels", pods.labels), ("node_selector", pods.node_selector)):
        for key, value in found.items():
            check.key(where, key)
            check.value(f"{where}: {key}", value)
    for key in pods.annotations:
        check.key("annotations", key)
    for where, keys in (("labels", pods.labels), ("annotations", pods.annotations)):
        for key in keys:
            if key.startswith(PREFIX):
                raise UsageError(f"{where}: Rekindle sets {key}; leave it out")
            if key.split("/")[0].endswith("prefect.io"):
                raise UsageError(
                    f"{where}: because of {key}, Prefect's observer would treat the job's pods "
                    "as pods of a flow run; leave it out"
                )
    for number, toleration in enumerate(pods.tolerations):
        for key in toleration:
            if key not in _TOLERATION:
                raise UsageError(
                    f"tolerations[{number}]: {key} is unknown; use {', '.join(_TOLERATION)}"
                )


def _check_volumes(pods: KubernetesSettings) -> None:
    taken = {"shm", "reset-config", "data-trace-config", "data-trace", "ascend-driver"}
    paths: set[str] = set()
    for volume in pods.volumes:
        where = f"volumes: {volume.name or '(without a name)'}"
        if not check.LABEL.fullmatch(volume.name):
            raise UsageError(f"{where}: the name is invalid; use at most 63 of a-z 0-9 -")
        if volume.name in taken:
            raise UsageError(f"{where}: another volume has this name; choose another")
        taken.add(volume.name)
        _check_source(where, volume)
        path = str(PurePosixPath(volume.mount_path))
        if not path.startswith("/") or path == "/" or ":" in path:
            raise UsageError(
                f"{where}: mount_path is {volume.mount_path!r}; give an absolute path below /"
            )
        if path in paths:
            raise UsageError(f"{where}: {path} is mounted twice; choose another mount_path")
        if path == "/dev/shm":
            raise UsageError(f"{where}: Rekindle mounts /dev/shm; use shared_memory instead")
        paths.add(path)


def _check_source(where: str, volume: Volume) -> None:
    if len(volume.sources) > 1:
        raise UsageError(f"{where}: {' and '.join(volume.sources)} are given; keep one")
    for name in ("claim", "config_map", "secret"):
        if getattr(volume, name):
            check.subdomain(f"{where}: {name}", getattr(volume, name))
    if volume.host_path and not volume.host_path.startswith("/"):
        raise UsageError(f"{where}: host_path is {volume.host_path!r}; give an absolute path")


def _check_checkpoints(pods: KubernetesSettings, spec: JobSpec) -> None:
    """Check that checkpoints outlast their container, which loses its own files."""
    store = spec.checkpoint_store
    patched = pods.overrides or pods.pod_overrides  # patches may mount other volumes
    if patched or not spec.checkpoint_every or isinstance(parse(store), S3Location):
        return
    if not _lasts(pods, store):
        raise UsageError(
            f"the job would write checkpoints to {store} in each container, and lose them with "
            "the container; give checkpoint.path below the mount_path of a persistent volume, "
            "or s3://..."
        )


def _check_home(pods: KubernetesSettings) -> None:
    """Check that the records of ranks outlast their container."""
    if pods.home and not _lasts(pods, pods.home):
        raise UsageError(
            f"the job would lose home {pods.home} with each container; give a folder below the "
            "mount_path of a persistent volume"
        )


def _lasts(pods: KubernetesSettings, path: str) -> bool:
    lasting = (v.mount_path for v in pods.volumes if v.sources and not v.empty_dir)
    return any(PurePosixPath(path).is_relative_to(mount) for mount in lasting)


def _check_coordinator(pods: KubernetesSettings) -> None:
    given = pods.coordinator
    for name in ("cpu", "memory"):
        check.quantity(f"coordinator.{name}", getattr(given, name))
    if given.claim:
        check.subdomain("coordinator.claim", given.claim)
    for number, peer in enumerate(given.peers):
        where = f"coordinator.peers[{number}]"
        if peer.cidr and (peer.namespace or peer.labels):
            raise UsageError(
                f"{where}: a peer with cidr must not have namespace or labels; use a separate peer"
            )
        if not (peer.cidr or peer.namespace or peer.labels):
            raise UsageError(f"{where}: give namespace, labels or cidr")
        if peer.cidr and not check.CIDR.fullmatch(peer.cidr):
            raise UsageError(
                f"{where}: cidr is {peer.cidr!r}; give addresses, for example 10.0.0.0/8"
            )
        if peer.namespace:
            check.label(f"{where}.namespace", peer.namespace)
        for key, value in peer.labels.items():
            check.key(f"{where}.labels", key)
            check.value(f"{where}.labels: {key}", value)


def _check_recovery(pods: KubernetesSettings) -> None:
    kind = pods.kind
    if pods.gang and kind not in _GANGS:
        raise UsageError(
            f"gang: a {kind.value} cannot place all pods at once; leave it out, or choose one of "
            f"{_listed(_GANGS)}"
        )
    if pods.by_mindcluster and kind not in _MINDCLUSTER:
        raise UsageError(
            f"recovery is mindcluster, but MindCluster does not recover the kind {kind.value}; "
            f"choose {_listed(_MINDCLUSTER)}"
        )
    if pods.recover_strategy and not pods.by_mindcluster:
        raise UsageError(
            "recover_strategy has no effect without MindCluster; also set recovery to mindcluster"
        )
    if pods.recover_strategy and kind is not WorkloadKind.ASCENDJOB:
        raise UsageError(
            "recover_strategy: MindCluster recovers only the processes of an ascendjob, not of "
            f"a {kind.value}"
        )
    if len(set(pods.recover_strategy)) < len(pods.recover_strategy):
        raise UsageError("recover_strategy has the same strategy twice; keep one")


def _listed(kinds: Iterable[WorkloadKind]) -> str:
    return " or ".join(kind.value for kind in kinds)
