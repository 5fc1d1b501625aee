"""Locations of stores: the valid texts, and the refused ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rekindle.checkpoints.directory import DirectoryStore
from rekindle.checkpoints.location import S3Location, parse
from rekindle.checkpoints.open_store import check_location, open_store
from rekindle.errors import UsageError


@pytest.mark.parametrize(
    ("text", "location"),
    [
        ("s3://bucket", S3Location("bucket", "")),
        ("s3://my.bucket-1/jobs/a=1,b", S3Location("my.bucket-1", "jobs/a=1,b")),
        (
            "s3://b2/p?endpoint=https://obs.example:9000&region=cn-north-4"
            "&addressing=virtual&verify=/etc/ssl/my%20ca.pem",
            S3Location(
                "b2", "p", "https://obs.example:9000", "cn-north-4", "virtual", "/etc/ssl/my ca.pem"
            ),
        ),
        (
            "s3://b2/p?endpoint=http://[::1]:9000&addressing=path&verify=false",
            S3Location("b2", "p", "http://[::1]:9000", addressing="path", verify=False),
        ),
    ],
)
def test_a_location_is_read_and_written(text: str, location: S3Location) -> None:
    """parse() reads every setting, and reads the text of a location as the same location."""
    assert parse(text) == location
    assert parse(str(location)) == location


def test_spellings_of_one_place_are_one() -> None:
    """Slashes at the end and default settings do not change a location."""
    for text in ("s3://bucket/a/", "s3://bucket/a?addressing=auto&verify=true"):
        assert str(parse(text)) == "s3://bucket/a"
    assert parse("/a/directory") == Path("/a/directory")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "neither an absolute path nor s3://bucket/prefix"),
        ("relative/path", "'relative/path' is neither an absolute path nor s3://bucket/prefix"),
        ("file:///a", "in a folder or at s3://bucket/prefix, not at file://"),
        ("/a\0b", "a NUL character"),
        ("s3:///prefix", "is not a valid name of a bucket"),
        ("s3://b", "is not a valid name of a bucket"),
        ("s3://bu cket/a", "is not a valid name of a bucket"),
        ("s3://AKIA:marked@bucket/a", "credentials in the environment"),
        ("s3://bucket/a//b", "with single slashes between"),
        ("s3://bucket/a/../b", "the prefix 'a/../b' of bucket 'bucket'"),
        ("s3://bucket/ä", "use letters, digits and"),
        ("s3://bucket/a?secret=marked", "must not have a secret; this one has secret"),
        ("s3://bucket/a?region=x&region=y", "each once"),
        ("s3://bucket/a?region=", "'' is not a valid name of a region"),
        ("s3://bucket/a?addressing=host", "addressing is one of auto, path, virtual"),
        ("s3://bucket/a?verify=ca.pem", "give true, false or the absolute path"),
        ("s3://bucket/a?endpoint=example.org", "an endpoint is https://host"),
        ("s3://bucket/a?endpoint=ftp://example.org", "an endpoint is https://host"),
        ("https://user:marked@example.org/b", "not at https://"),
        ("user:marked@example.org/b", "the location is neither an absolute path nor s3://"),
        ("s3://bucket/a?endpoint=https://u:marked@example.org", "without user, password"),
        ("s3://bucket/a?endpoint=https://example.org:port", "an endpoint is https://host"),
    ],
)
def test_what_is_no_location_is_explained(text: str, message: str) -> None:
    """The error explains the mistake without text that may be a secret."""
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert message in str(caught.value)
    assert "marked" not in str(caught.value)


def test_a_store_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """open_store() opens a directory, and reports missing requirements of S3 immediately."""
    opened = open_store(str(tmp_path))
    assert isinstance(opened, DirectoryStore)
    assert opened.location == str(tmp_path)
    with pytest.raises(UsageError, match="file of certificate authorities /not/there"):
        open_store("s3://bucket/a?verify=/not/there")
    monkeypatch.setenv("REKINDLE_STORE_SECRET_ACCESS_KEY", "marked")
    with pytest.raises(UsageError, match="set REKINDLE_STORE_ACCESS_KEY_ID"):
        open_store("s3://bucket/a")
    monkeypatch.delenv("REKINDLE_STORE_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_PROFILE", "there-is-none")
    with pytest.raises(UsageError, match="cannot configure boto3 for s3://bucket/a"):
        open_store("s3://bucket/a")
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(UsageError, match=r"boto3 is not installed: pip install .rekindle\[s3\]"):
        open_store("s3://bucket/a")


@pytest.mark.process
def test_boto3_is_imported_only_for_s3() -> None:
    """Opening a directory and importing the S3 store do not import boto3."""
    script = """
import sys
from rekindle.checkpoints.s3 import store as s3_store
from rekindle.checkpoints.open_store import check_location, open_store
open_store("/tmp")
sys.exit("boto3" in sys.modules or "botocore" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.parametrize("below", ["", "a", "a/b"])
def test_a_file_is_no_place_for_checkpoints(tmp_path: Path, below: str) -> None:
    """check_location() refuses a file before the job starts, and accepts a missing directory."""
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UsageError, match=f"{file}.* is a file"):
        check_location(str(file / below))
    check_location(str(tmp_path / "new" / below))
