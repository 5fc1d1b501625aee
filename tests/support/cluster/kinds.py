"""The kinds of objects that the server supports."""

from __future__ import annotations

import msgspec


class Kind(msgspec.Struct, frozen=True):
    """One resource: its group, version and names, and the properties of its objects."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True
    has_status: bool = True  # it has a `status` subresource
    counts_generations: bool = True
    custom: bool = False
    short: tuple[str, ...] = ()

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def resource(self) -> str:
        """The name in errors: the plural, and the group if there is one."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def qualified(self) -> str:
        """The name in errors about the content of an object."""
        return f"{self.kind}.{self.group}" if self.group else self.kind

    @property
    def collection(self) -> str:
        return f"/apis/{self.api_version}" if self.group else f"/api/{self.api_version}"

    def path(self, namespace: str = "", name: str = "") -> str:
        """Return the path of a collection, or of one object."""
        inner = f"/namespaces/{namespace}" if namespace else ""
        last = f"/{name}" if name else ""
        return f"{self.collection}{inner}/{self.plural}{last}"


def _core(
    plural: str, kind: str, *short: str, plain: bool = False, everywhere: bool = False
) -> Kind:
    return Kind("", "v1", plural, kind, not everywhere, not plain, not plain, short=short)


def _rbac(plural: str, kind: str, namespaced: bool) -> Kind:
    group = "rbac.authorization.k8s.io"
    return Kind(group, "v1", plural, kind, namespaced, has_status=False, counts_generations=False)


def _custom(group: str, version: str, plural: str, kind: str, *, everywhere: bool = False) -> Kind:
    return Kind(group, version, plural, kind, not everywhere, custom=True)


NAMESPACES = _core("namespaces", "Namespace", "ns", everywhere=True)
NODES = _core("nodes", "Node", "no", everywhere=True)
PODS = _core("pods", "Pod", "po")
SERVICES = _core("services", "Service", "svc")
SECRETS = _core("secrets", "Secret", plain=True)
CONFIGMAPS = _core("configmaps", "ConfigMap", "cm", plain=True)
SERVICEACCOUNTS = _core("serviceaccounts", "ServiceAccount", "sa", plain=True)
EVENTS = _core("events", "Event", "ev", plain=True)
CLAIMS = _core("persistentvolumeclaims", "PersistentVolumeClaim", "pvc")
QUOTAS = _core("resourcequotas", "ResourceQuota", "quota")
LIMITS = Kind("", "v1", "limitranges", "LimitRange", True, False, False, short=("limits",))
LEASES = Kind("coordination.k8s.io", "v1", "leases", "Lease", True, False, False)
JOBS = Kind("batch", "v1", "jobs", "Job")
DEPLOYMENTS = Kind("apps", "v1", "deployments", "Deployment", short=("deploy",))
REPLICASETS = Kind("apps", "v1", "replicasets", "ReplicaSet", short=("rs",))
POLICIES = Kind("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy", has_status=False)
ROLES = _rbac("roles", "Role", True)
ROLEBINDINGS = _rbac("rolebindings", "RoleBinding", True)
CLUSTERROLES = _rbac("clusterroles", "ClusterRole", False)
CLUSTERROLEBINDINGS = _rbac("clusterrolebindings", "ClusterRoleBinding", False)
PRIORITIES = Kind(
    "scheduling.k8s.io", "v1", "priorityclasses", "PriorityClass", False, False, short=("pc",)
)
RUNTIMECLASSES = Kind("node.k8s.io", "v1", "runtimeclasses", "RuntimeClass", False, False, False)
JOBSETS = _custom("jobset.x-k8s.io", "v1alpha2", "jobsets", "JobSet")
ASCENDJOBS = _custom("mindxdl.gitee.com", "v1", "ascendjobs", "AscendJob")
VOLCANOJOBS = _custom("batch.volcano.sh", "v1alpha1", "jobs", "Job")
PODGROUPS = _custom("scheduling.volcano.sh", "v1beta1", "podgroups", "PodGroup")
TRAINJOBS = _custom("trainer.kubeflow.org", "v1alpha1", "trainjobs", "TrainJob")
RUNTIMES = _custom("trainer.kubeflow.org", "v1alpha1", "trainingruntimes", "TrainingRuntime")
CLUSTERRUNTIMES = _custom(
    "trainer.kubeflow.org",
    "v1alpha1",
    "clustertrainingruntimes",
    "ClusterTrainingRuntime",
    everywhere=True,
)
PYTORCHJOBS = _custom("kubeflow.org", "v1", "pytorchjobs", "PyTorchJob")

KINDS: tuple[Kind, ...] = tuple(each for each in list(globals().values()) if isinstance(each, Kind))

# The name has the group, because two groups have `jobs`.
BY_NAME = {each.resource: each for each in KINDS}


def choose(left_out: str) -> tuple[Kind, ...]:
    """Return all kinds except the named ones.

    `left_out`: plurals or plural.group, separated by commas.

    Raises SystemExit: a name is unknown.
    """
    names = {name for name in left_out.split(",") if name}
    known = {each.plural for each in KINDS if each.custom} | set(BY_NAME)
    if unknown := names - known:
        raise SystemExit(f"no such kinds: {', '.join(sorted(unknown))}")
    return tuple(
        each
        for each in KINDS
        if each.resource not in names and not (each.custom and each.plural in names)
    )
