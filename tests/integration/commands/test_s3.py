"""`rekindle checkpoints` with stores in S3, on a real server."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint_commands import Checkpoints, flip, place
from stores import tree
from stores.servers import BUCKET, ENVIRONMENT, SECRET_KEY, Server, rclone

from rekindle.checkpoints.directory import DirectoryStore


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Start rclone's server, with its credentials in the environment."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with rclone(tmp_path / "s3") as found:
        yield found


def objects(tmp_path: Path, step: int) -> list[Path]:
    return sorted((tmp_path / "s3").rglob(f"step-{step:010d}-*/*.safetensors"))


def test_there_and_back(
    store: DirectoryStore, server: Server, tmp_path: Path, checkpoints: Checkpoints
) -> None:
    """A copy from a folder to S3, to another prefix, and back has the same bytes.

    A second push writes nothing.
    """
    first, second = server.location(), server.location()
    for words in (("push", "store", first), ("push", first, second), ("pull", second, "back")):
        assert ": copied: " in checkpoints(*words).out
    back = tree(tmp_path / "back" / place(store, 15).name)
    kept = tree(place(store, 15))
    assert back.keys() == kept.keys()
    assert [back[name] for name in back if name != "manifest.json"] == [
        kept[name] for name in kept if name != "manifest.json"
    ]
    (sent,) = objects(tmp_path, 15)[:1]
    before = sent.stat().st_mtime_ns
    assert "existed already" in checkpoints("push", "store", first).out
    assert sent.stat().st_mtime_ns == before
    assert checkpoints("verify", first).status == 0


def test_damage_is_named(
    store: DirectoryStore, server: Server, tmp_path: Path, checkpoints: Checkpoints
) -> None:
    """`verify` names each damage, as in a folder; no output shows the secret."""
    location = server.location()
    for step in (5, 10, 15):
        assert checkpoints("push", "store", location, "--step", step).status == 0
    (changed,), (cut,), (lost,) = (objects(tmp_path, step) for step in (5, 10, 15))
    flip(changed, -1)
    os.truncate(cut, 100)
    with contextlib.closing(server.client()) as client:  # rclone would search for it for minutes
        client.delete_object(Bucket=BUCKET, Key=str(lost.relative_to(tmp_path / "s3" / BUCKET)))
    done = checkpoints("verify", location)
    assert done.status == 1
    assert [line.split()[3] for line in done.out.split("\n\n")[1].splitlines()[1:]] == [
        "missing",
        "truncated",
        "changed",
    ]
    refused = checkpoints("pull", location, "out")
    assert refused.status == 1
    assert not Path("out").exists()
    listed = checkpoints("ls", location)
    assert listed.out.count("cannot be used") == 2
    assert SECRET_KEY not in "".join((*done[1:], *refused[1:], *listed[1:]))


def test_export_import_prune(
    store: DirectoryStore, server: Server, checkpoints: Checkpoints
) -> None:
    """`export`, `import` and `prune` accept S3 locations."""
    location = server.location()
    for step in (5, 10):
        checkpoints("push", "store", location, "--step", step)
    assert checkpoints("export", location, "out.pt", "--format", "torch").status == 0
    assert checkpoints("import", "out.pt", location, "--job-id", "job", "--step", 12).status == 0
    planned = checkpoints("prune", location, "--keep", 2, "--dry-run").out
    done = checkpoints("prune", location, "--keep", 2)
    assert [line.split()[0] for line in done.out.splitlines()] == ["step", "5"]
    assert done.out.splitlines()[1] == planned.splitlines()[1]
    steps = [line.split()[0] for line in checkpoints("ls", location).out.splitlines()[1:]]
    assert steps == ["12", "10"]
