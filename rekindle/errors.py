"""Every error that Rekindle raises for its user.

    RekindleError                 status 1 of a command that ends by it
    ├── UsageError                status 2
    ├── JobError
    │   ├── UnansweredError
    │   ├── LeaseHeldError
    │   ├── JobFailedError
    │   ├── RejectedError
    │   ├── HopelessError         engines.kubernetes.engine
    │   ├── DamagedError          engines.kubernetes.client.errors
    │   ├── ApiError              engines.kubernetes.client.errors
    │   │   ├── MissingObjectError
    │   │   ├── ConflictError
    │   │   ├── ForbiddenError
    │   │   └── ExpiredError
    │   └── RunError              testing.handle
    ├── ProtocolError
    │   └── StaleError
    ├── CheckpointError
    │   ├── CorruptError
    │   │   └── MissingError
    │   ├── NewerFormatError
    │   └── S3Error               checkpoints.s3.errors
    ├── SessionError
    ├── CheckerError              agent.node_check
    ├── DcmiError                 agent.devices.dcmi
    │   └── NoDcmiError
    └── UnusableError             rank.member

Other classes are for code that takes them with errors of a library: a ConnectionError, a
RuntimeError of a framework, a ValueError that msgspec takes.
Faults of a training run are values (`rekindle.recovery.faults.fault.Fault`), not exceptions.
"""


class RekindleError(Exception):
    """Base of all errors that Rekindle raises on purpose."""

    exit_status = 1


class UsageError(RekindleError):
    """A command line, job description or call that cannot work as given."""

    exit_status = 2


class JobError(RekindleError):
    """A job that ended without success, or cannot be reached or steered."""


class UnansweredError(JobError):
    """A job's coordinator did not hear what it was asked: it is away, or out of reach."""


class LeaseHeldError(JobError):
    """Another process steers this job; only one may."""


class JobFailedError(JobError):
    """The job ended in failure."""


class RejectedError(JobError):
    """What was trained is not good enough to be published."""


class ProtocolError(RekindleError):
    """A message that no Rekindle process of this job would send."""


class StaleError(ProtocolError):
    """A message of an earlier generation or attempt; it is refused (fencing)."""


class CheckpointError(RekindleError):
    """A checkpoint that cannot be written or used."""


class CorruptError(CheckpointError):
    """Bytes that are not what their writer wrote."""


class MissingError(CorruptError):
    """A file of a checkpoint that is not there."""


class NewerFormatError(CheckpointError):
    """A checkpoint that a later version of Rekindle wrote.

    This version cannot read it, and must not write over it or remove it.
    """


class SessionError(RekindleError):
    """A training script uses the Session in a way that cannot work."""


# What a command needs besides a light installation: the extra that has each module.
_EXTRAS = {
    "boto3": "s3",
    "botocore": "s3",
    "grpc": "mindcluster",
    "httpx": "prefect",
    "kubernetes": "kubernetes",
    "matplotlib": "prefect",
    "mindspore": "mindspore",
    "prefect": "prefect",
    "pydantic": "prefect",
    "torch": "torch",
    "urllib3": "kubernetes",
}


def extra_of(error: ModuleNotFoundError) -> UsageError:
    """Return the error that names the extra to install. Raises `error`: no extra has the module."""
    module = (error.name or "").partition(".")[0]
    if module not in _EXTRAS:
        raise error
    return UsageError(f"{module} is not installed: pip install 'rekindle[{_EXTRAS[module]}]'")
