"""The metrics of a job: in training, after a fault, of the next coordinator, in a Prometheus."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from jobs import Place
from prometheus_client.parser import text_string_to_metric_families
from repository import ROOT
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


def free_port() -> int:
    """Return a port on which no process listens now."""
    with socket.create_server((names.LOOPBACK, 0)) as free:
        port: int = free.getsockname()[1]
        return port


def test_the_metrics_follow_the_job(tmp_path: Path) -> None:
    """A recovery is counted, and the next coordinator continues on the same port."""
    port = free_port()
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


PROMETHEUS = os.environ.get("REKINDLE_TEST_PROMETHEUS") or shutil.which("prometheus")
CONFIG = """
global: {{scrape_interval: 1s}}
scrape_configs:
  - job_name: rekindle
    static_configs: [{{targets: ["{target}"]}}]
"""


@contextlib.contextmanager
def prometheus(folder: Path, target: str) -> Iterator[str]:
    """Run a Prometheus that scrapes one address; return the address of its API."""
    (folder / "prometheus.yml").write_text(CONFIG.format(target=target))
    listen = f"{names.LOOPBACK}:{free_port()}"
    options = [f"--config.file={folder / 'prometheus.yml'}", f"--web.listen-address={listen}"]
    options.append(f"--storage.tsdb.path={folder / 'data'}")
    with (folder / "prometheus.log").open("wb") as log:
        running = subprocess.Popen([str(PROMETHEUS), *options], stdout=log, stderr=log)
    try:
        yield f"http://{listen}/api/v1/query"
    finally:
        running.terminate()
        running.wait(bound_s())


def asked(api: str, query: str) -> list[dict[str, Any]]:
    """Return the result of a query; empty also if Prometheus does not answer yet.

    Raises HTTPError: Prometheus refuses the query.
    """
    try:
        with urllib.request.urlopen(
            f"{api}?{urlencode({'query': query})}", timeout=bound_s()
        ) as at:
            found: list[dict[str, Any]] = json.load(at)["data"]["result"]
            return found
    except urllib.error.HTTPError as error:
        if error.code == 503:  # it starts
            return []
        raise
    except (urllib.error.URLError, ConnectionError):
        return []


@pytest.mark.soak
@pytest.mark.skipif(not PROMETHEUS, reason="there is no Prometheus on this machine")
def test_a_prometheus_answers_each_query_of_the_dashboard(tmp_path: Path) -> None:
    """Each query has a value for a job that writes checkpoints and has lost a rank."""
    board = json.loads((ROOT / "deploy" / "grafana" / "rekindle.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    port = free_port()
    with Place(tmp_path) as place, prometheus(tmp_path, f"{names.LOOPBACK}:{port}") as api:
        options = ("--nproc-per-node", "2", "--checkpoint-every", "20")
        environment = place.environment({names.ENV_METRICS_LISTEN: str(port)})
        run = place.start(*options, place.script(SCRIPT), env=environment)
        wait_until(lambda: scraped(port).get("rekindle_steps_finished", 0) > 5, "the job trains")
        os.kill(int((tmp_path / "pid-1").read_text()), signal.SIGKILL)
        for query in queries:
            text = query.replace("$instance", ".*")
            (value, *_) = wait_until(lambda text=text: asked(api, text), f"a value of {text}")
            assert float(value["value"][1]) >= 0
        run.process.send_signal(signal.SIGINT)
        run.end(130)
