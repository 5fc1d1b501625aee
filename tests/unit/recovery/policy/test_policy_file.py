"""A policy in a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle.errors import UsageError
from rekindle.recovery.policy.dialect import Dialect
from rekindle.recovery.policy.policy import Policy, Strategy
from rekindle.recovery.policy.policy_file import (
    PolicyFormat,
    notices_about,
    read_policy,
    write_policy,
)

MODELARTS = """
kind: Job
metadata:
  annotations:
    fault-tolerance/job-retry-num: "3"
    fault-tolerance/job-unconditional-retry: "true"
    other: "kept apart"
"""
MINDCLUSTER = """
kind: AscendJob
metadata:
  labels: {process-recover-enable: "on", fault-scheduling: force}
  annotations: {recover-strategy: "retry,dump"}
spec: {runPolicy: {backoffLimit: 3}}
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "policy.yaml"
    path.write_text(text)
    return path


def test_fields_of_its_own(tmp_path: Path) -> None:
    """A field that the file omits has its default, and strategies keep their order."""
    text = "strategies: [restart, retry]\nmax_restarts: 2\napprove: [restart]"
    expected = Policy(
        strategies=(Strategy.RESTART, Strategy.RETRY), max_restarts=2, approve=(Strategy.RESTART,)
    )
    assert read_policy(written(tmp_path, text)) == expected


def test_a_job_of_modelarts(tmp_path: Path) -> None:
    """A file of a ModelArts job gives the policy of its annotations."""
    policy = read_policy(written(tmp_path, MODELARTS))
    assert (policy.max_reschedules, policy.unconditional) == (3, True)
    assert policy.dialect is Dialect.MODELARTS


def test_a_job_of_mindcluster(tmp_path: Path) -> None:
    """A file of a MindCluster job gives the policy of its labels, annotations and retry limit.

    The retry limit is `backoffLimit`.
    """
    policy = read_policy(written(tmp_path, MINDCLUSTER))
    assert (policy.max_reschedules, policy.dialect) == (3, Dialect.MINDCLUSTER)
    assert {Strategy.RETRY, Strategy.DUMP} <= set(policy.strategies)
    assert Strategy.RECOVER not in policy.strategies


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "write fields"),
        ("- retry", "write fields"),
        ("a: [", "is not YAML"),
        ("max_restart: 3", "max_restart"),
        ("max_restarts: many", r"\$.max_restarts"),
        ("max_restarts: -1", r"yaml:1: .*>= 0 - at `\$.max_restarts`"),
        ("strategies: [hope]", "hope"),
        ("strategies:\n- retry\n- hope", r"yaml:3: Invalid enum value 'hope'"),
        ("strategies: [retry, retry]", "twice"),
        ("metadata: 3", "metadata is 3"),
        ("metadata: {labels: {process-recover-enable: on}}", "write it in quotes"),
        ("{metadata: {labels: {fault-scheduling: force}}, spec: 3}", "spec is 3"),
        (MINDCLUSTER.replace("Limit: 3", "Limit: yes"), "yaml:6: .*backoffLimit is True"),
        (MODELARTS.replace('"3"', '"129"'), "yaml:5: .*from 1 to 128"),
        (
            "retry: 1\nmax_restarts: " + "9" * 5000,
            "yaml:2: max_restarts: '9{40}' cannot be read",
        ),
        ("max_restarts: 9999999999", "yaml:1: .*<= 2147483647"),
        ("node_timeout_s: .inf", "node_timeout_s is inf; give a finite number"),
        ("kind: a\nmax_restarts: 2024-13-45", "yaml:2: max_restarts: '2024-13-45' cannot be read"),
        ("[" * 3000, "nested too deeply"),
        ("a:\n  - b: " + "[" * 3000, "nested too deeply"),
        ("max_restarts: 1\n1: x", "yaml:2: '1' is not text"),
        ("max_restarts: 1\nmax_in_row: 2\nmax_restarts: 3", "yaml:3: max_restarts occurs twice"),
        ("metadata: {annotations: {1: x}}", "yaml:1: metadata.annotations: '1' is not text"),
        ("metadata:\n  annotations:\n    on: x", "yaml:3: metadata.annotations: 'on' is not text"),
        ("{[a]: x}", "yaml:1: a key is not text"),
        ("metadata:", "no label or annotation about recovery"),
        ("metadata: []", r"metadata is \[\]"),
        ("metadata: {annotations: {prefect.io/x: y}}", "no label or annotation"),
        (
            MODELARTS.replace("tolerance/job-r", "tolerence/job-r"),
            "yaml:5: .*did you mean .*retry-num",
        ),
        (
            MINDCLUSTER.replace("recover-strategy", "recover-stratgy"),
            "did you mean recover-strategy",
        ),
        (MODELARTS + "max_restarts: 3", "yaml:8: max_restarts and metadata exclude each other"),
        (
            MINDCLUSTER.replace(
                "annotations: {", 'annotations: {fault-tolerance/hang-retry: "t", '
            ),
            "yaml:5: fault-tolerance/hang-retry is of ModelArts and process-recover-enable of Mind",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, text: str, words: str) -> None:
    """The error names the file and the field."""
    path = written(tmp_path, text)
    with pytest.raises(UsageError, match=words) as error:
        read_policy(path)
    assert str(path) in str(error.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    """A missing file and a file that is not UTF-8 raise an error that names the file."""
    with pytest.raises(UsageError, match="cannot be read"):
        read_policy(tmp_path / "none.yaml")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="bytes:1: not UTF-8; save the file in UTF-8"):
        read_policy(tmp_path / "bytes")


RECOVERS = {Strategy.RETRY, Strategy.DUMP}


@pytest.mark.parametrize(
    ("label", "recovers", "words"),
    [
        ("", RECOVERS, "applies without the label process-recover-enable"),
        ('process-recover-enable: "on", ', RECOVERS, ""),
        ('process-recover-enable: "off", ', set(), "no effect, because process-recover-enable is"),
        ("process-recover-enable: pause, ", set(), "process-recover-enable is pause"),
    ],
)
def test_the_switch_of_recover_strategy(
    tmp_path: Path, label: str, recovers: set[Strategy], words: str
) -> None:
    """The annotation switches itself on, as from MindCluster 7.2, and a notice says so."""
    path = written(tmp_path, MINDCLUSTER.replace('process-recover-enable: "on", ', label))
    assert RECOVERS & set(read_policy(path).strategies) == recovers
    found = notices_about(path)
    assert (len(found), all(words in text for text in found)) == (bool(words), True)


@pytest.mark.parametrize("form", PolicyFormat)
@pytest.mark.parametrize("text", ["max_restarts: 2", MODELARTS, MINDCLUSTER])
def test_what_is_written_can_be_read_again(tmp_path: Path, text: str, form: PolicyFormat) -> None:
    """A written policy is the same after reading, except values that the format does not have."""
    policy = read_policy(written(tmp_path, text))
    if form is PolicyFormat.MODELARTS and not policy.max_reschedules:
        with pytest.raises(UsageError, match="give max_reschedules"):
            write_policy(policy, form)
        return
    again = read_policy(written(tmp_path, write_policy(policy, form)))
    if form is PolicyFormat.OWN:
        assert again == policy
    else:
        assert write_policy(again, form) == write_policy(policy, form)
