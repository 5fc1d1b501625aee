"""Pods that cannot use a file of the job: its checkpoint store, or its fault tables."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cluster.launch import Simulated
from training_jobs.pods import PodJob

from rekindle.errors import JobError
from rekindle.recovery.journal import journal

pytestmark = pytest.mark.timeout(300)  # a cluster


def test_a_store_that_no_agent_can_read(cluster: Simulated, namespace: str, tmp_path: Path) -> None:
    """The job fails immediately; its end and the output of a pod have the store's own error."""
    (tmp_path / "loop").symlink_to("loop")
    store = str(tmp_path / "loop" / "store")
    job = PodJob(tmp_path, cluster, namespace=namespace, checkpoint_store=store)
    try:
        job.start()
        assert f"cannot read {store}" in job.end().reason
        assert not job.events_of(journal.NodeJoined)
        logs = job.directory.path / "logs"

        def printed() -> bool:
            line = re.compile(rf"Z ERROR agent.*: cannot read {re.escape(store)}")
            return any(line.search(file.read_text()) for file in logs.glob("*.log"))

        job.wait(printed, "the agent's line")
        job.remove()
    finally:
        job.close()


def test_tables_of_faults_that_the_image_lacks(
    cluster: Simulated, namespace: str, tmp_path: Path
) -> None:
    """The coordinator refuses to start; the launch fails with its reason and leaves no object."""
    tables = str(tmp_path / "own.toml")
    job = PodJob(tmp_path, cluster, namespace=namespace)
    try:
        with pytest.raises(JobError, match=r"refuses: .*own\.toml"):
            job.start(fault_tables=tables)
        assert job.objects() == []
    finally:
        job.close()
