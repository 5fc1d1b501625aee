"""A user's flows with recovery hooks only: they record each run in a file, and fail."""

import os
import signal
import sys
from pathlib import Path

from prefect import flow, serve, task

from rekindle.recovery.policy.policy import Policy
from rekindle.tasks.hooks.rerun import recovery_hooks, retry_condition

POLICY = Policy(max_restarts=0, max_reschedules=3)


@flow(**recovery_hooks(POLICY))
def breaks(notes: str, ways: list[str]) -> None:
    """Fail in one of these ways in each run; the last way repeats. `end` completes the run."""
    count = note(notes)
    how = ways[min(count, len(ways)) - 1]
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)
    elif how == "exit":
        os._exit(77)
    elif how == "raise":
        raise ConnectionError(f"the tracker is away, {count}")
    elif how == "wrong":
        raise ValueError("shard 7 is damaged")


@task(retries=5, retry_condition_fn=retry_condition(Policy(max_restarts=2)))
def breaks_in_a_task(notes: str, how: str, times: int) -> None:
    """Raise an error in the first `times` calls."""
    count = note(notes)
    if count <= times:
        if how == "wrong":
            raise ValueError("shard 7 is damaged")
        raise ConnectionError(f"the tracker is away, {count}")


@flow
def with_tasks(folder: str) -> None:
    """Run the task in each of its ways; the last one fails the flow."""
    for name, how, times in (("twice", "raise", 2), ("wrong", "wrong", 100)):
        breaks_in_a_task(f"{folder}/{name}", how, times, return_state=True)
    breaks_in_a_task(f"{folder}/always", "raise", 100)


def note(notes: str) -> int:
    """Record a run in the file; return the number of runs."""
    with Path(notes).open("a") as file:
        file.write(f"{os.getpid()}\n")
    return len(Path(notes).read_text().splitlines())


if __name__ == "__main__":
    serve(
        breaks.to_deployment(sys.argv[1]),
        with_tasks.to_deployment(sys.argv[1]),
        pause_on_shutdown=False,
        print_starting_message=False,
    )
