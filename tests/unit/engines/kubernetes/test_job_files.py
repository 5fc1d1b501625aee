"""A job file: valid fields, the output of `rekindle kubernetes render`, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from pydantic import ValidationError

from rekindle.blocks.forms import model_of
from rekindle.blocks.job import TrainingJob
from rekindle.cli import main as cli
from rekindle.engines.kubernetes.manifests.ascend import Ascend
from rekindle.engines.kubernetes.manifests.settings import (
    Coordinator,
    KubernetesSettings,
    Peer,
    Volume,
    WorkloadKind,
)
from rekindle.errors import UsageError

JOB = """\
name: charlm
script: train.py
working_directory: /app
nodes: 2
processes_per_node: 4
environment:
  API_KEY: hush
kubernetes:
  image: example.com/train:1
  device: nvidia.com/gpu
"""


def rendered(
    folder: Path, text: str, *options: str, capfd: pytest.CaptureFixture[str]
) -> tuple[int, str, str]:
    """Run the command on a job file; return its status and its output."""
    path = folder / "job.yaml"
    path.write_text(text)
    with pytest.raises(SystemExit) as ended:
        cli.main(["kubernetes", "render", str(path), *options])
    printed = capfd.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, printed.out, printed.err.replace(str(path), "job.yaml")


@pytest.mark.parametrize("kind", [kind.value for kind in WorkloadKind])
def test_all_objects_are_printed_without_secrets(
    kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The output has every object, keys in the usual order, and placeholders for secrets."""
    status, out, _ = rendered(
        tmp_path, JOB, "--kind", kind, "--job-id", "charlm-1", "--avoid", "n7", capfd=capfd
    )
    assert status == 0
    found = list(yaml.safe_load_all(out))
    assert all(list(one)[:3] == ["apiVersion", "kind", "metadata"] for one in found)
    assert found[0]["kind"] == "ConfigMap"
    assert found[-1]["metadata"]["name"] == "charlm-1"
    assert "n7" in out
    assert "hush" not in out
    (secret,) = [one for one in found if one["kind"] == "Secret"]
    assert secret["stringData"] == {"secret": "(hidden)", "job.json": "(hidden)"}
    assert "data" not in secret
    assert "&id" not in out


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (("name: charlm", "name: charlm\nname: x"), "job.yaml:2: name occurs twice; keep one"),
        (("image:", "imag:"), "job.yaml:9: kubernetes.imag: Extra inputs are not permitted"),
        (("nodes: 2", "nodes: 0"), "job.yaml:4: nodes: Input should be greater than or equal to 1"),
        (("nvidia.com/gpu", "gpu"), "job.yaml:10: kubernetes: device is 'gpu'; give a resource"),
        (("/app", "app"), "job.yaml:3: working_directory is 'app'; give an absolute path in"),
        (
            ("/app", "~/app"),
            "job.yaml:3: working_directory is ~/app; Rekindle does not know the home directory",
        ),
        (("script: train.py", "scrip: train.py"), "job.yaml:2: scrip: Extra inputs"),
        (("kubernetes:", "other:"), "job.yaml: the field kubernetes is missing; describe"),
        (("nodes: 2", "nodes: [2"), "is not YAML"),
        (
            ("  device:", "  volumes:\n  - {name: a, mount: /a, claim: a}\n  - name: 3\n  device:"),
            "job.yaml:12: kubernetes.volumes.1.name: Input should be a valid string",
        ),
        (
            ("nodes: 2", "nodes: 2\ncheckpoint: {path: /ckpt, every: 5}"),
            "job.yaml: kubernetes: the job would write checkpoints to /ckpt/charlm in each",
        ),
        (
            ("  device: nvidia.com/gpu", "  pod_overrides: {spec: []}"),
            "job.yaml: kubernetes: pod_overrides: the patch has a list at spec, but",
        ),
        (
            ("  device: nvidia.com/gpu", "  overrides: {spec: {completions: {}}}"),
            "job.yaml: kubernetes: overrides: the patch has a map at spec.completions",
        ),
    ],
)
def test_mistakes_are_told_with_file_line_and_field(
    change: tuple[str, str], text: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The error has the file, the line and the field, and never shows the environment."""
    status, out, err = rendered(tmp_path, JOB.replace(*change), capfd=capfd)
    assert status == 2
    assert text in err
    assert "hush" not in err
    assert not out


def test_a_file_that_is_none(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The command refuses a missing file or a file without fields with one line."""
    status, _, err = rendered(tmp_path, "- a\n", capfd=capfd)
    assert (status, "job.yaml: write fields, for example script: train.py" in err) == (2, True)
    with pytest.raises(SystemExit) as ended:
        cli.main(["kubernetes", "render", str(tmp_path / "none.yaml")])
    assert ended.value.code == 2
    assert "none.yaml: cannot be read (No such file" in capfd.readouterr().err


@pytest.mark.parametrize("values", [KubernetesSettings, Volume, Peer, Coordinator, Ascend])
def test_the_form_has_the_fields_that_the_engine_reads(values: type[msgspec.Struct]) -> None:
    """Form and engine have the same fields with the same defaults in the same order."""
    model = model_of(values, values.__name__)
    assert list(model.model_fields) == list(values.__struct_fields__)
    required = {field.name for field in msgspec.structs.fields(values) if field.required}
    given = dict.fromkeys(required, "x")
    assert msgspec.convert(model(**given).model_dump(), values) == msgspec.convert(given, values)


def test_the_form_refuses_what_the_engine_would() -> None:
    """The form refuses impossible settings of pods before a flow runs."""
    with pytest.raises(ValidationError, match="devices_per_node needs device"):
        job(kubernetes={"image": "x", "devices_per_node": 2})


def job(**changes: Any) -> TrainingJob:
    """Return a job whose nodes are pods."""
    return TrainingJob.model_validate(yaml.safe_load(JOB) | changes)


def test_paths_are_those_of_the_image() -> None:
    """to_spec() does not read files of this machine; the directory is on the coordinator."""
    spec = job(fault_tables="faults.yaml", checkpoint={"path": "ckpt"}).to_spec("charlm-1")
    assert spec.working_directory == "/app"
    assert spec.directory == "/var/lib/rekindle/jobs/charlm-1"
    assert spec.log_directory == "/var/lib/rekindle/jobs/charlm-1/logs"
    assert spec.fault_tables == "/app/faults.yaml"
    assert spec.checkpoint_store == "/app/ckpt/charlm-1"
    assert job().to_spec("charlm-1").checkpoint_store == f"{spec.directory}/checkpoints"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"working_directory": ""}, "working_directory is ''; give an absolute path in the image"),
        (
            {"fault_tables": "~/f.yaml"},
            "fault_tables is ~/f.yaml; Rekindle does not know the home directory",
        ),
        ({"min_nodes": 3}, "min_nodes is 3"),
        ({"checkpoint": {"path": "s3://bucket/p?secret=x"}}, "a location may have .* after the"),
    ],
)
def test_a_description_that_cannot_be(changes: dict[str, Any], text: str) -> None:
    """to_spec() refuses mistakes that it can find without the image."""
    with pytest.raises(UsageError, match=text):
        job(**changes).to_spec("charlm-1")


def test_a_job_of_this_machine_is_as_before(tmp_path: Path) -> None:
    """Without pods, the working directory and the script must exist."""
    with pytest.raises(UsageError, match="does not exist"):
        job(kubernetes=None, working_directory=str(tmp_path / "none")).to_spec("charlm-1")
