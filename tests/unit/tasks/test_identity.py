"""The comparison of a job on this machine with the job that a run asks for."""

from __future__ import annotations

import logging
from pathlib import Path
from uuid import UUID

import pytest
from prefect.client.schemas.objects import FlowRun

from rekindle import names
from rekindle.blocks.job import TrainingJob
from rekindle.errors import UsageError
from rekindle.job.spec import Endpoint, JobDirectory, job_directory
from rekindle.tasks import identity
from rekindle.tasks.identity import LABEL, compare, job_of_this_run, recorded_job

JOB = TrainingJob(script="train.py", arguments=["--lr", "0.1"])
NUMBER = "00000000-0000-0000-0000-00000000000{}"


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobDirectory:
    """Describe the job `a`, as if it had been launched."""
    monkeypatch.setenv("REKINDLE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    directory = JobDirectory(job_directory("a"))
    directory.create(JOB.to_spec("a"))
    directory.announce(Endpoint(host="127.0.0.1", port=1, pid=0, attempt=1))
    return directory


def test_a_job_is_compared_with_its_description(there: JobDirectory) -> None:
    """The fields that differ are named, with those that make another job apart."""
    assert there.path.name == "a"
    other = JOB.model_copy(update={"arguments": ["--lr", "0.2"], "spares": 1})
    assert compare("a", JOB) == ((), ())
    assert compare("a", other) == (("arguments (0.1, now 0.2, at place 2)",), ("spares",))
    assert compare("b", JOB) is None


def test_a_job_that_was_never_launched_is_none(there: JobDirectory) -> None:
    """A description that a launch has refused has no effect."""
    (there.path / names.ENDPOINT_FILE).unlink()
    assert compare("a", JOB) is None


def test_the_description_of_another_version_is_refused_with_the_remedy(
    there: JobDirectory,
) -> None:
    """A field that this version does not know, or an unreadable file, names the job."""
    file = there.path / names.SPEC_FILE
    file.write_text(file.read_text().replace('"nodes":', '"hosts":'))
    with pytest.raises(UsageError, match="end the job with that version"):
        compare("a", JOB)


class NoServer:
    """Accepts the label of a flow run."""

    def __enter__(self) -> NoServer:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update_flow_run_labels(self, flow_run_id: UUID, labels: dict[str, str]) -> None:
        assert list(labels) == [LABEL]


def test_a_subflow_keeps_the_job_that_an_earlier_version_has_launched(
    there: JobDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier id came from the subflow's place in its parent. Another job gets a new id."""
    place, root = UUID(NUMBER.format(3)), UUID(NUMBER.format(4))
    fields = {"flow_id": UUID(NUMBER.format(1)), "id": UUID(NUMBER.format(2))}
    subflow = FlowRun.model_validate(fields | {"parent_task_run_id": place})
    monkeypatch.setattr(identity.jobs, "this_flow_run", lambda job: subflow.model_copy(deep=True))
    monkeypatch.setattr(identity, "get_client", lambda sync_client: NoServer())
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ROOT_FLOW_RUN_ID", str(root))
    monkeypatch.setattr(identity, "get_run_logger", logging.getLogger)
    earlier = f"train-{place.hex[-12:]}"
    assert job_of_this_run(JOB) != earlier  # there is none
    there.path.rename(there.path.with_name(earlier))
    assert job_of_this_run(JOB) == earlier
    other = JOB.model_copy(update={"arguments": ["--lr", "0.2"]})
    assert job_of_this_run(other) not in (earlier, job_of_this_run(JOB))
    assert job_of_this_run(other) == job_of_this_run(other)


def test_the_label_of_a_flow_run_has_its_job() -> None:
    """The label counts; the place of the run is for hooks of runs of an earlier version."""
    run = FlowRun.model_validate({"flow_id": UUID(NUMBER.format(1)), "id": UUID(NUMBER.format(2))})
    assert recorded_job(run.model_copy(update={"labels": {LABEL: "a"}})) == "a"
