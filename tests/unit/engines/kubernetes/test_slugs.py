"""What a job's objects are called."""

from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.engines.kubernetes.labels import Names, Role, described, labels, selector, slug

DNS_1035 = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
job_ids = st.from_regex(r"\A[a-z0-9][a-z0-9._-]{0,62}\Z")


@given(job_ids)
def test_a_slug_is_a_label_that_leaves_room(job_id: str) -> None:
    """Every id has a valid name of at most 40 characters; the longest of its objects fits, too."""
    assert DNS_1035.fullmatch(slug(job_id))
    assert len(slug(job_id)) <= 40
    assert len(Names.of(job_id).coordinator) <= 63
    assert slug(job_id) == slug(job_id)


@given(job_ids, job_ids)
def test_two_jobs_have_two_slugs(one: str, other: str) -> None:
    """Different ids have different names."""
    assert (slug(one) == slug(other)) == (one == other)


@given(job_ids)
def test_no_id_is_the_slug_of_another(job_id: str) -> None:
    """Whoever calls a job by another one's slug gets another slug."""
    if slug(job_id) != job_id:
        assert slug(slug(job_id)) != slug(job_id)


@pytest.mark.parametrize(
    ("job_id", "name"),
    [
        ("charlm-0123456789ab", "charlm-0123456789ab"),
        ("a.b", "a-b-2e7336dc"),
        ("7b", "job-7b-"),
        ("end-", "end-"),
        ("x" * 41, "x" * 31 + "-"),
        ("deadbeef-deadbeef", "deadbeef-deadbeef-"),
    ],
)
def test_slugs_are_stable(job_id: str, name: str) -> None:
    """Names are as they were: a live job has to be found by a later version."""
    assert slug(job_id).startswith(name)


def test_labels_of_any_id_are_valid() -> None:
    """The id itself, which may end in a dot, is in no label."""
    found = labels("a.", Role.WORKER, attempt=2)
    assert found["rekindle.dev/job"] == slug("a.")
    assert found["rekindle.dev/attempt"] == "2"
    assert selector("demo", Role.WORKER) == "rekindle.dev/job=demo,rekindle.dev/role=worker"


def test_descriptions_are_told_apart_only_with_the_secret() -> None:
    """Equal descriptions have equal marks under one secret, and none that can be guessed at."""
    assert described("s", {"a": 1, "b": 2}) == described("s", {"b": 2, "a": 1})
    assert described("s", {"a": 1}) != described("s", {"a": 2})
    assert described("s", {"a": 1}) != described("t", {"a": 1})


def test_a_description_is_the_same_for_a_later_version() -> None:
    """Fields at their defaults, such as those to come, leave no mark; all others do."""
    old = msgspec.defstruct("Job", [("nodes", int), ("inner", dict, {})])
    new = msgspec.defstruct("Job", [("nodes", int), ("inner", dict, {}), ("more", int, 0)])
    assert described("s", old(2, {"a": [1]})) == described("s", new(2, {"a": [1]}))
    assert described("s", old(2)) != described("s", new(2, {}, 1))
