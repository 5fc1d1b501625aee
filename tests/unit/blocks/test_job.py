"""The job description: accepted values, refused values, and the spec that follows from it."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pydantic import ValidationError
from torch.distributed.run import get_args_parser

from rekindle.blocks.forms import of_form, read
from rekindle.blocks.job import FLOW_RUN_FIELDS, TrainingJob, fill_in_job_id
from rekindle.blocks.job_fields import CheckpointDirectory
from rekindle.checkpoints.retention import Retention
from rekindle.cli.main import command_parser
from rekindle.cli.run_spec import read_spec
from rekindle.errors import UsageError
from rekindle.job.spec import EntryKind, Framework, JobSpec
from rekindle.recovery.policy.policy import Policy, Strategy
from rekindle.recovery.policy.policy_file import read_policy


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REKINDLE_HOME", str(tmp_path))


def test_any_program_may_be_the_entry() -> None:
    """The job of document 000 starts a shell script; pods and this machine get the same entry."""
    line = ["scripts/train_start.sh", "/job/code", "/job/output", "pretrain_gpt.py"]
    job = TrainingJob(
        program="bash",
        arguments=line,
        working_directory="/job",
        kubernetes={"image": "i"},
        checkpoint={"path": "s3://bucket/a"},
    )
    spec = job.to_spec("a")
    assert (spec.entry, spec.target, spec.arguments) == (EntryKind.PROGRAM, "bash", tuple(line))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "none is given"),
        ({"script": "a.py", "module": "a"}, "script and module are given"),
        ({"program": "bash", "module": "a"}, "module and program are given"),
        ({"script": "a.py", "nodes": 0}, "greater than or equal to 1"),
        ({"script": "a.py", "processes_per_node": 0}, "greater than or equal to 1"),
        ({"script": "a.py", "snapshot_every": -1}, "greater than or equal to 0"),
        ({"script": "a.py", "node": 2}, "Extra inputs are not permitted"),
        ({"script": "a.py", "checkpoint": {"evry": 5}}, "Extra inputs are not permitted"),
        ({"script": "a.py", "policy": {"strategies": ["restarts"]}}, "recover-in-place"),
        ({"script": "a.py", "policy": {"node_timeout_s": 0}}, "greater than 0"),
        (
            {"script": "a.py", "environment": {"A=B": "1"}},
            "cannot set the environment variable 'A=B'",
        ),
        (
            {"script": "a.py", "environment": {"REKINDLE_PROFILING": "x"}},
            "Rekindle sets REKINDLE_PROFILING",
        ),
        (
            {"script": "a.py", "environment": {"REKINDLE_JOB_ID": "x"}},
            "Rekindle sets REKINDLE_JOB_ID",
        ),
        ({"script": "a.py", "name": "My Job"}, "such as 'my-job'"),
        ({"script": "a.py", "job_id": "My Job"}, "job_id is 'My Job'; use 1 to 63"),
        ({"script": "a.py", "job_id": "a-{flow_run.state}"}, r"choose from \{flow_run.id\}"),
        ({"script": "a.py", "job_id": "a-{name}"}, "use 1 to 63 of a-z 0-9 and -"),
        ({"script": "a.py", "job_id": "a_b"}, "use 1 to 63"),
        (
            {"script": "a.py", "annotations": {"fault-tolerance/job-retry-num": "x"}},
            "fault-tolerance/job-retry-num is 'x'; give a whole number from 1 to 128",
        ),
        (
            {"script": "a.py", "annotations": {"recover-strategi": "retry"}},
            "did you mean recover-strategy",
        ),
        (
            {"script": "a.py", "annotations": {"recover-strategy": "retry", "app": "x"}},
            "app does not concern recovery; remove it",
        ),
        (
            {
                "script": "a.py",
                "annotations": {"recover-strategy": "retry"},
                "policy": {"max_restarts": 1},
            },
            "annotations and policy exclude each other",
        ),
        (
            {
                "script": "a.py",
                "annotations": {"recover-strategy": "retry"},
                "saved_policy": "careful",
            },
            "annotations and saved_policy exclude each other",
        ),
    ],
)
def test_a_wrong_description_is_refused_with_the_reason(fields: dict[str, Any], text: str) -> None:
    """TrainingJob refuses each wrong field, and the error states the reason."""
    with pytest.raises(ValidationError, match=text):
        TrainingJob.model_validate(fields)


def test_a_job_id_contains_fields_of_the_flow_run() -> None:
    """The values become valid in a job id; a run without the field is refused."""
    values = dict.fromkeys(FLOW_RUN_FIELDS, "") | {"name": "Calm Owl", "root_id": "12ab"}
    template = "lm-{flow_run.name}-{flow_run.root_id}"
    assert fill_in_job_id(template, values) == "lm-calm-owl-12ab"
    with pytest.raises(UsageError, match="this flow run has no deployment_id"):
        fill_in_job_id("lm-{flow_run.deployment_id}", values)


def test_every_field_is_explained() -> None:
    """All fields of the form, including the nested fields, have a description."""
    schema = TrainingJob.model_json_schema()
    models = [schema, *schema["$defs"].values()]
    silent = [
        f"{model['title']}.{name}"
        for model in models
        for name, field in model["properties"].items()
        if "description" not in field
    ]
    assert not silent


_LIMITS = {"enum", "minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"}
FORMS = (
    "blocks.job:TrainingJob",
    "tasks.retraining:Retraining",
    "blocks.saved:SavedCluster",
    "blocks.saved:SavedStore",
    "blocks.saved:SavedPolicy",
)


@pytest.mark.parametrize("form", FORMS)
def test_every_description_names_the_allowed_values(form: str) -> None:
    """The description of each number with limits, and of each choice, names what it takes."""
    module, _, name = form.partition(":")
    schema = getattr(importlib.import_module(f"rekindle.{module}"), name).model_json_schema()
    silent = []
    for model in (schema, *schema.get("$defs", schema.get("definitions", {})).values()):
        for name, field in model["properties"].items():
            kinds = [field, *field.get("anyOf", []), field.get("items", {})]
            if any(_LIMITS & kind.keys() for kind in kinds) and "Allowed: " not in str(
                field.get("description")
            ):
                silent.append(f"{model['title']}.{name}")
    assert not silent


def test_strategies_are_choices_in_the_form() -> None:
    """Prefect shows a list for the strategies, and a person's order of choices stays."""
    fields = TrainingJob.model_json_schema()["$defs"]["Policy"]["properties"]
    for name in ("strategies", "approve"):
        assert "retry" in fields[name]["items"]["enum"]
    given = {"script": "a.py", "policy": {"strategies": ["restart", "retry"]}}
    policy = TrainingJob.model_validate(given).policy
    assert policy.strategies == (Strategy.RESTART, Strategy.RETRY)
    wrong = {"script": "a.py", "policy": {"strategies": ["retri"]}}
    with pytest.raises(UsageError, match=r"job.policy.strategies.0: choose from retry, recover-in"):
        read(TrainingJob, wrong, "job")


