"""A user's flows around the train flow: one has a time limit, one continues after a failed call."""

import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from prefect import flow, serve
from prefect.exceptions import FailedRun
from prefect.flows import EntrypointType

from rekindle import TrainingJob, train
from rekindle.flows.rescue import rescue


@flow(timeout_seconds=3600)
def limited(job: dict[str, Any], limit: str) -> str:
    """Train until a time limit, which comes early if a file exists."""

    def shorten() -> None:
        while not Path(limit).exists():
            time.sleep(0.1)
        signal.setitimer(signal.ITIMER_REAL, 0.01)

    threading.Thread(target=shorten, daemon=True).start()
    return train(TrainingJob(**job)).job_id


@flow
def caller(jobs: list[dict[str, Any]]) -> list[str]:
    """Train one job after the other; return how each call ended."""
    ends = []
    for job in jobs:
        try:
            ends.append(train(TrainingJob(**job)).outcome)
        except FailedRun as error:
            ends.append(str(error))
            print(f"The call has failed: {error}", flush=True)
    return ends


if __name__ == "__main__":
    serve(
        limited.to_deployment(sys.argv[1]),
        caller.to_deployment(sys.argv[1]),
        train.to_deployment(sys.argv[1], entrypoint_type=EntrypointType.MODULE_PATH),
        train.to_deployment("nights", entrypoint_type=EntrypointType.MODULE_PATH),
        rescue.to_deployment(sys.argv[1], entrypoint_type=EntrypointType.MODULE_PATH),
        pause_on_shutdown=False,
        print_starting_message=False,
    )
