"""Pods whose agents cannot read the checkpoint store."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster.launch import Simulated
from training_jobs.pods import PodJob

from rekindle.recovery.journal import journal

pytestmark = pytest.mark.timeout(300)  # a cluster


def test_the_job_fails_at_once_with_the_reason(
    cluster: Simulated, namespace: str, tmp_path: Path
) -> None:
    """The end of the job and the output of a pod have the store's own error."""
    (tmp_path / "loop").symlink_to("loop")
    store = str(tmp_path / "loop" / "store")
    job = PodJob(tmp_path, cluster, namespace=namespace, checkpoint_store=store)
    try:
        job.start()
        assert f"cannot read {store}" in job.end().reason
        assert not job.events_of(journal.NodeJoined)
        logs = job.directory.path / "logs"

        def printed() -> bool:
            line = f"rekindle agent: cannot read {store}"
            return any(line in file.read_text() for file in logs.glob("*.log"))

        job.wait(printed, "the agent's line")
        job.remove()
    finally:
        job.close()
