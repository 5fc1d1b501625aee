"""The metrics of a job in training, after a fault, and of the next coordinator."""

from __future__ import annotations

import os
import signal
import socket
import urllib.error
import urllib.request
from pathlib import Path

from jobs import Place
from prometheus_client.parser import text_string_to_metric_families
from waiting import bound_s, wait_until

from rekindle import names

SCRIPT = """
import os, time
import torch
from rekindle.training.torch import Session

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with open(f"pid-{os.environ['RANK']}", "w") as file:
    file.write(str(os.getpid()))
with Session(model=model, optimizer=optimizer, ddp=True) as session:
    for step in session.steps(100_000):
        with step:
            time.sleep(0.02)
            optimizer.zero_grad()
            session.model(torch.ones(2)).sum().backward()
            optimizer.step()
"""


def scraped(port: int) -> dict[str, float]:
    """Return the sums of all metrics by name; empty: nobody listens."""
    address = f"http://{names.LOOPBACK}:{port}/metrics"
    try:
        with urllib.request.urlopen(address, timeout=bound_s()) as page:
            text = page.read().decode()
    except (urllib.error.URLError, ConnectionError):
        return {}
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


def test_the_metrics_follow_the_job(tmp_path: Path) -> None:
    """A recovery is counted, and the next coordinator continues on the same port."""
    with socket.create_server((names.LOOPBACK, 0)) as free:
        port = free.getsockname()[1]
    with Place(tmp_path) as place:
        script = place.script(SCRIPT)
        environment = place.environment({names.ENV_METRICS_LISTEN: str(port)})
        run = place.start("--nproc-per-node", "2", script, env=environment)

        def reaches(steps: float, recoveries: float) -> dict[str, float]:
            found = scraped(port)
            done = found.get("rekindle_steps_finished", 0) > steps
            return found if done and found["rekindle_recoveries_total"] == recoveries else {}

        before = wait_until(lambda: reaches(5, 0), "metrics of a job in training")
        assert before["rekindle_ranks_alive"] == before["rekindle_ranks"] == 2
        os.kill(int((tmp_path / "pid-1").read_text()), signal.SIGKILL)
        after = wait_until(lambda: reaches(0, 1), "the recovery in the metrics")
        assert after["rekindle_recovery_seconds_total"] > 0
        [coordinator] = run.all("coordinator")
        os.kill(coordinator.pid, signal.SIGKILL)
        steps = after["rekindle_steps_finished"]
        last = wait_until(lambda: reaches(steps, 2), "metrics of the next coordinator")
        assert 0 < last["rekindle_goodput_ratio"] <= 1
        run.process.send_signal(signal.SIGINT)
        run.end(130)
