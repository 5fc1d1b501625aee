"""`rekindle checkpoints pull` and `push` make a complete and intact copy, or no copy."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_commands import STATE, Checkpoints, flip, place
from stores import content, manifest, put_parts, tree
from waiting import status_of, wait_until

import rekindle
from rekindle.checkpoints import verifying
from rekindle.checkpoints.directory import DirectoryCheckpoint, DirectoryStore
from rekindle.checkpoints.store import CheckpointFile
from rekindle.checkpoints.verifying import copy
from rekindle.errors import CheckpointError, CorruptError


def test_there_and_back(store: DirectoryStore, checkpoints: Checkpoints) -> None:
    """Copies of the newest or the requested step are identical; a second copy writes nothing."""
    assert "step 15" in checkpoints("pull", "store", "there").out
    assert checkpoints("push", "there", "back").status == 0
    assert tree(Path("back") / place(store, 15).name) == tree(place(store, 15))
    before = tree(Path("back"))
    done = checkpoints("push", "there", "back")
    assert (done.status, "existed already" in done.out) == (0, True)
    assert tree(Path("back")) == before
    assert "step 5" in checkpoints("pull", "store", "back", "--step", 5).out
    assert checkpoints("verify", "back").status == 0


def test_a_damaged_one_is_refused(store: DirectoryStore, checkpoints: Checkpoints) -> None:
    """`pull` refuses a damaged step, and without a step copies the newest intact checkpoint."""
    flip(place(store, 15) / STATE, -1)
    os.truncate(place(store, 10) / STATE, 10)
    for step, error in ((15, "is damaged: state-00000.safetensors is changed"), (10, "10 bytes")):
        done = checkpoints("pull", "store", "out", "--step", step)
        assert done.status == 1
        assert error in done.err
        assert not Path("out").exists()
    done = checkpoints("pull", "store", "out")
    assert done.out.startswith("step 5, ")
    assert done.err.count("skipped") == 2


def test_a_damaged_copy_is_mended(store: DirectoryStore, checkpoints: Checkpoints) -> None:
    """A second `pull` repairs a damaged copy."""
    checkpoints("pull", "store", "out")
    path = Path("out") / place(store, 15).name / STATE
    flip(path, 3000)
    done = checkpoints("pull", "store", "out")
    assert (done.status, "copied" in done.out) == (0, True)
    assert path.read_bytes() == (place(store, 15) / STATE).read_bytes()


def source_of(folder: Path) -> DirectoryCheckpoint:
    """Write a checkpoint of two files with several pieces each."""
    store = DirectoryStore(folder)
    parts = {f"state-{n}": CheckpointFile([bytes([n]) * 1000], (n,)) for n in range(2)}
    store.write(manifest(3), parts)
    found = store.find(3, 1)
    assert found
    return found


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rekindle.checkpoints.verifying.PIECE", 300)
    monkeypatch.setattr(verifying, "PIECE", 300)


def test_one_that_broke_off_goes_on(tmp_path: Path) -> None:
    """An interrupted copy does not count, and the next copy keeps the intact files."""
    source = source_of(tmp_path / "source")
    for stop_after in range(8):
        target = DirectoryStore(tmp_path / f"target{stop_after}")
        counts: list[int] = []

        def tell(count: int, counts: list[int] = counts, last: int = stop_after) -> None:
            if len(counts) == last:
                raise KeyboardInterrupt
            counts.append(count)

        with pytest.raises(KeyboardInterrupt):
            copy(source, target, tell)
        assert target.newest().checkpoint is None
        sent = target.root / "step-0000000003-g000001" / "state-0"
        before = sent.stat().st_ino if stop_after > 4 else None
        again: list[int] = []
        assert not copy(source, target, again.append).existed
        assert before in (None, sent.stat().st_ino)
        assert sum(again) == 2000
        found = target.newest().checkpoint
        assert found
        assert content(found) == content(source)


def test_a_source_that_changes_meanwhile(tmp_path: Path) -> None:
    """If the source changes after its verification, copy() does not commit."""
    source = source_of(tmp_path / "source")
    target = DirectoryStore(tmp_path / "target")
    calls = iter(range(100))

    def tell(_: int) -> None:
        if next(calls) == 1:
            flip(source.path / "state-0", 999)

    with pytest.raises(CorruptError, match="changed during the copy"):
        copy(source, target, tell)
    assert target.keys() == []


def test_another_jobs_place(tmp_path: Path) -> None:
    """copy() does not change the checkpoint of another job."""
    source = source_of(tmp_path / "source")
    target = DirectoryStore(tmp_path / "target")
    target.write(manifest(3, job="other"), {"state-0": CheckpointFile([b"theirs"], (0,))})
    before = tree(target.root)
    with pytest.raises(CheckpointError, match="is a checkpoint of job 'other'"):
        copy(source, target, lambda _: None)
    assert tree(target.root) == before


def test_one_that_was_committed_in_parts(tmp_path: Path) -> None:
    """A copy of a checkpoint with several writers has the ranks of each file."""
    source = DirectoryStore(tmp_path / "source")
    put_parts(source, 4)
    found = source.find(4, 1)
    assert found
    target = DirectoryStore(tmp_path / "target")
    copy(found, target, lambda _: None)
    copied = target.find(4, 1)
    assert copied
    assert copied.manifest == found.manifest


@pytest.fixture
def big(tmp_path: Path) -> Path:
    """Write a checkpoint with four files of 16 MiB."""
    store = DirectoryStore(tmp_path / "big")
    block = os.urandom(1 << 20)
    parts = {f"state-{n}": CheckpointFile([block] * 16, (n,)) for n in range(4)}
    store.write(manifest(3), parts)
    return store.root


def pull(source: Path, target: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "rekindle.cli.main", "checkpoints", "pull", source, target]
    path = str(Path(rekindle.__file__).parents[1])
    return subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.DEVNULL
    )


@pytest.mark.process
def test_killed_again_and_again(big: Path, tmp_path: Path) -> None:
    """The rest of a killed copy does not count, and does not disturb the next copy."""
    target = DirectoryStore(tmp_path / "target")
    folder = target.root / "step-0000000003-g000001"
    for number in range(4):
        process = pull(big, target.root)
        begun = folder / f"state-{number}"
        wait_until(lambda: process.poll() is not None or begun.exists(), f"{begun}")  # noqa: B023
        process.send_signal(signal.SIGKILL)
        status_of(process)
        assert target.newest().checkpoint is None or process.returncode == 0
    assert status_of(pull(big, target.root)) == 0
    assert tree(folder) == tree(big / folder.name)


@pytest.mark.process
def test_two_at_once(big: Path, tmp_path: Path) -> None:
    """If two processes copy to one place, at least one succeeds and the result is complete."""
    target = DirectoryStore(tmp_path / "target")
    processes = [pull(big, target.root) for _ in range(2)]
    statuses = [process.wait() for process in processes]
    assert 0 in statuses
    found = target.newest().checkpoint
    assert found
    assert tree(Path(found.location)) == tree(big / "step-0000000003-g000001")