def test_blocks_are_picked_in_the_form() -> None:
    """Prefect shows a list of the blocks for a field with the slug of their type."""
    fields = TrainingJob.model_json_schema()["properties"]
    for name in ("cluster", "checkpoint-store", "policy"):
        field = fields[f"saved_{name.rpartition('-')[2]}"]
        assert field["block_type_slug"] == f"rekindle-{name}"
    with pytest.raises(ValidationError, match="pick a block, or give its name"):
        TrainingJob.model_validate({"script": "a.py", "saved_policy": {"$ref": "x"}})


ANNOTATIONS = [
    {"fault-tolerance/job-retry-num": "3", "fault-tolerance/hang-retry": "true"},
    {
        "process-recover-enable": "on",
        "fault-scheduling": "force",
        "recover-strategy": "retry,recover",
        "backoffLimit": "4",
    },
]


@pytest.mark.parametrize("keys", ANNOTATIONS)
def test_annotations_in_the_form_are_converted_as_those_of_a_file(
    keys: dict[str, str], tmp_path: Path
) -> None:
    """The form takes labels and annotations together, and has the policy of `--policy`."""
    of_labels = {"process-recover-enable", "fault-scheduling"}
    limit = keys.get("backoffLimit")
    document = {
        "metadata": {
            "labels": {key: value for key, value in keys.items() if key in of_labels},
            "annotations": {
                key: value for key, value in keys.items() if key not in {*of_labels, "backoffLimit"}
            },
        },
        "spec": {"runPolicy": {"backoffLimit": int(limit)} if limit else {}},
    }
    file = tmp_path / "policy.yaml"
    file.write_text(json.dumps(document))
    job = TrainingJob(module="json", annotations=keys)
    assert job.to_spec("job").policy == read_policy(file)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "or give --framework torch, or --no-python for a script that is any program",
            "field prog",
        ),
        ("--no-python does not work with mindspore", "program does not"),
        ("run the job with --nnodes=4, not with 2:4", "run the job with nodes 4 and min_nodes 0"),
        ("to continue that job, give --job-id first; to begin", "give job_id first; to begin"),
        ("give --resume-from s3://b/x and another --checkpoint-dir, or none", "no form does it"),
        ("give --kubeconfig FILE and --context NAME", "the variable KUBECONFIG of the worker"),
    ],
)
def test_a_message_names_fields_of_the_form(text: str, shown: str) -> None:
    """A flow shows no option of a command."""
    assert "--" not in of_form(text)
    assert shown in of_form(text)


