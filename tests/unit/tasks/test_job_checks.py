"""The checks before a launch that need no server: devices, commands, limits, places."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rekindle.blocks.job import TrainingJob
from rekindle.errors import UsageError
from rekindle.tasks.job_checks import (
    checks_of_job,
    checks_of_retraining,
    count_devices,
    is_relative,
    makes_folder,
)
from rekindle.tasks.retraining import Retraining

_SET, _CLONE = (
    "prefect.deployments.steps.set_working_directory",
    "prefect.deployments.steps.git_clone",
)


def job_in(folder: Path, **fields: Any) -> TrainingJob:
    """Return a job with a script in a folder, which writes checkpoints."""
    (folder / "train.py").touch()
    given = {"script": "train.py", "working_directory": str(folder), "checkpoint": {"every": 5}}
    return TrainingJob.model_validate(given | fields)


def mistakes(job: TrainingJob, around: Retraining | None = None) -> dict[str, str]:
    """Return the fields with a mistake, and the text of each."""
    found = {}
    checks = [*checks_of_job(job, "job", "")]
    checks += [] if around is None else checks_of_retraining(job, around)
    for field, look in checks:
        try:
            look()
        except UsageError as error:
            found[field] = str(error)
    return found


def test_a_job_without_a_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No check complains, and none leaves a file or a folder."""
    monkeypatch.setenv("REKINDLE_HOME", str(tmp_path / "home"))
    assert mistakes(job_in(tmp_path), Retraining(evaluate=["sh", "-c", "true"])) == {}
    assert [each.name for each in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.parametrize(
    ("field", "job", "around"),
    [
        ("job", {"script": "no.py"}, {}),
        ("job.module", {"script": "", "module": "no_such.thing"}, {}),
        ("job.fault_tables", {"fault_tables": "no.toml"}, {}),
        ("job.checkpoint.path", {"checkpoint": {"path": "/proc/none", "every": 1}}, {}),
        ("job.checkpoint.every", {"checkpoint": {}}, {}),
        ("around.prepare", {}, {"prepare": ["./none"]}),
        ("around.evaluate", {}, {"evaluate": ["no-such-program"]}),
        ("around", {}, {"at_most": {"loss": 1.0}}),
        ("around", {}, {"at_most": {"loss": float("nan")}, "evaluate": ["true"]}),
        ("around.publish_to", {}, {"publish_to": "train.py"}),
    ],
)
def test_each_mistake_names_its_field(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    field: str,
    job: dict[str, Any],
    around: dict[str, Any],
) -> None:
    """Only that field has an error."""
    monkeypatch.setenv("REKINDLE_HOME", str(tmp_path / "home"))
    found = mistakes(job_in(tmp_path, **job), Retraining.model_validate(around))
    assert list(found) == [field]


def test_a_module_of_the_working_directory_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks start there, so Python finds it, also in a package."""
    monkeypatch.setenv("REKINDLE_HOME", str(tmp_path / "home"))
    (tmp_path / "mine").mkdir()
    for module in ("train", "mine.train"):
        assert mistakes(job_in(tmp_path, script="", module=module)) == {}


def test_devices_that_ranks_see(tmp_path: Path) -> None:
    """A variable with devices has priority over the files of the driver."""
    for name in ("nvidia0", "nvidia1", "nvidiactl", "davinci7"):
        (tmp_path / name).touch()
    assert count_devices({}, tmp_path) == 2
    assert count_devices({"CUDA_VISIBLE_DEVICES": "0,1,2"}, tmp_path) == 3
    assert count_devices({"ASCEND_RT_VISIBLE_DEVICES": "4"}, tmp_path) == 1
    assert count_devices({}, tmp_path / "none") == 0


@pytest.mark.parametrize(
    ("steps", "makes"),
    [(None, False), ([], False), ([{_SET: {}}], False), ([{_CLONE: {}}], True)],
)
def test_pull_steps_that_make_a_folder(steps: list[dict[str, Any]] | None, makes: bool) -> None:
    """A clone is removed after the run. A working directory that is set stays."""
    assert makes_folder(steps) is makes


def test_relative_places() -> None:
    """An absolute path, a home directory and a URL do not depend on the working directory."""
    assert is_relative("published")
    assert not any(map(is_relative, ("", "/data", "~/data", "s3://bucket/prefix")))
