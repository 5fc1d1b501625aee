"""The comparison of a job on this machine with the job that a run asks for."""

from __future__ import annotations

import logging
from pathlib import Path
from uuid import UUID

import msgspec
import pytest
from prefect.client.schemas.objects import FlowRun, TaskRun
from prefect.exceptions import ObjectNotFound

from rekindle import names
from rekindle.blocks.job import TrainingJob
from rekindle.errors import UsageError
from rekindle.job.spec import Endpoint, JobDirectory, job_directory
from rekindle.recovery.journal.journal import Ended, JobStarted
from rekindle.tasks import identity
from rekindle.tasks.identity import (
    LABEL,
    Call,
    compare,
    job_of_this_run,
    note_result,
    recorded_job,
)

JOB = TrainingJob(script="train.py", arguments=["--lr", "0.1"])
NUMBER = "00000000-0000-0000-0000-00000000000{}"
FLOW, ROOT = UUID(NUMBER.format(1)), UUID(NUMBER.format(4))


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
        assert LABEL in labels

    def read_task_run(self, task_run_id: UUID) -> TaskRun:
        of = {"flow_run_id": ROOT, "task_key": "train", "dynamic_key": "0"}
        return TaskRun.model_validate(of)

    def read_flow_run(self, flow_run_id: UUID) -> FlowRun:
        return FlowRun.model_validate({"flow_id": FLOW, "id": flow_run_id, "run_count": 1})


def test_a_subflow_keeps_the_job_that_an_earlier_version_has_launched(
    there: JobDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier id came from the subflow's place in its parent. Another job gets a new id."""
    place = UUID(NUMBER.format(3))
    subflow = FlowRun.model_validate(
        {"flow_id": FLOW, "id": UUID(NUMBER.format(2)), "parent_task_run_id": place}
    )
    monkeypatch.setattr(identity.jobs, "this_flow_run", lambda job: subflow.model_copy(deep=True))
    monkeypatch.setattr(identity, "get_client", lambda sync_client: NoServer())
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ROOT_FLOW_RUN_ID", str(ROOT))
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


def end_with(directory: JobDirectory, outcome: str) -> None:
    """Write a journal with one attempt that has ended."""
    begun = JobStarted(job_id="a", attempt=1, nodes=1, processes_per_node=1, pid=1, seq=1)
    ended = Ended(outcome=outcome, reason="", finished=1, seq=2)
    lines = [msgspec.json.encode(event) for event in (begun, ended)]
    directory.journal_file.write_bytes(b"\n".join(lines) + b"\n")


@pytest.fixture
def this_run(there: JobDirectory, monkeypatch: pytest.MonkeyPatch) -> FlowRun:
    """Be a flow run without parent that has launched the job `a`."""
    assert there.path.name == "a"
    run = FlowRun.model_validate({"flow_id": FLOW, "name": "one"})
    run.parameters = {"job": JOB.model_dump(mode="json")}
    (there.path / names.CALLERS_FILE).write_text(f"launched {run.id}\n")
    monkeypatch.setattr(identity.jobs, "this_flow_run", lambda job: run)
    monkeypatch.setattr(identity, "get_client", lambda sync_client: NoServer())
    monkeypatch.setattr(identity, "get_run_logger", logging.getLogger)
    return run


def test_a_renamed_run_keeps_its_job(this_run: FlowRun) -> None:
    """A person renames a run between two attempts; another text gives another job."""
    named = JOB.model_copy(update={"job_id": "x-{flow_run.name}"})
    assert job_of_this_run(named) == "x-one"
    this_run.name = "two"
    assert job_of_this_run(named) == "x-one"
    assert job_of_this_run(named.model_copy(update={"job_id": "y-{flow_run.name}"})) == "y-two"


def test_a_run_keeps_its_living_job_when_a_block_gives_another_id(
    there: JobDirectory, this_run: FlowRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second job would use the same devices. After the end the new id counts."""
    this_run.labels = {LABEL: "a"}
    given = JOB.model_copy(update={"job_id": "b"})
    monkeypatch.setattr(TrainingJob, "filled_in", lambda self: given)
    assert job_of_this_run(JOB) == "a"
    end_with(there, "failed")
    assert job_of_this_run(JOB) == "b"


def test_a_deleted_parent_does_not_fail_a_job_that_has_succeeded(
    there: JobDirectory, this_run: FlowRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call is noted without its parent."""

    def deleted(self: NoServer, task_run_id: UUID) -> TaskRun:
        raise ObjectNotFound(KeyError(task_run_id))

    monkeypatch.setattr(NoServer, "read_task_run", deleted)
    this_run.parent_task_run_id = UUID(NUMBER.format(3))
    note_result("a")
    noted = (there.path / names.CALLERS_FILE).read_text().splitlines()
    assert noted[-1] == f"result {this_run.id} - - - -"


def test_calls_repeat_each_other_or_not() -> None:
    """Another call is another flow run in the same run of the same parent, not a task's retry."""
    first = Call("run-1", "parent", "1", "task-1", "1")
    assert first.repeats(first)
    assert not first._replace(flow_run="run-2").repeats(first)
    assert not first._replace(flow_run="run-2", task="task-2").repeats(first)
    assert not first._replace(flow_run="run-2", task="-", task_run="-").repeats(first)
    alone = Call("run-1", "-", "-", "-", "-")
    assert alone._replace(flow_run="run-2").repeats(alone)
    assert first._replace(flow_run="run-2", task_run="2").repeats(first)
    assert first._replace(flow_run="run-2", parent_run="2", task="task-2").repeats(first)
