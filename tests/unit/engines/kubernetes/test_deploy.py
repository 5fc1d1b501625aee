"""The kustomization in deploy/, and the Dockerfiles: what can be told without a cluster."""

from __future__ import annotations

import json
from typing import Any
from uuid import uuid4

import pytest
import yaml
from jsonschema import ValidationError, validate
from prefect.client.schemas.objects import FlowRun
from prefect.utilities.templating import apply_values
from rendered import rendered
from repository import ROOT

from rekindle.engines.kubernetes.manifests.settings import WorkloadKind

pytest.importorskip("kubernetes.client")
from rendered.fields import wrong_fields

from rekindle.engines.kubernetes.preflight.preflight import NODES, needed, useful


def objects(folder: str) -> list[dict[str, Any]]:
    """The objects of one kustomization's own files."""
    place = ROOT / "deploy" / folder
    told = yaml.safe_load((place / "kustomization.yaml").read_text())
    listed = told["resources"]
    files = [place / name for name in listed if name.endswith(".yaml")]
    made = {name for each in told.get("configMapGenerator", ()) for name in each.get("files", ())}
    assert {path.name for path in place.iterdir()} == {f.name for f in files} | made | {
        "kustomization.yaml"
    }
    return [one for path in files for one in yaml.safe_load_all(path.read_text())]


def rights() -> dict[tuple[str, str], set[str]]:
    """What flows may do, by group and resource."""
    (role,) = [one for one in objects("base") if one["kind"] == "Role"]
    return {
        (group, resource): set(rule["verbs"])
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }


@pytest.mark.parametrize("folder", ["base", "nodes", "mindcluster", "prefect"])
def test_objects_are_sound(folder: str) -> None:
    """Every object has only fields that exist, and is named for what it is."""
    for one in objects(folder):
        assert not wrong_fields(one)
        assert one["metadata"]["name"].startswith("rekindle")


def test_a_flow_run_is_a_pod_as_its_job_needs_it() -> None:
    """The work pool's template, as the real worker reads it: every field exists."""
    worker = pytest.importorskip("prefect_kubernetes.worker", reason="needs Python 3.11")
    template = json.loads((ROOT / "deploy" / "prefect" / "base-job-template.json").read_text())
    variables = template["variables"]
    assert not any("anyOf" in each for each in variables["properties"].values())  # in the form
    with pytest.raises(ValidationError, match="'image' is a required property"):
        validate({}, variables)
    values = {"image": "rekindle-flow:1", "node_selector": {"pool": "cpu"}, "env": {"A": "1"}}
    validate(values, variables)
    defaults = {
        name: each["default"] for name, each in variables["properties"].items() if "default" in each
    }
    filled = apply_values(template["job_configuration"], defaults | values)
    configuration = worker.KubernetesWorkerJobConfiguration(**filled)
    configuration.prepare_for_flow_run(FlowRun(flow_id=uuid4(), name="brave-otter"))
    job = configuration.job_manifest
    assert not wrong_fields(job)
    pod = job["spec"]["template"]
    assert pod["metadata"]["labels"]["rekindle.dev/role"] == "flow"
    assert {"name": "A", "value": "1"} in pod["spec"]["containers"][0]["env"]
    assert pod["spec"]["serviceAccountName"] == "rekindle-flows"
    assert pod["spec"]["nodeSelector"] == {"pool": "cpu"}
    assert "tolerations" not in pod["spec"]
    # Else the Job of a pod that is evicted fails before its flow run is scheduled again, and the
    # worker takes the run for crashed.
    assert job["spec"]["podReplacementPolicy"] == "Failed"


def test_the_role_is_the_list_of_rights() -> None:
    """The Role hands out what jobs of all kinds need and use, and no more."""
    listed: dict[tuple[str, str], set[str]] = {}
    for kind in WorkloadKind:
        # Of MindCluster's own recovery, too: its ConfigMap is made as well.
        known = kind in (WorkloadKind.ASCENDJOB, WorkloadKind.VOLCANO_JOB)
        said = {"recovery": "mindcluster"} if known else {}
        for each in (*needed(kind, rendered(kind.value, **said)), *useful(kind)):
            listed.setdefault((each.group, each.resource), set()).update(each.verbs)
    assert rights() == listed


def test_rights_on_nodes_are_those_of_the_list() -> None:
    """The optional ClusterRole as well."""
    (role,) = [one for one in objects("nodes") if one["kind"] == "ClusterRole"]
    (rule,) = role["rules"]
    assert (rule["resources"], rule["verbs"]) == ([NODES.resource], [*NODES.verbs])


def test_whoever_is_inside_needs_no_proxy() -> None:
    """The coordinator is reached directly then; a kind that is never patched needs no right to."""
    wanted = rendered()
    outside, inside = (
        needed(WorkloadKind.INDEXED_JOB, wanted, inside=each) for each in (False, True)
    )
    assert {each.resource for each in outside} - {each.resource for each in inside} == {
        "services/proxy"
    }
    found = needed(WorkloadKind.VOLCANO_JOB, rendered("volcano-job"))
    (workload,) = [each for each in found if each.group == "batch.volcano.sh"]
    assert "patch" not in workload.verbs


def test_flows_may_do_no_more() -> None:
    """By the base's role nobody makes pods, runs commands in them, or lists secrets."""
    may = rights()
    assert "create" not in may["", "pods"]
    assert not may["", "secrets"] & {"list", "watch"}
    assert ("", "pods/exec") not in may
    assert not [key for key in may if key[1] == "nodes" or "*" in (*key, *may[key])]


def test_rights_on_nodes_are_to_look_and_to_mark() -> None:
    """Nobody is let in to make or delete a node."""
    (role,) = [one for one in objects("nodes") if one["kind"] == "ClusterRole"]
    (rule,) = role["rules"]
    assert (rule["resources"], set(rule["verbs"])) == (["nodes"], {"get", "list", "watch", "patch"})


@pytest.mark.parametrize("name", ["flow", "training"])
def test_dockerfiles_copy_what_is_there(name: str) -> None:
    """All that an image is made of is in the repository, and is sent to the builder."""
    text = (ROOT / "docker" / f"{name}.Dockerfile").read_text()
    sent = (ROOT / ".dockerignore").read_text().splitlines()
    lines = [line.split()[1:-1] for line in text.splitlines() if line.startswith("COPY ")]
    copied = [source for line in lines for source in line]
    assert copied
    for source in copied:
        assert (ROOT / source).exists()
        assert f"!{source.removeprefix('./').split('/')[0]}" in sent
