"""`rekindle checkpoints ls`, `verify` and `prune`: existing checkpoints and their damage."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from checkpoint_commands import STATE, Checkpoints, Trained, flip, place

from rekindle.checkpoints.checkpoint_path import read_manifest
from rekindle.checkpoints.directory import DirectoryStore
from rekindle.checkpoints.format import checksum
from rekindle.checkpoints.manifest import encode
from rekindle.job.spec import EntryKind, JobDirectory, JobSpec


def newer_version(path: Path) -> None:
    """Write a manifest of a later version of Rekindle, with a correct checksum."""
    inner = json.loads(path.read_bytes())["manifest"] | {"format": 9, "unheard": "of"}
    text = json.dumps(inner).encode()
    path.write_bytes(b'{"checksum":"%s","manifest":%s}' % (checksum([text]).encode(), text))


def rows(printed: str) -> list[list[str]]:
    return [line.split() for line in printed.splitlines()]


def test_ls(store: DirectoryStore, checkpoints: Checkpoints) -> None:
    """`ls` prints a row for each checkpoint, newest first, with values from its manifest."""
    done = checkpoints("ls", "store")
    head, *found = rows(done.out)
    assert head[:4] == ["step", "generation", "when", "size"]
    assert [(row[0], row[1], row[-4:]) for row in found] == [
        (str(step), "0", ["1", "torch", "1", "complete"]) for step in (15, 10, 5)
    ]
    assert done.status == 0


def test_ls_of_what_cannot_be_used(store: DirectoryStore, checkpoints: Checkpoints) -> None:
    """`ls` prints the reason for each unusable checkpoint; an unfinished one is not an error."""
    (store.root / "step-0000000020-g000001").mkdir()
    os.truncate(place(store, 15) / STATE, 100)
    newer_version(place(store, 10) / "manifest.json")
    flip(place(store, 5) / "manifest.json", 40)
    (store.root / "notes.txt").write_text("of the user's")
    states = [
        row.split("  ")[-1].strip() for row in checkpoints("ls", "store").out.splitlines()[1:]
    ]
    assert states[0] == "unfinished"
    assert states[1].startswith(f"cannot be used: {STATE} has 100 bytes, the manifest has")
    assert states[2].startswith(
        "cannot be used: the manifest has format 9, but this version of Rekindle reads 1"
    )
    assert states[3].startswith("cannot be used: the manifest")
    found = json.loads(checkpoints("ls", "store", "--json").out)
    assert [each["state"] for each in found] == ["unfinished", *3 * ["unusable"]]
    assert found[1]["files"][0]["name"] == STATE
    assert "files" not in found[2]


def test_verify_intact_ones(store: DirectoryStore, checkpoints: Checkpoints) -> None:
    """For intact checkpoints the status is 0.

    Without a terminal, `verify` prints no progress bar.
    """
    done = checkpoints("verify", "store")
    assert done.status == 0
    assert [row[-1] for row in rows(done.out)[1:]] == 3 * ["intact"]
    assert done.err.startswith("verify 3 checkpoints: ")
    assert done.err.count("\n") == 1
    assert "\x1b" not in done.err


def test_verify_names_what_is_wrong(store: DirectoryStore, checkpoints: Checkpoints) -> None:
    """`verify` prints a table of all damage; with given steps it reads only those steps."""
    flip(place(store, 5) / STATE, -1)
    size = (place(store, 10) / STATE).stat().st_size
    os.truncate(place(store, 10) / STATE, size - 1)
    (place(store, 15) / STATE).unlink()
    done = checkpoints("verify", "store")
    assert done.status == 1
    overview, damages = done.out.split("\n\n")
    assert [row[-1] for row in rows(overview)[1:]] == 3 * ["damaged"]
    missing, truncated, changed = damages.splitlines()[1:]
    assert missing.split()[:4] == ["15", "0", STATE, "missing"]
    assert truncated.split()[:4] == ["10", "0", STATE, "truncated"]
    assert f"it ends after {size - 1} of {size} bytes: tensor optimizer.state.5" in truncated
    assert changed.split()[:4] == ["5", "0", STATE, "changed"]
    one = checkpoints("verify", "store", 15, "--json")
    assert one.status == 1
    (found,) = json.loads(one.out)
    assert (found["step"], found["verdict"]) == (15, "damaged")
    assert found["damages"][0]["what"] == "missing"
    os.truncate(place(store, 10) / STATE, 0)
    assert "it ends after 0 of" in checkpoints("verify", "store", 10).out


def test_verify_of_broken_manifests(store: DirectoryStore, checkpoints: Checkpoints) -> None:
    """An unreadable manifest is damage, and an unfinished checkpoint is not."""
    shutil.rmtree(place(store, 5))
    (place(store, 10) / "manifest.json").unlink()
    done = checkpoints("verify", "store")
    assert done.status == 0
    assert [row[-1] for row in rows(done.out)[1:]] == ["intact", "unfinished"]
    newer_version(place(store, 15) / "manifest.json")
    done = checkpoints("verify", "store")
    assert done.status == 1
    assert "manifest.json  unusable  the manifest has format 9" in done.out


def test_what_is_not_there(store: DirectoryStore, checkpoints: Checkpoints) -> None:
    """A wrong command line gives one line of error and the status 2."""
    for arguments, error in {
        ("ls", "stor"): "there is no folder",
        ("verify", "store", 7): "has no checkpoint of step 7",
        ("ls", place(store, 5)): "is one checkpoint; give the folder of the store",
        ("prune", "store", "--keep", 0): "give at least 1",
        ("pull", "store", "out", "--step", 7): "has no checkpoint of step 7",
    }.items():
        done = checkpoints(*arguments)
        assert (done.status, done.out) == (2, "")
        assert error in done.err
        assert done.err.count("\n") == 1
    (store.root.parent / "empty").mkdir()
    assert "no checkpoints in" in checkpoints("ls", "empty").out
    assert checkpoints("verify", "empty").status == 0
    assert checkpoints("pull", "empty", "out").status == 1


def test_a_jobs_own_store(tmp_path: Path, checkpoints: Checkpoints) -> None:
    """A job id selects the store of the job, unless a folder has the same name."""
    elsewhere = tmp_path / "elsewhere"
    spec = JobSpec(
        job_id="nightly",
        entry=EntryKind.SCRIPT,
        target="train.py",
        working_directory=str(tmp_path),
        directory=str(tmp_path / "home" / "jobs" / "nightly"),
        log_directory=str(tmp_path / "logs"),
        checkpoint_store=str(elsewhere),
    )
    JobDirectory(spec.directory).create(spec)
    Trained().keep(DirectoryStore(elsewhere), 3)
    assert rows(checkpoints("ls", "nightly").out)[1][0] == "3"
    (tmp_path / "nightly").mkdir()
    refused = checkpoints("ls", "nightly").err
    assert f"write ./nightly for the folder, or {elsewhere} for the store" in refused
    assert rows(checkpoints("ls", elsewhere).out)[1][0] == "3"
    assert "no checkpoints in" in checkpoints("ls", "./nightly").out


def test_prune(store: DirectoryStore, checkpoints: Checkpoints) -> None:
    """`prune` removes what the dry run lists, and does not count damaged checkpoints."""
    flip(place(store, 15) / STATE, -1)
    planned = checkpoints("prune", "store", "--keep", 1, "--dry-run")
    assert place(store, 5).is_dir()
    done = checkpoints("prune", "store", "--keep", 1)
    assert [row[0] for row in rows(done.out)] == [row[0] for row in rows(planned.out)]
    assert [row[0] for row in rows(done.out)[1:]] == ["5"]
    assert sorted(p.name for p in store.root.glob("step-*")) == [
        place(store, 10).name,
        place(store, 15).name,
    ]
    assert "there is nothing to remove" in checkpoints("prune", "store", "--keep", 1).out


def test_what_a_later_version_wrote_is_not_planned_to_go(
    store: DirectoryStore, checkpoints: Checkpoints
) -> None:
    """`prune` does not remove or list a checkpoint of a later version."""
    manifest = place(store, 5) / "manifest.json"
    text = json.dumps({**json.loads(manifest.read_bytes())["manifest"], "format": 9}).encode()
    manifest.write_bytes(b'{"checksum":"%s","manifest":%s}' % (checksum([text]).encode(), text))
    for more in (("--dry-run",), ()):
        done = checkpoints("prune", "store", "--keep", 1, *more)
        assert [row[0] for row in rows(done.out)[1:]] == ["10"]
    assert place(store, 5).is_dir()


@pytest.mark.process
def test_help_needs_nothing_heavy() -> None:
    """`--help` does not import torch, rich, Prefect or boto3."""
    script = (
        "import sys; from rekindle.cli import main as cli\n"
        "try: cli.main(['checkpoints', 'verify', '--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'rich', 'prefect', 'boto3'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("created", [1e300, -1e300])
def test_a_time_that_no_calendar_has(
    store: DirectoryStore, checkpoints: Checkpoints, created: float
) -> None:
    """If a manifest has an impossible time, `ls` prints the table with a question mark."""
    manifest = msgspec.structs.replace(read_manifest(place(store, 15)), created=created)
    (place(store, 15) / "manifest.json").write_bytes(encode(manifest))
    assert rows(checkpoints("ls", "store").out)[1][2] == "?"
