"""Log the step from which a new attempt continues. The job restores its state on its own."""

from __future__ import annotations

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from rekindle.recovery.journal import attempts
from rekindle.recovery.journal.journal import AnyEvent
from rekindle.reporting.event_text import resumed_text, skipped_checkpoints


@task(name="restore", cache_policy=NO_CACHE)
def restore(history: list[AnyEvent]) -> str:
    """Log the checkpoint from which the newest attempt resumes, and the skipped ones."""
    attempt = attempts.newest(history)
    log = get_run_logger()
    for skipped in skipped_checkpoints(attempt):
        log.warning("The restart skips checkpoint %s: %s", skipped.path, skipped.reason)
    text = resumed_text(history)
    log.info("%s", text)
    return text
