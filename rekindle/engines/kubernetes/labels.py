"""Define the names of a job's objects, and the labels that find them. Pure."""

from __future__ import annotations

import enum
import hashlib
import hmac
import re

import msgspec

PREFIX = "rekindle.dev/"
JOB = f"{PREFIX}job"  # the slug of the job's id
ROLE = f"{PREFIX}role"
ATTEMPT = f"{PREFIX}attempt"
DESCRIBED = f"{PREFIX}described"  # a digest of the description, for comparison
JOB_ID = f"{PREFIX}job-id"  # annotation: a label cannot hold every id
ISOLATED = f"{PREFIX}isolated"  # annotation and taint of nodes

HOSTS = "hosts.rekindle.dev"  # the log of hosts; a slug has no dot, so this is not a job's name

HOSTNAME = "kubernetes.io/hostname"
KUEUE = "kueue.x-k8s.io/queue-name"

LONGEST_SLUG = 40  # leaves room for controllers' suffixes of pod names: 63 characters in total
_DIGITS = 8
_LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_SUFFIXED = re.compile(rf".*-[0-9a-f]{{{_DIGITS}}}")


class Role(str, enum.Enum):
    """The role of a pod in its job."""

    WORKER = "worker"
    COORDINATOR = "coordinator"
    FLOW = "flow"  # label that users give a flow run's pod, so that it may reach coordinators


def slug(job_id: str) -> str:
    """Return the name of a job's objects: a DNS-1035 label that no other id has.

    The function changes an invalid or too long id, and appends a hash. It also does so for an id
    that already ends like one with a hash.
    """
    fits = len(job_id) <= LONGEST_SLUG and _LABEL.fullmatch(job_id)
    if fits and not _SUFFIXED.fullmatch(job_id):
        return job_id
    digest = hashlib.sha256(job_id.encode()).hexdigest()[:_DIGITS]
    text = re.sub(r"[^a-z0-9]+", "-", job_id.lower()).strip("-") or "job"
    if not text[0].isalpha():
        text = f"job-{text}"
    return f"{text[: LONGEST_SLUG - _DIGITS - 1].rstrip('-')}-{digest}"


class Names:
    """The names of a job's objects.

    - `root`: the ConfigMap, which owns all others.
    - `workload`: the Job, JobSet and so on, and a TrainJob's TrainingRuntime.
    - `secret`: the Secret with the job's secret and its description.
    - `coordinator`: the coordinator's Deployment, Service and NetworkPolicy.
    - `nodes`: the headless Service of the job's pods, and their NetworkPolicy.
    """

    def __init__(self, slug: str) -> None:
        self.root = self.workload = slug
        self.secret = f"{slug}-secret"
        self.coordinator = f"{slug}-coordinator"
        self.nodes = f"{slug}-nodes"

    @classmethod
    def of(cls, job_id: str) -> Names:
        """Return the names for a job."""
        return cls(slug(job_id))


def labels(job_id: str, role: Role | None = None, *, attempt: int | None = None) -> dict[str, str]:
    """Return the labels of one of the job's objects."""
    found = {JOB: slug(job_id)}
    if role is not None:
        found[ROLE] = role.value
    if attempt is not None:
        found[ATTEMPT] = str(attempt)
    return found


def selector(job_id: str, role: Role | None = None) -> str:
    """Return the label selector that finds the job's objects."""
    return ",".join(f"{key}={value}" for key, value in labels(job_id, role).items())


def described(secret: str, *parts: object) -> str:
    """Return a digest that distinguishes descriptions.

    The job's secret is its key. So a reader of labels cannot guess values of the description's
    environment by trial.
    """
    content = msgspec.json.encode(
        [_without_defaults(part) for part in parts], order="deterministic"
    )
    return hmac.new(secret.encode(), content, hashlib.sha256).hexdigest()[:32]


def _without_defaults(value: object) -> object:
    """Return a description without the fields that have their default.

    So a later version of Rekindle, which has more fields, computes the same digest.
    """
    if isinstance(value, msgspec.Struct):
        fields = ((field, getattr(value, field.name)) for field in msgspec.structs.fields(value))
        return {
            field.name: _without_defaults(one) for field, one in fields if one != _default(field)
        }
    if isinstance(value, dict):
        return {key: _without_defaults(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_without_defaults(one) for one in value]
    return value


def _default(field: msgspec.structs.FieldInfo) -> object:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return field.default
