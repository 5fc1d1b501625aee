"""A flow of your own with Rekindle's recovery hooks: deploy it to a pool of process workers.

prefect work-pool create local --type process
python examples/own_flow/nightly.py
prefect worker start --pool local
prefect deployment run nightly/own

Kill the process of the flow run. The hooks schedule the run again, at most three times.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from prefect import flow, task

from rekindle import Policy, recovery_hooks, retry_condition


@task(retries=5, retry_condition_fn=retry_condition(Policy(max_restarts=3)))
def evaluate(attempts: Path) -> int:
    """Fail at first, as a metric service that is away, and then return the number of calls."""
    calls = len(attempts.read_text().splitlines()) if attempts.exists() else 0
    with attempts.open("a") as file:
        file.write(f"{os.getpid()}\n")
    if calls == 0:
        raise ConnectionError("the metric service is away")
    return calls


@flow(**recovery_hooks(Policy(max_reschedules=3)))
def nightly(folder: str, seconds: float = 60.0) -> int:
    """Evaluate something that takes a while."""
    started = Path(folder, "started")
    again = started.exists()
    started.write_text(str(os.getpid()))
    if not again:
        time.sleep(seconds)  # kill the process now
    return evaluate(Path(folder, "calls"))


if __name__ == "__main__":
    here = Path(__file__).resolve()
    nightly.from_source(str(here.parent), f"{here.name}:nightly").deploy(
        name="own", work_pool_name="local"
    )
