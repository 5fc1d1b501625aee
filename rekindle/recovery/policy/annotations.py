"""Convert policies from and to the labels and annotations of ModelArts and MindCluster. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from rekindle.errors import UsageError
from rekindle.recovery.policy.dialect import (
    FAULT_RETRY_TIMES,
    FAULT_SCHEDULING,
    HANG_RETRY,
    JOB_RETRY_NUM,
    MODELARTS_PREFIX,
    OF_MINDCLUSTER,
    OF_MODELARTS,
    POD_RESCHEDULING,
    POD_RETRY_NUM,
    PROCESS_RECOVER,
    RECOVER_STRATEGY,
    SCHEDULING,
    UNCONDITIONAL_RETRY,
    WAIT_RESCHEDULE,
    Dialect,
)
from rekindle.recovery.policy.policy import ALLOWABLE, INNER, JOBS, MOST, Policy, Strategy

UNLIMITED = MOST  # MindCluster has no bound if no limit is given

KNOWN = (*OF_MODELARTS, *OF_MINDCLUSTER)

_MOST_RETRIES = 100
_RECOVERING = {
    "retry": Strategy.RETRY,
    "recover": Strategy.RECOVER,
    "recover-in-place": Strategy.RECOVER_IN_PLACE,
    "elastic-training": Strategy.SHRINK,
    "dump": Strategy.DUMP,
    "exit": Strategy.FAIL,  # always possible
}
_OWN_OF_MODELARTS = (
    Strategy.HANG_RESTART,
    Strategy.RESTART,
    Strategy.RESCHEDULE_POD,
    *JOBS,
)


def from_modelarts(annotations: Mapping[str, str], base: Policy | None = None) -> Policy:
    """Return `base` with the outer strategies of ModelArts' annotations.

    The function ignores annotations other than `fault-tolerance/...`. Raises UsageError: one of
    those is unknown, has an invalid value, or lacks `job-retry-num`.
    """
    own = {key: value for key, value in annotations.items() if key.startswith(MODELARTS_PREFIX)}
    for key in own:
        if key not in OF_MODELARTS:
            raise UsageError(
                f"annotation {key} is unknown; known annotations are {', '.join(OF_MODELARTS)}"
            )
    if own and JOB_RETRY_NUM not in own:
        raise UsageError(f"annotation {next(iter(own))} also needs the annotation {JOB_RETRY_NUM}")
    retries = _number(own, JOB_RETRY_NUM, 1, 128) or 0
    pods = _number(own, POD_RETRY_NUM, 1, 128) or 0
    chosen: set[Strategy] = set()
    if retries:
        chosen = {Strategy.RESTART, *JOBS}
        chosen |= {Strategy.HANG_RESTART} if _flag(own, HANG_RETRY) else set()
        chosen |= {Strategy.RESCHEDULE_POD} if pods else set()
    base = base or Policy()
    return msgspec.structs.replace(
        base,
        strategies=_merge(base.strategies, _OWN_OF_MODELARTS, chosen),
        max_restarts=0,  # ModelArts restarts processes in place only with a reset or after a hang
        max_reschedules=retries,
        max_pod_reschedules=pods,
        unconditional=_flag(own, UNCONDITIONAL_RETRY),
        progress_resets=False,
        device_resets=base.device_resets or bool(retries),  # the recovery in place heals devices
        dialect=Dialect.MODELARTS,
    )


def to_modelarts(policy: Policy) -> dict[str, str]:
    """Return the ModelArts annotations that express as much as possible of this policy.

    All of them need `job-retry-num`, which allows another placement of the job. Raises UsageError:
    the policy does not allow it.
    """
    if not _places_jobs(policy):
        raise UsageError(
            "ModelArts recovers a job only by placing it again; give max_reschedules, and add "
            "reschedule-job or reschedule-job-isolated to the strategies"
        )
    found = {JOB_RETRY_NUM: str(min(policy.max_reschedules, 128))}
    if policy.unconditional and Strategy.RESCHEDULE_JOB in policy.strategies:
        found[UNCONDITIONAL_RETRY] = "true"
    if Strategy.HANG_RESTART in policy.strategies:
        found[HANG_RETRY] = "true"
    if Strategy.RESCHEDULE_POD in policy.strategies and policy.max_pod_reschedules:
        found[POD_RETRY_NUM] = str(min(policy.max_pod_reschedules, 128))
    return found


def from_mindcluster(
    labels: Mapping[str, str],
    annotations: Mapping[str, str],
    *,
    backoff_limit: int | None = None,
) -> Policy:
    """Return the policy that MindCluster's labels and annotations describe.

    `backoff_limit` is `runPolicy.backoffLimit` of the job. As in MindCluster, None or a value below
    1 means unlimited. The smaller of this limit and `fault-retry-times` bounds the reschedules.
    Raises UsageError: MindCluster does not accept the value of a label or annotation.
    """
    base = Policy(strategies=())
    process = _recovers_processes(labels, annotations)
    scheduling = _choice(labels, FAULT_SCHEDULING, SCHEDULING, "off")
    retries = _number(labels, FAULT_RETRY_TIMES, 0, _MOST_RETRIES)
    inner = _recovering(annotations)
    chosen = set(inner) if process else set()
    if scheduling != "off":
        chosen |= {*JOBS}
        if labels.get(POD_RESCHEDULING) == "on":
            chosen.add(Strategy.RESCHEDULE_POD)
    backoff = backoff_limit if backoff_limit and backoff_limit > 0 else UNLIMITED
    limit = min(backoff, retries or UNLIMITED)
    wait_s = _number(annotations, WAIT_RESCHEDULE, 30, 270)
    own = (*INNER, *_OWN_OF_MODELARTS[2:], Strategy.DUMP)
    return msgspec.structs.replace(
        base,
        strategies=_merge(base.strategies, own, chosen),
        max_reschedules=limit if scheduling != "off" else 0,
        max_pod_reschedules=limit if Strategy.RESCHEDULE_POD in chosen else 0,
        unconditional=bool(retries),
        max_reschedules_in_row=limit if retries else base.max_reschedules_in_row,
        node_timeout_s=float(wait_s) if wait_s else base.node_timeout_s,
        dialect=Dialect.MINDCLUSTER,
    )


def notices(labels: Mapping[str, str], annotations: Mapping[str, str]) -> list[str]:
    """Return a sentence about each label or annotation of MindCluster with a result that surprises.

    Raises UsageError: the value of a label is unknown.
    """
    if RECOVER_STRATEGY not in annotations:
        return []
    if not _recovers_processes(labels, annotations):
        return [
            f"{RECOVER_STRATEGY} has no effect, because {PROCESS_RECOVER} is "
            f"{labels[PROCESS_RECOVER]}"
        ]
    if PROCESS_RECOVER not in labels:
        return [
            f"{RECOVER_STRATEGY} applies without the label {PROCESS_RECOVER}, as in MindCluster "
            "7.2 and later; earlier versions need the label with the value on"
        ]
    return []


def _recovers_processes(labels: Mapping[str, str], annotations: Mapping[str, str]) -> bool:
    """Return whether `recover-strategy` applies: from MindCluster 7.2 it switches itself on."""
    absent = "on" if RECOVER_STRATEGY in annotations else "off"
    return _choice(labels, PROCESS_RECOVER, ("on", "pause", "off"), absent) == "on"


def to_mindcluster(policy: Policy) -> tuple[dict[str, str], dict[str, str], int | None]:
    """Return MindCluster labels, annotations and `runPolicy.backoffLimit` for this policy.

    The result expresses as much of the policy as possible. MindCluster recovers processes only if
    it may also place the job again. If the policy does not allow that, the limit is one placement.
    One limit applies to all reschedules.
    """
    written = [word for word, strategy in _RECOVERING.items() if strategy in policy.strategies]
    wait_s = min(max(policy.node_timeout_s, 30), 270)
    annotations = {WAIT_RESCHEDULE: f"{wait_s:.0f}"}
    if written:
        annotations[RECOVER_STRATEGY] = ",".join(written)
    jobs = _places_jobs(policy)
    pods = bool(policy.max_pod_reschedules) and Strategy.RESCHEDULE_POD in policy.strategies
    on = bool(written) or jobs or pods
    labels = {
        PROCESS_RECOVER: "on" if written else "off",
        FAULT_SCHEDULING: "force" if on else "off",
    }
    limit = policy.max_reschedules if jobs else policy.max_pod_reschedules if pods else 1
    if jobs and policy.unconditional and Strategy.RESCHEDULE_JOB in policy.strategies:
        limit = min(limit, _MOST_RETRIES)
        labels[FAULT_RETRY_TIMES] = str(limit)
    if pods:
        labels[POD_RESCHEDULING] = "on"
    return labels, annotations, limit if on and limit < UNLIMITED else None


def _places_jobs(policy: Policy) -> bool:
    """Return whether the platform may place the whole job again."""
    return policy.max_reschedules > 0 and any(each in policy.strategies for each in JOBS)


def _merge(
    base: Iterable[Strategy], replaced: Iterable[Strategy], chosen: set[Strategy]
) -> tuple[Strategy, ...]:
    """Return `base` with `chosen` instead of `replaced`, the cheapest first."""
    kept = set(base) - set(replaced)
    return tuple(strategy for strategy in ALLOWABLE if strategy in kept | chosen)


def _recovering(annotations: Mapping[str, str]) -> list[Strategy]:
    """Return the strategies by which MindCluster may recover processes."""
    words = [word.strip() for word in annotations.get(RECOVER_STRATEGY, "").split(",")]
    for word in filter(None, words):
        if word not in _RECOVERING:
            known = ", ".join(_RECOVERING)
            raise UsageError(f"annotation {RECOVER_STRATEGY} has {word!r}; use {known}")
    found = [_RECOVERING[word] for word in words if word]
    return [strategy for strategy in found if strategy is not Strategy.FAIL]


def _number(given: Mapping[str, str], key: str, least: int, most: int) -> int | None:
    """Return a whole number, or None if it is missing.

    Raises UsageError: the value is not a whole number, or it is out of range.
    """
    text = given.get(key)
    if text is None:
        return None
    # int() alone also accepts digits of other scripts, signs and underscores.
    digits = text.isascii() and text.isdigit() and len(text) < 10
    if not (digits and least <= int(text) <= most):
        raise UsageError(f"{key} is {text!r}; give a whole number from {least} to {most}")
    return int(text)


def _flag(given: Mapping[str, str], key: str) -> bool:
    return _choice(given, key, ("true", "false"), "false") == "true"


def _choice(given: Mapping[str, str], key: str, choice: tuple[str, ...], default: str) -> str:
    """Return one of the allowed words. Raises UsageError: the value is another word."""
    word = given.get(key, default)
    if word not in choice:
        raise UsageError(f"{key} is {word!r}; give one of {', '.join(choice)}")
    return word
