"""Flows of a user who has nothing but recovery hooks; they note each run in a file, and break."""

import os
import signal
import sys
from pathlib import Path

from prefect import flow, serve, task

from rekindle.recovery.policy import Policy
from rekindle.tasks.recovery_hooks import recovery_hooks, retry_condition

POLICY = Policy(max_reschedules=2)


@flow(**recovery_hooks(POLICY))
def breaks(notes: str, how: str, times: int) -> None:
    """End badly so many times."""
    count = note(notes)
    if count > times:
        return
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)
    elif how == "exit":
        os._exit(77)
    elif how == "wrong":
        raise ValueError("shard 7 is damaged")
    raise ConnectionError(f"the tracker is away, {count}")


@task(retries=5, retry_condition_fn=retry_condition(Policy(max_restarts=2)))
def breaks_in_a_task(notes: str, how: str, times: int) -> None:
    """Raise so many times."""
    count = note(notes)
    if count <= times:
        if how == "wrong":
            raise ValueError("shard 7 is damaged")
        raise ConnectionError(f"the tracker is away, {count}")


@flow
def with_task(notes: str, how: str, times: int) -> None:
    """Run the task."""
    breaks_in_a_task(notes, how, times)


def note(notes: str) -> int:
    """Note that a run has come here; return how many have."""
    with Path(notes).open("a") as file:
        file.write(f"{os.getpid()}\n")
    return len(Path(notes).read_text().splitlines())


if __name__ == "__main__":
    serve(
        breaks.to_deployment(sys.argv[1]),
        with_task.to_deployment(sys.argv[1]),
        pause_on_shutdown=False,
        print_starting_message=False,
    )
