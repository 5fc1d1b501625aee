"""A job that has succeeded has a record in Prefect, with the description that was trained."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prefect.client.schemas.objects import Artifact

from rekindle.blocks.job import TrainingJob
from rekindle.engines.kubernetes.manifests.settings import KubernetesSettings
from rekindle.errors import OtherJobError, RecordLostError
from rekindle.job.spec import Endpoint, JobDirectory, job_directory
from rekindle.recovery.journal.journal import Ended, JobStarted
from rekindle.tasks import launch, report
from rekindle.tasks.report import JobResult, record_result, refuse_lost

JOB = TrainingJob(script="train.py", arguments=["--lr", "0.1"])
OTHER = JOB.model_copy(update={"arguments": ["--lr", "0.2"]})
RESULT = JobResult("a", "succeeded", "", 9, 1, 0, 1.0, [], "report.md", "timeline.png")


class Artifacts:
    """Keeps artifacts, the newest first."""

    def __init__(self) -> None:
        self.kept: list[Artifact] = []

    def __enter__(self) -> Artifacts:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def read_artifacts(self, **_: object) -> list[Artifact]:
        return self.kept

    def add(self, rows: object, **_: object) -> None:
        self.kept.insert(0, Artifact(data=json.dumps(rows)))


@pytest.fixture
def artifacts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Artifacts:
    """Answer for Prefect."""
    monkeypatch.setenv("REKINDLE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    kept = Artifacts()
    monkeypatch.setattr(report, "get_client", lambda sync_client: kept)
    monkeypatch.setattr(report, "create_table_artifact", kept.add)
    return kept


def launched(*outcomes: str) -> JobDirectory:
    """Describe the job `a` with one attempt, which has this outcome, or lives."""
    directory = JobDirectory(job_directory("a"))
    directory.create(JOB.to_spec("a"))
    directory.announce(Endpoint(host="127.0.0.1", port=1, pid=0, attempt=1))
    begun = JobStarted(job_id="a", attempt=1, nodes=1, processes_per_node=1, pid=1, seq=1)
    ends = [Ended(outcome=each, reason="", finished=1, seq=2) for each in outcomes]
    lines = [msgspec.json.encode(event) for event in (begun, *ends)]
    directory.journal_file.write_bytes(b"\n".join(lines) + b"\n")
    return directory


def test_an_attempt_that_failed_here_does_not_hide_a_success_elsewhere(
    artifacts: Artifacts,
) -> None:
    """In a pool of two machines a later attempt has succeeded on the other one."""
    launched("succeeded")
    record_result(JOB, RESULT)
    refuse_lost("a", JOB)  # its record is here
    launched("failed")
    with pytest.raises(RecordLostError, match="has succeeded after 9 steps"):
        refuse_lost("a", JOB)
    launched()
    refuse_lost("a", JOB)  # a job that lives is adopted


def test_the_record_describes_what_was_trained(artifacts: Artifacts) -> None:
    """A block has changed while the job lived. A run with the new values gets no such result."""
    directory = launched("succeeded")
    record_result(OTHER, RESULT)
    record_result(OTHER, RESULT)
    assert len(artifacts.kept) == 1
    directory.journal_file.unlink()
    with pytest.raises(OtherJobError):
        refuse_lost("a", OTHER)
    with pytest.raises(RecordLostError):
        refuse_lost("a", JOB)


@pytest.mark.parametrize("data", ["# Results", [{"loss": 1}], {"job_id": "a"}, []])
def test_an_artifact_of_the_user_is_no_record(artifacts: Artifacts, data: Any) -> None:
    """A given id may be such that a flow of the user has the same key."""
    artifacts.kept.append(Artifact(data=data if isinstance(data, str) else json.dumps(data)))
    refuse_lost("a", JOB)
    launched("succeeded")
    record_result(JOB, RESULT)
    assert len(artifacts.kept) == 2


def test_an_interrupted_join_of_a_cluster_is_repeated(
    artifacts: Artifacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the cluster can compare a job that another machine has launched."""
    pods = KubernetesSettings(image="train:1")
    job = JOB.model_copy(update={"kubernetes": pods, "working_directory": "/work"})
    joined: list[str] = []

    def unreachable(job: TrainingJob, directory: JobDirectory, job_id: str) -> None:
        joined.append(job_id)
        launch.describe(job, directory, job_id)
        raise TimeoutError

    monkeypatch.setattr(launch, "refuse_lost", lambda job_id, job: None)
    monkeypatch.setattr(launch, "_join_the_cluster", unreachable)
    monkeypatch.setattr(launch, "get_run_logger", logging.getLogger)
    for _ in range(2):
        with pytest.raises(TimeoutError):
            launch.launch.fn(job, "a", time.sleep)
    assert joined == ["a", "a"]
