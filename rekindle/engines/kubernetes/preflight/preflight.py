"""Check, before the creation of objects, that a cluster meets the requirements of a job.

The checks leave nothing behind: they use reviews for rights, and dry runs for objects.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from rekindle.engines.kubernetes.client.api import Api, Object, may
from rekindle.engines.kubernetes.client.api_errors import (
    ApiError,
    ConflictError,
    ForbiddenError,
    MissingObjectError,
)
from rekindle.engines.kubernetes.client.objects import (
    collection,
    collection_of,
    find,
    path_of,
    plural_of,
)
from rekindle.engines.kubernetes.labels import JOB, ROLE, Role
from rekindle.engines.kubernetes.manifests.render import Manifests, adapter, render
from rekindle.engines.kubernetes.manifests.settings import KubernetesSettings, WorkloadKind
from rekindle.engines.kubernetes.preflight.namespace_checks import (
    FindingState,
    PreflightFinding,
    devices,
    lacking,
    mentioned,
    missing,
    ok,
    pod_templates,
    unknown,
)
from rekindle.errors import UsageError
from rekindle.job.spec import JobSpec

_WHO = "/apis/authentication.k8s.io/v1/selfsubjectreviews"
_NOBODY = "system:anonymous"
_INSTALL = {
    "jobset.x-k8s.io": "install JobSet",
    "trainer.kubeflow.org": "install Kubeflow Trainer v2",
    "kubeflow.org": "install Kubeflow's Training Operator v1",
    "batch.volcano.sh": "install Volcano",
    "mindxdl.gitee.com": "install MindCluster's Ascend Operator and Volcano",
}


def must_fit(api: Api, spec: JobSpec, pods: KubernetesSettings) -> None:
    """Check the cluster before the creation of a job's first object.

    A job whose root exists passed the checks before, and is not checked again. Raises UsageError
    with all missing things. Raises ApiError: the server does not answer.
    """
    wanted = render(spec, pods, secret="-")
    try:
        if find(api, path_of(wanted.root)) is not None:
            return
    except ForbiddenError:
        pass  # the findings below name this right and the other missing ones
    found = lacking(survey(api, pods.kind, wanted, whole=False))
    if found:
        reasons = "".join(f"\n  {one.in_words()}" for one in found)
        raise UsageError(
            f"job {spec.job_id} cannot run in namespace {pods.namespace} of {api.host}; Rekindle "
            f"created nothing:{reasons}"
        )


def survey(
    api: Api, kind: WorkloadKind, wanted: Manifests, *, whole: bool = True
) -> list[PreflightFinding]:
    """Check the requirements of a job of these objects; return the findings, most basic first.

    whole: also check optional parts, things that may still change (such as the nodes), and each
    object against webhooks and schemas; otherwise only the workload.
    """
    api = api.unforgiving()
    namespace = wanted.root["metadata"]["namespace"]
    found = list(_server(api))
    if lacking(found):
        return found
    space = _namespace(api, namespace)
    found.append(space)
    rights = [*needed(kind, wanted, inside=api.is_inside)]
    if whole:
        rights += [*useful(kind), NODES]
    found += [_right(api, each, namespace) for each in rights]
    known = {_kind(one): _resource(api, one) for one in (*wanted.beside, wanted.workload)}
    found += known.values()
    if space.state is FindingState.MISSING:
        return found
    found += mentioned(api, kind, wanted, namespace)
    if whole:
        found += devices(api, kind, wanted)
    tried = wanted.every if whole else (wanted.workload,)
    without = {one.what for one in lacking(found)}
    runs = [_dry_run(api, one, wanted, without, strict=whole) for one in tried]
    if not lacking(found + runs):
        runs += _pods_dry_run(api, kind, wanted, namespace)
    if space.state is FindingState.UNKNOWN and any(one.state is FindingState.OK for one in runs):
        found[found.index(space)] = ok(space.what, "Rekindle can create objects in it")
    return found + runs


def _server(api: Api) -> Iterator[PreflightFinding]:
    """Check that the server answers, and that it accepts the user."""
    try:
        version = api.get("/version").get("gitVersion")
    except ForbiddenError as error:
        if error.status == 401:
            yield _stranger(error)
            return
        version = "of unknown version"
    except ApiError as error:
        do = "correct the server in the kubeconfig, or check the network and proxies between"
        yield missing("server", str(error), do)
        return
    yield ok("server", f"{api.host}, {version}")
    try:
        review = api.create(
            _WHO, {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
        )
        name = ((review.get("status") or {}).get("userInfo") or {}).get("username") or "?"
    except ForbiddenError as error:
        if error.status == 401 or _NOBODY in str(error):
            yield _stranger(error)
        else:
            yield unknown("user", f"the server does not report the user: {error}")
        return
    except ApiError as error:  # a server older than 1.28, for example
        yield unknown("user", f"the server does not report the user: {error}")
        return
    yield ok("user", name) if name != _NOBODY else _stranger("it treats the user as anonymous")


def _stranger(text: object) -> PreflightFinding:
    do = "log in again, or correct the token, certificate or command of the user in the kubeconfig"
    return missing("user", f"the server does not accept the user: {text}", do)


def _namespace(api: Api, name: str) -> PreflightFinding:
    what = f"namespace {name}"
    try:
        found = api.get(f"/api/v1/namespaces/{name}")
    except MissingObjectError:
        return missing(what, "it does not exist", f"kubectl create namespace {name}")
    except ForbiddenError:
        return unknown(what, "Rekindle has no right to check whether it exists")
    if (found.get("status") or {}).get("phase") == "Terminating":
        return missing(
            what,
            "the cluster deletes it at present",
            "wait until it is removed, and create it again",
        )
    return ok(what)


def _right_to(named: str) -> str:
    return f"right to {named}"


def _right(api: Api, right: Right, namespace: str) -> PreflightFinding:
    """Check a right; all refused verbs are one finding."""
    what, optional = _right_to(named(right.group, right.resource)), bool(right.without)
    where = "" if right.everywhere else namespace

    def is_given(verb: str) -> bool:
        return may(api, verb, right.resource, group=right.group, namespace=where)

    try:
        refused = [verb for verb in right.verbs if not is_given(verb)]
    except ApiError as error:
        return unknown(what, str(error), optional=optional)
    if not refused:
        return ok(what, ", ".join(right.verbs), optional=optional)
    text = f"the user has no right to {', '.join(refused)}" + (
        f": {right.without}" if optional else ""
    )
    role = "deploy/nodes/cluster-role.yaml" if right.everywhere else "deploy/base/role.yaml"
    do = f"ask an administrator to grant it, as {role} does"
    return missing(what, text, do, optional=optional)


def _kind(obj: Object) -> str:
    return f"kind {plural_of(obj)} of {obj['apiVersion']}"


def _resource(api: Api, obj: Object) -> PreflightFinding:
    """Check that the server has this kind of object."""
    what, version, plural = _kind(obj), obj["apiVersion"], plural_of(obj)
    if "/" not in version:
        return ok(what)
    group = version.partition("/")[0]
    do = f"{_INSTALL[group]}, or choose another kind" if group in _INSTALL else ""
    try:
        known = api.get(f"/apis/{version}").get("resources") or ()
    except MissingObjectError:
        return missing(what, f"the cluster has {_versions(api, group)}", do)
    except ForbiddenError:
        return unknown(what, "Rekindle has no right to list the kinds")
    if any(one["name"] == plural for one in known):
        return ok(what)
    return missing(what, f"the cluster has {version}, but no {plural}", do)


def _versions(api: Api, group: str) -> str:
    try:
        listed = api.get(f"/apis/{group}").get("versions") or ()
    except MissingObjectError:
        return f"nothing of {group}"
    return f"{group} in other versions: {', '.join(one['version'] for one in listed)}"


def _dry_run(
    api: Api, one: Object, wanted: Manifests, without: set[str], *, strict: bool
) -> PreflightFinding:
    """Check an object by a dry run, which creates nothing.

    without: names of missing requirements. strict: also refuse fields that the server does not
    know.
    """
    what = f"dry run of {one['kind']} {one['metadata']['name']}"
    if lost := without & {_kind(one), _right_to(named(*place(one)))}:
        return unknown(what, f"Rekindle did not try it without {', '.join(sorted(lost))}")
    query = {"dryRun": "All", "fieldManager": "rekindle"}
    if strict:
        query["fieldValidation"] = "Strict"
    try:
        api.create(collection_of(one), one, **query)
    except ConflictError:
        return _taken(api, what, one)
    except ApiError as error:
        text = str(error)
        if "does not support dry run" in text:
            return unknown(what, text)
        if one is wanted.workload and wanted.beside and is_premature(text):
            return unknown(
                what, "its webhook can check it only after the objects that it refers to exist"
            )
        return missing(
            what,
            text,
            "correct the fields that the server refuses, below kubernetes in the job file",
        )
    return ok(what)


def _pods_dry_run(
    api: Api, kind: WorkloadKind, wanted: Manifests, namespace: str
) -> Iterator[PreflightFinding]:
    """Check by dry runs that quotas, limits and webhooks admit one pod of each template.

    The dry run of a workload does not show that, because its controller creates the pods later.
    """
    right = _right(api, PODS, namespace)
    if right.state is not FindingState.OK:
        yield msgspec.structs.replace(
            right, what="dry run of pods", state=FindingState.UNKNOWN, do=""
        )
        return
    for template in pod_templates(kind, wanted):
        metadata = (template.get("metadata") or {}) | {"namespace": namespace}
        role = (metadata.get("labels") or {}).get(ROLE, Role.WORKER.value)
        what = f"dry run of a {role} pod"
        metadata["generateName"] = f"{wanted.workload['metadata']['name']}-"
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
        try:
            api.create(collection("v1", "pods", namespace), pod, dryRun="All")
        except ApiError as error:
            yield _pod_refused(what, error)
        else:
            yield ok(what, "quotas, limits and webhooks admit it now")


def _pod_refused(what: str, error: ApiError) -> PreflightFinding:
    text = str(error)
    if "does not support dry run" in text:
        return unknown(what, text)
    if "exceeded quota" in text:  # other pods may end
        do = "wait until other pods have ended, make the job smaller, or ask for a higher quota"
        return unknown(what, text, do)
    do = "change the pods below kubernetes in the job file, or ask an administrator to admit them"
    return missing(what, text, do)


def is_premature(text: str) -> bool:
    """Return whether a webhook refuses a TrainJob because its runtime does not exist yet.

    Kubeflow Trainer's and Kueue's webhooks do. The texts come from them.
    """
    text = text.lower()
    return "must be created before" in text or ("runtime" in text and "not found" in text)


def _taken(api: Api, what: str, one: Object) -> PreflightFinding:
    found = find(api, path_of(one))
    theirs = ((found or {}).get("metadata") or {}).get("labels") or {}
    if found is None or theirs.get(JOB) == one["metadata"]["labels"][JOB]:
        return ok(what, "it exists already")
    return missing(
        what, "an object of this name belongs to another job", "give the job another name"
    )


# ---- the rights that the engine needs; deploy/base/role.yaml grants them


class Right(msgspec.Struct, frozen=True, kw_only=True):
    """The right to use these verbs on one resource.

    resource: with its subresource, such as pods/log. without: the function that needs it; "": a job
    does. everywhere: the resource does not belong to a namespace.
    """

    group: str
    resource: str
    verbs: tuple[str, ...]
    without: str = ""
    everywhere: bool = False


# Nodes do not belong to a namespace. An optional ClusterRole grants this right.
NODES = Right(
    group="",
    resource="nodes",
    verbs=("get", "list", "watch", "patch"),
    without="Rekindle cannot cordon or taint nodes, but jobs still avoid them by affinity",
    everywhere=True,
)

# Only for dry runs: controllers create the pods of jobs. The Role of deploy/ does not grant it.
PODS = Right(
    group="",
    resource="pods",
    verbs=("create",),
    without="only the run shows whether quotas, limits and webhooks admit them",
)


def needed(kind: WorkloadKind, wanted: Manifests, *, inside: bool = False) -> tuple[Right, ...]:
    """Return the rights that a job of these objects requires.

    inside: the process that steers it is a pod of the cluster, and reaches its coordinator
    directly.
    """
    secret, *others = wanted.around
    verbs: dict[tuple[str, str], dict[str, None]] = {}

    def ask(group: str, resource: str, *asked: str) -> None:
        verbs.setdefault((group, resource), {}).update(dict.fromkeys(asked))

    # The engine deletes the root, and the cluster deletes the objects that the root owns.
    ask(*place(wanted.root), "create", "get", "delete")
    ask(*place(secret), "create", "get")
    for each in (*others, *wanted.beside):
        ask(*place(each), "create", "patch")  # by a server-side apply
    ask("apps", "deployments", "get")
    ask("", "services", "get")
    if not inside:
        ask("", "services/proxy", "create", "get")
    ask(*place(wanted.workload), "create", "get", "delete")
    if adapter(kind).suspend is not None or adapter(kind).follows:
        ask(*place(wanted.workload), "patch")
    ask("", "pods", "list", "watch", "delete", "deletecollection")
    return tuple(
        Right(group=group, resource=resource, verbs=tuple(asked))
        for (group, resource), asked in verbs.items()
    )


def useful(kind: WorkloadKind) -> Iterator[Right]:
    """Yield the optional rights of the role."""
    gvk = adapter(kind).gvk
    for group, resource, verbs, without in (
        (gvk.group, gvk.plural, ("list", "watch"), "Rekindle cannot watch workloads"),
        (
            "",
            "configmaps",
            ("list", "watch", "patch"),
            "Rekindle cannot list jobs, or switch their trace",
        ),
        ("", "pods", ("get",), "Rekindle cannot read a single pod"),
        ("", "pods/log", ("get",), "Rekindle cannot read the output of pods"),
        ("", "events", ("list", "watch"), "the log does not show why the cluster rejects pods"),
        ("", "persistentvolumeclaims", ("get",), "the check cannot report a missing claim"),
        ("", "serviceaccounts", ("get",), "the check cannot report a missing account"),
    ):
        yield Right(group=group, resource=resource, verbs=verbs, without=without)


def place(obj: Object) -> tuple[str, str]:
    """Return the group and the resource that rights to an object name."""
    return obj["apiVersion"].rpartition("/")[0], plural_of(obj)


def named(group: str, resource: str) -> str:
    """Return a resource in kubectl's format."""
    return f"{resource}.{group}" if group else resource
