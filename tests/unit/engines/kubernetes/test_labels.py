"""The names of a job's objects."""

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
    """Every id has a valid slug of at most 40 characters, so the longest object name fits."""
    assert DNS_1035.fullmatch(slug(job_id))
    assert len(slug(job_id)) <= 40
    assert len(Names.of(job_id).coordinator) <= 63
    assert slug(job_id) == slug(job_id)


@given(job_ids, job_ids)
def test_two_jobs_have_two_slugs(one: str, other: str) -> None:
    """Different ids have different slugs."""
    assert (slug(one) == slug(other)) == (one == other)


@given(job_ids)
def test_no_id_is_the_slug_of_another(job_id: str) -> None:
    """A job whose id is the slug of another job has a different slug."""
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
    """Slugs do not change between versions, because a later version must find a live job."""
    assert slug(job_id).startswith(name)


def test_labels_of_any_id_are_valid() -> None:
    """No label has the id itself, because it may end with a dot."""
    found = labels("a.", Role.WORKER, attempt=2)
    assert found["rekindle.dev/job"] == slug("a.")
    assert found["rekindle.dev/attempt"] == "2"
    assert selector("demo", Role.WORKER) == "rekindle.dev/job=demo,rekindle.dev/role=worker"


def test_descriptions_are_told_apart_only_with_the_secret() -> None:
    """With one secret, equal descriptions have equal marks.

    Without the secret, a mark does not reveal the description.
    """
    assert described("s", {"a": 1, "b": 2}) == described("s", {"b": 2, "a": 1})
    assert described("s", {"a": 1}) != described("s", {"a": 2})
    assert described("s", {"a": 1}) != described("t", {"a": 1})


def test_a_description_is_the_same_for_a_later_version() -> None:
    """The mark ignores fields with default values, so a new field does not change old marks."""
    old = msgspec.defstruct("Job", [("nodes", int), ("inner", dict, {})])
    new = msgspec.defstruct("Job", [("nodes", int), ("inner", dict, {}), ("more", int, 0)])
    assert described("s", old(2, {"a": [1]})) == described("s", new(2, {"a": [1]}))
    assert described("s", old(2)) != described("s", new(2, {}, 1))