def test_an_annotation_without_an_effect_is_named() -> None:
    """A job has a sentence about each annotation whose result surprises."""
    keys = {"process-recover-enable": "off", "recover-strategy": "retry"}
    job = TrainingJob(module="json", annotations=keys).filled_in()
    assert job.notices == ["recover-strategy has no effect, because process-recover-enable is off"]


def test_the_form_shows_a_readable_name_of_every_field() -> None:
    """Prefect shows the title of a field, or else of its model; without both it shows "Field"."""
    schema = TrainingJob.model_json_schema()
    models = schema["$defs"]
    unreadable = []
    for model in (schema, *models.values()):
        for name, field in model["properties"].items():
            of_model = models.get(field.get("$ref", "").rpartition("/")[2], {})
            title = field.get("title") or of_model.get("title", "")
            if not title or re.fullmatch(r"\w*[a-z][A-Z]\w*", title):
                unreadable.append((model["title"], name, title))
    assert not unreadable


def test_the_spec_says_what_the_description_says(tmp_path: Path) -> None:
    """to_spec() copies every field into the spec, with absolute paths."""
    (tmp_path / "train.py").touch()
    job = TrainingJob.model_validate(
        {
            "script": "train.py",
            "arguments": ["--steps", "5"],
            "nodes": 2,
            "min_nodes": 1,
            "spares": 4,
            "processes_per_node": 3,
            "environment": {"A": "1"},
            "working_directory": str(tmp_path),
            "checkpoint": {"path": "saved", "every": 7, "keep": {"last": 3, "hours": 24}},
            "snapshot_every": 4,
            "policy": {"strategies": ["retry"], "max_restarts": 1, "max_in_row": 2},
        }
    )
    spec = job.to_spec("train-1")
    assert (spec.entry, spec.target) == (EntryKind.SCRIPT, "train.py")
    assert spec.arguments == ("--steps", "5")
    assert (spec.nodes, spec.processes_per_node) == (2, 3)
    assert (spec.min_nodes, spec.spares) == (1, 4)
    assert spec.environment == {"A": "1"}
    assert spec.working_directory == str(tmp_path)
    assert spec.checkpoint_store == str(tmp_path / "saved" / spec.job_id)
    assert (spec.checkpoint_every, spec.snapshot_every) == (7, 4)
    assert spec.keep == Retention(last=3, hours=24.0)
    assert spec.policy == Policy(strategies=(Strategy.RETRY,), max_restarts=1, max_in_row=2)
    assert spec.directory == str(tmp_path / "jobs" / "train-1")


def test_a_module_needs_no_file() -> None:
    """A job with a module does not need a file in its working directory."""
    spec = TrainingJob(module="my.training").to_spec("train-1")
    assert (spec.entry, spec.target) == (EntryKind.MODULE, "my.training")
    assert spec.checkpoint_store.startswith(spec.directory)


def test_the_framework_is_a_word() -> None:
    """A job in a cluster accepts a framework that is not installed on this machine."""
    pods = {"kubernetes": {"image": "train"}, "working_directory": "/app"}
    fields = {"module": "my.training", "framework": "mindspore", **pods}
    assert TrainingJob.model_validate(fields).to_spec("a-1").framework is Framework.MINDSPORE


