"""The table of what makes another job: it has each field, and each field has its effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from rekindle import names
from rekindle.blocks.job import TrainingJob
from rekindle.checkpoints.retention import Retention
from rekindle.engines.kubernetes.manifests.settings import KubernetesSettings
from rekindle.job.spec import EntryKind, Framework, JobSpec, KeepsOff
from rekindle.recovery.node_check.evidence import NodeCheckLimits
from rekindle.recovery.policy.policy import Policy, Strategy
from rekindle.tasks.description import FORM, TABLE, Description, Differences, differences, digest

SPEC = JobSpec(
    job_id="a",
    entry=EntryKind.SCRIPT,
    target="train.py",
    arguments=("--lr", "0.1"),
    environment={"DATA": "/data"},
    working_directory="/work",
    directory="/rekindle/jobs/a",
    log_directory="/rekindle/jobs/a/logs",
    checkpoint_store="/ckpt/a",
)
PODS = KubernetesSettings(image="train:1")
DIGEST = "802225e199ea"  # of SPEC and PODS

# Another value of each field of JobSpec; the text is in the difference if the field counts.
OTHERS: dict[str, tuple[Any, str]] = {
    "job_id": ("b", ""),
    "entry": (EntryKind.MODULE, "script, module or program (script, now module)"),
    "target": ("other.py", "script, module or program (train.py, now other.py)"),
    "arguments": (("--lr", "0.2"), "arguments (0.1, now 0.2, at place 2)"),
    "framework": (Framework.MINDSPORE, "framework (torch, now mindspore)"),
    "nodes": (2, "nodes (1, now 2)"),
    "min_nodes": (1, ""),
    "processes_per_node": (2, "processes_per_node (1, now 2)"),
    "spares": (1, ""),
    "environment": ({"DATA": "/other"}, "environment.DATA"),
    "working_directory": ("/elsewhere", "working_directory (/work, now /elsewhere)"),
    "directory": ("/other", ""),
    "log_directory": ("/other", ""),
    "checkpoint_store": ("/other/a", "checkpoint.path (/ckpt, now /other)"),
    "snapshot_every": (3, ""),
    "checkpoint_every": (5, "checkpoint.every (False, now True)"),
    "keep": (Retention(last=1), ""),
    "master_addr": ("10.0.0.1", ""),
    "master_port": (1234, ""),
    "role": ("other", ""),
    "redirects": (3, ""),
    "tee": (3, ""),
    "allow_injection": (True, ""),
    "policy": (Policy(max_restarts=9), ""),
    "network_check": (True, ""),
    "exclude_straggler": (True, ""),
    "node_check": (NodeCheckLimits(link_factor=7.0), ""),
    "fault_tables": ("/tables.toml", ""),
    "engine": ((Strategy.RESCHEDULE_POD,), ""),
    "keeps_off": (KeepsOff.RESTARTS, ""),
}
COUNTING_OF_PODS = {
    "image": "train:2",
    "volumes": ({"name": "data", "mount_path": "/data", "claim": "data"},),
    "env_from_secrets": ("keys",),
    "overrides": {"spec": {"suspend": True}},
    "pod_overrides": {"spec": {"hostPID": True}},
}


def compare(**changed: Any) -> Differences:
    return differences(
        Description(spec=SPEC), Description(spec=msgspec.structs.replace(SPEC, **changed))
    )


def test_the_table_has_each_field_of_a_description() -> None:
    """A field without a row fails here: decide whether another value makes another job."""
    of_pods = {f"kubernetes.{name}" for name in KubernetesSettings.__struct_fields__}
    assert set(TABLE) == set(JobSpec.__struct_fields__) | of_pods
    assert set(OTHERS) == set(JobSpec.__struct_fields__)
    assert set(FORM) == set(TrainingJob.model_fields)
    assert {row for rows in FORM.values() for row in rows} <= set(TABLE)


@pytest.mark.parametrize("name", OTHERS)
def test_a_field_of_the_description_counts_or_not(name: str) -> None:
    """Another value makes another job if, and only if, the field counts; the text names it."""
    value, text = OTHERS[name]
    found = compare(**{name: value})
    assert found.counting == ((text,) if text else ())
    before, now = Description(spec=SPEC), msgspec.structs.replace(SPEC, **{name: value})
    assert (digest(before) == digest(Description(spec=now))) == (not text)


@pytest.mark.parametrize("name", KubernetesSettings.__struct_fields__)
def test_a_setting_of_the_pods_counts_or_not(name: str) -> None:
    """Another image, volume, Secret or patch makes another job; another place does not."""
    before = Description(spec=SPEC, pods=PODS)
    other: Any = COUNTING_OF_PODS.get(name, "other")
    now = Description(spec=SPEC, pods=msgspec.structs.replace(PODS, **{name: other}))
    assert bool(differences(before, now).counting) == (name in COUNTING_OF_PODS)
    assert (digest(before) == digest(now)) == (name not in COUNTING_OF_PODS)


def test_a_job_in_pods_is_another_one_than_on_this_machine() -> None:
    """The image decides."""
    found = differences(Description(spec=SPEC), Description(spec=SPEC, pods=PODS))
    assert found.counting == ("kubernetes.image (none, now train:1)",)


def test_what_does_not_count_is_named() -> None:
    """The names of changed fields without effect on the result, as far as they are in the form."""
    found = compare(
        policy=Policy(max_restarts=9),
        spares=1,
        tee=3,
        environment={"DATA": "/data", "NCCL_DEBUG": "INFO"},
    )
    assert found == Differences((), ("spares", "policy.max_restarts", "environment.NCCL_DEBUG"))


def test_secrets_and_keys_do_not_count_and_never_appear() -> None:
    """A rotated key of a store or of a block makes no other job, and no value is in a text."""
    keys = {names.ENV_STORE_SECRET_ACCESS_KEY: "new", "TRACKER_KEY": "new", "DATA": "/data"}
    wanted = Description(
        spec=msgspec.structs.replace(SPEC, environment=keys),
        secret_variables=frozenset({"TRACKER_KEY"}),
    )
    old = dict.fromkeys(keys, "old") | {"DATA": "/data"}
    known = Description(spec=msgspec.structs.replace(SPEC, environment=old))
    found = differences(known, wanted)
    assert found.counting == ()
    assert "new" not in str(found)
    assert digest(wanted) == digest(Description(spec=SPEC))


@pytest.mark.parametrize("location", ["{work}/ckpt/a", "s3://bucket/ckpt/a?region=x", ""])
def test_a_new_clone_is_the_same_job(location: str) -> None:
    """Without `working_directory` in the form another folder with the same script is the same."""

    def cloned(job_id: str, work: str) -> Description:
        store = location.format(work=work).replace("/a", f"/{job_id}") if location else ""
        own = str(Path("/rekindle/jobs", job_id, names.CHECKPOINT_DIRECTORY))
        spec = msgspec.structs.replace(
            SPEC,
            job_id=job_id,
            directory=f"/rekindle/jobs/{job_id}",
            target="train.py" if job_id == "a" else f"{work}/train.py",
            working_directory=work,
            checkpoint_store=store or own,
        )
        return Description(spec=spec, below=0)

    one, other = cloned("a", "/tmp/clone1"), cloned("b", "/tmp/clone2")
    assert differences(one, other) == Differences((), ())
    assert digest(one) == digest(other)


def test_a_relative_working_directory_counts_by_its_name() -> None:
    """The folders that the form names count, not the clone around them."""

    def cloned(folder: str) -> Description:
        work = f"{folder}/code"
        spec = msgspec.structs.replace(SPEC, working_directory=work, target=f"{work}/train.py")
        return Description(spec=spec, below=1)

    one, other = cloned("/tmp/clone1"), cloned("/tmp/clone2")
    assert differences(one, other) == Differences((), ())
    assert digest(one) == digest(other)
    elsewhere = msgspec.structs.replace(
        other, spec=msgspec.structs.replace(other.spec, working_directory="/tmp/clone2/old")
    )
    assert "working_directory (code, now old)" in differences(one, elsewhere).counting


def test_an_upgrade_keeps_derived_ids() -> None:
    """A changed digest makes a rerun of a parent start a second job beside a job that lives."""
    described = Description(spec=SPEC, pods=PODS)
    assert digest(described)[:12] == DIGEST
