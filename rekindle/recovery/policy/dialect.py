"""Know whose rules a policy follows: the only place that names the dialects. Pure.

Sources: ModelArts, "fault recovery of training jobs" (annotations `fault-tolerance/...`);
MindCluster's resumable training (labels and annotations of an AscendJob or Volcano Job).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from rekindle.errors import UsageError

MODELARTS_PREFIX = "fault-tolerance/"
JOB_RETRY_NUM = f"{MODELARTS_PREFIX}job-retry-num"
UNCONDITIONAL_RETRY = f"{MODELARTS_PREFIX}job-unconditional-retry"
HANG_RETRY = f"{MODELARTS_PREFIX}hang-retry"
POD_RETRY_NUM = f"{MODELARTS_PREFIX}pod-retry-num"
OF_MODELARTS = (JOB_RETRY_NUM, UNCONDITIONAL_RETRY, HANG_RETRY, POD_RETRY_NUM)

PROCESS_RECOVER = "process-recover-enable"
FAULT_SCHEDULING = "fault-scheduling"
FAULT_RETRY_TIMES = "fault-retry-times"
POD_RESCHEDULING = "pod-rescheduling"
RECOVER_STRATEGY = "recover-strategy"
WAIT_RESCHEDULE = "wait-reschedule-timeout"
OF_MINDCLUSTER = (
    *(PROCESS_RECOVER, FAULT_SCHEDULING, FAULT_RETRY_TIMES, POD_RESCHEDULING),
    *(RECOVER_STRATEGY, WAIT_RESCHEDULE),
)
SCHEDULING = ("grace", "force", "off", "external-grace", "external-force")  # FAULT_SCHEDULING


class Dialect(str, enum.Enum):
    """Name the platforms whose rules judge fault codes that repeat, and codes without an entry.

    Without a platform the rules of ModelArts' document apply.
    """

    NONE = "none"
    MODELARTS = "modelarts"
    MINDCLUSTER = "mindcluster"


def dialect_of(keys: Iterable[str]) -> Dialect:
    """Return the dialect of the labels and annotations of one object.

    Raises UsageError: the keys name both platforms. Both would recover the same fault.
    """
    given = list(keys)
    of_modelarts = [key for key in given if key.startswith(MODELARTS_PREFIX)]
    of_mindcluster = [key for key in given if key in OF_MINDCLUSTER]
    if of_modelarts and of_mindcluster:
        raise UsageError(
            f"{of_modelarts[0]} is of ModelArts and {of_mindcluster[0]} of MindCluster, and their "
            "rules contradict each other; keep those of one platform"
        )
    if of_modelarts:
        return Dialect.MODELARTS
    return Dialect.MINDCLUSTER if of_mindcluster else Dialect.NONE
