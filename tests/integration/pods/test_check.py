"""`rekindle kubernetes check` reports the requirements that a cluster does not meet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cluster import role
from cluster.launch import Simulated

from rekindle.cli import main as cli

pytestmark = pytest.mark.timeout(300)  # a cluster

Object = dict[str, Any]


def checked(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, list[Object]]:
    """Run the check; return its exit status and its findings."""
    with pytest.raises(SystemExit) as exit_:
        cli.main(["kubernetes", "check", *map(str, arguments), "--json"])
    return int(str(exit_.value.code)), json.loads(capsys.readouterr().out)


def states(found: list[Object]) -> dict[str, str]:
    return {each["what"]: each["state"] for each in found if not each["optional"]}


def test_everything_is_there(
    lean: Simulated, space: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The check passes with the rights of the Role in deploy/ only."""
    kubeconfig = role.flows(lean, tmp_path / "flows", space)
    for kind in ("indexed-job", "ascendjob", "volcano-job", "trainjob", "pytorchjob"):
        options = ("--kubeconfig", kubeconfig, "--namespace", space, "--kind", kind)
        status, found = checked(capsys, *options)
        assert status == 0
        assert set(states(found).values()) == {"ok"}, found
        assert states(found)[f"namespace {space}"] == "ok"
        assert {each["what"] for each in found if each["state"] == "missing"} == {"right to nodes"}
    assert lean.get(f"/api/v1/namespaces/{space}/secrets")["items"] == []


def test_a_job_file_is_checked(
    lean: Simulated, space: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The check of a job file does strict dry runs of its objects and checks its requirements."""
    path = tmp_path / "job.yaml"
    path.write_text(
        "name: llama\nscript: train.py\nworking_directory: /app\nnodes: 2\nprocesses_per_node: 8\n"
        "kubernetes:\n  image: example.com/train:1\n  device: example.com/npu\n"
        "  overrides: {spec: {parallelisms: 1}}\n"
    )
    options = ("--kubeconfig", lean.kubeconfig, "--namespace", space)
    status, found = checked(capsys, path, *options)
    wrong = {each["what"]: each["result"] for each in found if each["state"] == "missing"}
    assert status == 1
    assert set(wrong) == {"device example.com/npu", "dry run of Job llama"}
    assert wrong["device example.com/npu"] == "none of 2 nodes has 8"
    assert 'unknown field "spec.parallelisms"' in wrong["dry run of Job llama"]


def test_it_is_told_to_people(
    lean: Simulated, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The text output is a table, followed by advice."""
    options = ("--kubeconfig", str(lean.kubeconfig), "--namespace", "nowhere")
    with pytest.raises(SystemExit, match="1"):
        cli.main(["kubernetes", "check", *options, "--kind", "jobset"])
    output = capsys.readouterr().out
    assert output.splitlines()[0].split() == ["what", "a", "job", "needs", "state", "found"]
    assert "\nnamespace nowhere:\n  kubectl create namespace nowhere\n" in output
    assert "install JobSet" in output


@pytest.mark.parametrize(
    ("arguments", "what", "text"),
    [
        (("--kubeconfig", "/nowhere"), "kubeconfig", "no Kubernetes cluster"),
        (("--context", "other"), "kubeconfig", "other"),
    ],
)
def test_a_wrong_kubeconfig(
    arguments: tuple[str, ...],
    what: str,
    text: str,
    lean: Simulated,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An unusable kubeconfig is a finding with status 1."""
    status, found = checked(capsys, "--kubeconfig", lean.kubeconfig, *arguments)
    assert (status, [each["what"] for each in found]) == (1, [what])
    assert text in found[0]["result"]


def test_a_server_that_is_away(
    lean: Simulated,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the server does not answer, the check ends after a short patience."""
    monkeypatch.setattr("rekindle.cli.kubernetes._PATIENCE_S", 0.2)
    config = tmp_path / "config"
    config.write_text(lean.kubeconfig.read_text().replace(f":{lean.port}", ":1"))
    status, found = checked(capsys, "--kubeconfig", config)
    assert (status, states(found)) == (1, {"server": "missing"})
