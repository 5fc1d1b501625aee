"""Checks of the kustomization in deploy/ and of the Dockerfiles, without a cluster."""

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
    """Return the objects in the files of one kustomization."""
    place = ROOT / "deploy" / folder
    content = yaml.safe_load((place / "kustomization.yaml").read_text())
    listed = content["resources"]
    files = [place / name for name in listed if name.endswith(".yaml")]
    made = {
        name for each in content.get("configMapGenerator", ()) for name in each.get("files", ())
    }
    assert {path.name for path in place.iterdir()} == {f.name for f in files} | made | {
        "kustomization.yaml"
    }
    return [one for path in files for one in yaml.safe_load_all(path.read_text())]


def rights() -> dict[tuple[str, str], set[str]]:
    """Return the verbs that the Role grants to flows, by group and resource."""
    (role,) = [one for one in objects("base") if one["kind"] == "Role"]
    return {
        (group, resource): set(rule["verbs"])
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }


@pytest.mark.parametrize("folder", ["base", "nodes", "mindcluster", "prefect"])
def test_objects_are_sound(folder: str) -> None:
    """Every object has only valid fields, and a name that starts with rekindle."""
    for one in objects(folder):
        assert not wrong_fields(one)
        assert one["metadata"]["name"].startswith("rekindle")


def test_a_flow_run_is_a_pod_as_its_job_needs_it() -> None:
    """The real worker accepts the template of the work pool, and all fields are valid."""
    worker = pytest.importorskip("prefect_kubernetes.worker", reason="needs Python 3.11")
    template = json.loads((ROOT / "deploy" / "prefect" / "base-job-template.json").read_text())
    variables = template["variables"]
    assert not any("anyOf" in each for each in variables["properties"].values())  # form fields
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
    # Otherwise the Job of an evicted pod fails before Prefect schedules its flow run again, and
    # the worker reports the run as crashed.
    assert job["spec"]["podReplacementPolicy"] == "Failed"


def test_the_role_is_the_list_of_rights() -> None:
    """The Role grants exactly the rights that jobs of all kinds need and use."""
    listed: dict[tuple[str, str], set[str]] = {}
    for kind in WorkloadKind:
        # The engine also creates the ConfigMap of MindCluster's own recovery.
        known = kind in (WorkloadKind.ASCENDJOB, WorkloadKind.VOLCANO_JOB)
        settings = {"recovery": "mindcluster"} if known else {}
        for each in (*needed(kind, rendered(kind.value, **settings)), *useful(kind)):
            listed.setdefault((each.group, each.resource), set()).update(each.verbs)
    assert rights() == listed


def test_rights_on_nodes_are_those_of_the_list() -> None:
    """The optional ClusterRole grants exactly the listed rights on nodes."""
    (role,) = [one for one in objects("nodes") if one["kind"] == "ClusterRole"]
    (rule,) = role["rules"]
    assert (rule["resources"], rule["verbs"]) == ([NODES.resource], [*NODES.verbs])


def test_whoever_is_inside_needs_no_proxy() -> None:
    """Inside the cluster, the engine does not need the right to use the service proxy.

    It does not need the right to patch a kind that it never patches.
    """
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
    """The base Role does not allow a flow to create pods, run commands in pods, or list secrets."""
    may = rights()
    assert "create" not in may["", "pods"]
    assert not may["", "secrets"] & {"list", "watch"}
    assert ("", "pods/exec") not in may
    assert not [key for key in may if key[1] == "nodes" or "*" in (*key, *may[key])]


def test_rights_on_nodes_are_to_look_and_to_mark() -> None:
    """The ClusterRole does not allow a flow to create or delete nodes."""
    (role,) = [one for one in objects("nodes") if one["kind"] == "ClusterRole"]
    (rule,) = role["rules"]
    assert (rule["resources"], set(rule["verbs"])) == (["nodes"], {"get", "list", "watch", "patch"})


@pytest.mark.parametrize("name", ["flow", "training"])
def test_dockerfiles_copy_what_is_there(name: str) -> None:
    """All files that a Dockerfile copies exist, and .dockerignore does not exclude them."""
    text = (ROOT / "docker" / f"{name}.Dockerfile").read_text()
    sent = (ROOT / ".dockerignore").read_text().splitlines()
    lines = [line.split()[1:-1] for line in text.splitlines() if line.startswith("COPY ")]
    copied = [source for line in lines for source in line]
    assert copied
    for source in copied:
        assert (ROOT / source).exists()
        assert {f"!{source.removeprefix('./').split('/')[0]}", f"!{source}"} & {*sent}
