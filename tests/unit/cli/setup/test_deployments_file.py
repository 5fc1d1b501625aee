"""The file of deployments, and mistakes in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle.cli.setup.deployments_file import ROOT, SHIPPED, read_deployments
from rekindle.errors import UsageError

TRAIN = "{name: a, entrypoint: rekindle.flows.train.train, work_pool: {name: p}}"
WRONG = {
    "a field that setup does not carry out": (
        "deployments: [{name: a, entrypoint: b, work_pool: {name: p}, concurrency_limit: 1}]",
        "concurrency_limit",
    ),
    "a step that setup does not carry out": (
        "build: [{a: {}}]\ndeployments: []",
        "setup runs no build step",
    ),
    "a pool as a word": ("deployments: [{name: a, entrypoint: b, work_pool: p}]", "work_pool"),
    "a variable without value": ('deployments: [{name: "{{ $NONE }}"}]', "NONE has no value"),
    "another template": ('deployments: [{name: "{{ get-it }}"}]', "write a variable as"),
    "one name twice": (f"deployments: [{TRAIN}, {TRAIN}]", "two deployments named 'a'"),
}


def test_the_shipped_file_has_no_placeholder() -> None:
    """The folder of the jobs is in the pull step, and each schedule is inactive."""
    found = read_deployments(SHIPPED, {ROOT: "/work"})
    assert found.pull == [
        {"prefect.deployments.steps.set_working_directory": {"directory": "/work"}}
    ]
    assert [each.name for each in found.deployments][:2] == ["local", "nightly"]
    assert not any(schedule.active for each in found.deployments for schedule in each.schedules)
    assert all("rekindle" in each.tags for each in found.deployments)


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_is_refused(tmp_path: Path, case: str) -> None:
    """The error names the file and the field."""
    text, message = WRONG[case]
    path = tmp_path / "deployments.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as error:
        read_deployments(path, {})
    assert str(path) in str(error.value)
    assert message in str(error.value)