def test_an_interval_that_is_chosen() -> None:
    """With an automatic interval, the spec has the word "auto" instead of a number."""
    store = {"every": 7, "automatic": True}
    spec = TrainingJob.model_validate({"module": "my.training", "checkpoint": store}).to_spec("a-1")
    assert spec.checkpoint_every == "auto"
    assert msgspec.json.decode(msgspec.json.encode(spec), type=JobSpec) == spec


def test_rules_that_do_not_fit() -> None:
    """The form refuses contradictory retention rules, and keeps all checkpoints by default."""
    with pytest.raises(ValidationError, match="best and metric belong together"):
        CheckpointDirectory.model_validate({"keep": {"best": 2}})
    assert CheckpointDirectory().keep == Retention()


def test_a_missing_script_is_named(tmp_path: Path) -> None:
    """If the script does not exist, to_spec() raises a usage error that has the path."""
    job = TrainingJob(script="gone.py", working_directory=str(tmp_path))
    with pytest.raises(UsageError, match=r"gone\.py does not exist"):
        job.to_spec("train-1")


def test_the_description_survives_the_api(tmp_path: Path) -> None:
    """A job that Prefect stores as a parameter of a flow run is equal after it is read again."""
    job = TrainingJob(script="a.py", nodes=2, name="charlm")
    assert TrainingJob.model_validate(job.model_dump(mode="json")) == job


def test_a_job_takes_the_policy_of_the_public_api() -> None:
    """TrainingJob keeps a `Policy` as given, and a form has the same defaults."""
    asked = Policy(max_recoveries=5)
    assert TrainingJob(script="a.py", policy=asked).policy == asked
    words: Any = ["dump"]
    (kept,) = TrainingJob(script="a.py", policy=Policy(strategies=words)).policy.strategies
    assert kept is Strategy.DUMP
    number: Any = "5"
    with pytest.raises(ValueError, match="max_restarts is '5'; give a number"):
        Policy(max_restarts=number)
    entered = TrainingJob.model_validate({"script": "a.py", "policy": {"max_recoveries": 5}})
    assert entered.policy == asked
    assert TrainingJob(script="a.py").policy == Policy()


def test_a_policy_that_names_strategies_to_approve_allows_restarts(tmp_path: Path) -> None:
    """The number of restarts does not depend on where a policy is written.

    Only `rekindle run` without a policy file has torchrun's number.
    """
    (tmp_path / "policy.yaml").write_text("approve: [restart]")
    asks: Any = ["restart"]
    of_script = TrainingJob(module="train", policy=Policy(approve=asks)).to_spec("a-1").policy
    form = {"module": "train", "policy": {"approve": asks}}
    of_form = TrainingJob.model_validate(form).to_spec("a-1").policy
    command = ["run", "--policy", str(tmp_path / "policy.yaml"), "train.py"]
    of_command = read_spec(command_parser().parse_args(command)).policy
    assert of_script.max_restarts == of_form.max_restarts == of_command.max_restarts == 3
    torchrun = get_args_parser().parse_args(["train.py"])
    bare = read_spec(command_parser().parse_args(["run", "train.py"])).policy
    assert bare.max_restarts == torchrun.max_restarts == 0


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"nodes": 0}, "job.nodes: Input should be greater than or equal to 1"),
        ({"node": 2}, "job.node: there is no such field; remove it, or correct its name"),
        ({"script": ""}, "job: give a script, a module or a program; none is given"),
        (
            {"kubernetes": {"image": ""}},
            "job.kubernetes: image is ''; name the image that holds the training script",
        ),
        (
            {"policy": {"max_restarts": -1}, "spares": -1},
            "job.spares: Input should be greater than or equal to 0; "
            "job.policy.max_restarts: Input should be greater than or equal to 0",
        ),
    ],
)
def test_a_form_is_read_or_refused_in_one_line(fields: dict[str, Any], line: str) -> None:
    """The line names each wrong field, and what it may be."""
    with pytest.raises(UsageError) as refused:
        read(TrainingJob, {"script": "a.py", **fields}, "job")
    assert str(refused.value) == line


def test_a_strategy_that_does_not_exist() -> None:
    """The line names the strategies that a person can choose, and not a pattern."""
    with pytest.raises(UsageError, match=r"job.policy.strategies.0: choose from retry, .*restart"):
        read(TrainingJob, {"script": "a.py", "policy": {"strategies": ["pray"]}}, "job")
