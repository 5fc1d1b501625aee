"""Every error that Rekindle raises for its user.

    RekindleError
    ├── UsageError            a command line, a job description or a call that cannot work
    ├── JobError              a job that ended without success, or cannot be steered
    │   ├── LeaseHeldError    another process steers this job
    │   ├── JobFailedError    the job ended in failure; carries the reason shown to people
    │   └── RejectedError     what was trained is not good enough to be published
    ├── ProtocolError         a message that no Rekindle process would send
    │   └── StaleError        a message of an earlier generation or attempt (fencing)
    ├── CheckpointError       a checkpoint that cannot be written or used
    │   └── CorruptError      bytes that are not what their writer wrote
    │       └── MissingError  a file of a checkpoint that is not there
    └── SessionError          a training script that uses Session wrongly

Faults of a training run are values (`rekindle.recovery.faults.fault.Fault`), not exceptions.
"""


class RekindleError(Exception):
    """Base of all errors that Rekindle raises on purpose."""


class UsageError(RekindleError):
    """A command line, job description or call that cannot work as given."""


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


class NewerFormatError(CorruptError):
    """A checkpoint that a later version of Rekindle wrote: it cannot be read, nor written over."""


class MissingError(CorruptError):
    """A file of a checkpoint that is not there."""


class SessionError(RekindleError):
    """A training script uses the Session in a way that cannot work."""
