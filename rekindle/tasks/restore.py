"""Log the step from which a new attempt continues. The job restores its state on its own."""

from __future__ import annotations

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from rekindle.recovery.journal import attempts
from rekindle.recovery.journal.journal import AnyEvent, Checkpointed, CheckpointSkipped, Formed
from rekindle.reporting.event_text import sources_in_words


def resumes(attempt: list[AnyEvent]) -> bool:
    """Return whether this attempt's first generation continues earlier work, or could not."""
    formed = _first_formed(attempt)
    return formed is not None and (formed.step > 0 or bool(_skipped(attempt)))


@task(name="restore", cache_policy=NO_CACHE)
def restore(history: list[AnyEvent]) -> str:
    """Log the checkpoint from which the newest attempt resumes, and the skipped ones."""
    attempt = attempts.newest(history)
    log = get_run_logger()
    for skipped in _skipped(attempt):
        log.warning("The restart skips checkpoint %s: %s", skipped.path, skipped.reason)
    text = describe(history)
    log.info("%s", text)
    return text


def describe(history: list[AnyEvent]) -> str:
    """Return the step and the state from which the newest attempt continues."""
    formed = _first_formed(attempts.newest(history))
    number = attempts.number(history)
    if formed is None or formed.step == 0:
        return f"Attempt {number} begins at step 0"
    source = sources_in_words(formed.sources)
    paths = (e.path for e in history if isinstance(e, Checkpointed) and e.step == formed.step)
    path = next(paths, "")
    where = f" ({path})" if path else ""
    return f"Attempt {number} resumes after step {formed.step}: {source}{where}"


def _first_formed(attempt: list[AnyEvent]) -> Formed | None:
    return next((event for event in attempt if isinstance(event, Formed)), None)


def _skipped(attempt: list[AnyEvent]) -> list[CheckpointSkipped]:
    return [event for event in attempt if isinstance(event, CheckpointSkipped)]
