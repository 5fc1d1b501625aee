"""Define every error that Rekindle raises for its user.

    RekindleError                 a command that ends with it has status 1
    ├── UsageError                status 2
    │   ├── OtherJobError
    │   └── PortTakenError
    ├── JobError
    │   ├── UnansweredError
    │   │   └── SilentError
    │   ├── LeaseHeldError
    │   ├── OtherVersionError
    │   ├── DevicesHeldError
    │   ├── JobFailedError
    │   ├── RecordLostError
    │   ├── HopelessError
    │   ├── RejectedError
    │   ├── DamagedError          engines.kubernetes.client.api_errors
    │   ├── ApiError              engines.kubernetes.client.api_errors
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
    │   └── S3Error               checkpoints.s3.request_failures
    ├── SessionError
    ├── CheckerError              agent.checkers
    ├── DcmiError                 agent.devices.dcmi
    │   └── NoDcmiError
    ├── SkippedStepError          training.torch.guard
    ├── UnexpectedError
    ├── UnknownLoopError          cli.adapt.training
    ├── SupersededError           tasks.run_watch
    ├── OverruledError            tasks.run_watch
    └── UnusableError             rank.member

Other exception classes derive from a library's exception, for code that catches both: a
ConnectionError, a RuntimeError of a framework, a ValueError that msgspec converts.
Faults of a training run are values (`rekindle.recovery.faults.fault.Fault`), not exceptions.
"""

# The extra that installs each module. A light installation has none of these modules.
_EXTRAS = {
    "boto3": "s3",
    "botocore": "s3",
    "grpc": "mindcluster",
    "httpx": "prefect",
    "kubernetes": "kubernetes",
    "libcst": "adapt",
    "matplotlib": "prefect",
    "mindspore": "mindspore",
    "prefect": "prefect",
    "pydantic": "prefect",
    "torch": "torch",
    "urllib3": "kubernetes",
}


class RekindleError(Exception):
    """The base class of all errors that Rekindle raises on purpose."""

    exit_status = 1


class UsageError(RekindleError):
    """A command line, job description or call that is invalid."""

    exit_status = 2


class OtherJobError(UsageError):
    """The id that a job asks for belongs to a job with another description."""


class PortTakenError(UsageError):
    """The address of a coordinator has a server already."""


class JobError(RekindleError):
    """A job that failed, or that this process cannot reach or steer."""


class UnansweredError(JobError):
    """A job's coordinator did not receive a request: it is down or unreachable."""


class SilentError(UnansweredError):
    """A job's coordinator does not answer a request in time: it hangs, or its host is gone."""


class LeaseHeldError(JobError):
    """Another process steers this job; only one process may steer a job."""


class OtherVersionError(JobError):
    """A job of another version of Rekindle, which this version cannot steer. The job continues."""

    @classmethod
    def of(cls, what: str, theirs: object, ours: object) -> "OtherVersionError":
        """Return the error for processes with another wire version. what: the processes."""
        return cls(
            f"{what} has the wire version {theirs}, and this Rekindle has {ours}. The job "
            "continues. Steer it with the Rekindle that started it; or stop it with `rekindle "
            "stop`, and retry"
        )


class DevicesHeldError(JobError):
    """Another job holds a device of this machine that the job needs."""


class JobFailedError(JobError):
    """The job ended in failure."""


class RecordLostError(JobError):
    """A job has succeeded, but another machine has its record, or the record was removed."""


class HopelessError(JobError):
    """The job's pods cannot run as described."""


class RejectedError(JobError):
    """The trained model is not good enough to be published."""


class ProtocolError(RekindleError):
    """A message that no Rekindle process of this job sends."""


class StaleError(ProtocolError):
    """A message of an earlier generation or attempt; the receiver refuses it (fencing)."""


class CheckpointError(RekindleError):
    """A checkpoint that Rekindle cannot write or use."""


class CorruptError(CheckpointError):
    """Bytes that differ from the bytes that their writer wrote."""


class MissingError(CorruptError):
    """A missing file of a checkpoint."""


class NewerFormatError(CheckpointError):
    """A checkpoint that a later version of Rekindle wrote.

    This version cannot read it, and must not overwrite or remove it.
    """


class SessionError(RekindleError):
    """A training script uses the Session in an invalid way."""


class UnexpectedError(RekindleError):
    """An error that no code expects, most likely a bug in Rekindle. It ends the process."""

    exit_status = 70  # differs from the statuses of a job


def extra_of(error: ModuleNotFoundError) -> UsageError:
    """Return the error that names the extra to install.

    Raises `error`: no extra has the module.
    """
    module = (error.name or "").partition(".")[0]
    if module not in _EXTRAS:
        raise error
    return UsageError(f"{module} is not installed: pip install 'rekindle[{_EXTRAS[module]}]'")
