"""`rekindle checkpoints pull` and `export` of published checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch
from checkpoint_commands import Checkpoints, flip, place
from stores import content

from rekindle.checkpoints.directory import DirectoryStore
from rekindle.checkpoints.publishing import publish


def published(store: DirectoryStore, to: Path) -> str:
    found = store.newest().checkpoint
    assert found is not None
    return publish(found, str(to)).reference


def test_pull(store: DirectoryStore, tmp_path: Path, checkpoints: Checkpoints) -> None:
    """`pull` copies the checkpoint of a reference."""
    reference = published(store, tmp_path / "a place")
    assert ": copied: " in checkpoints("pull", reference, "kept").out
    here, there = DirectoryStore(tmp_path / "kept").newest(), store.newest()
    assert here.checkpoint
    assert there.checkpoint
    assert content(here.checkpoint) == content(there.checkpoint)


def test_export(store: DirectoryStore, tmp_path: Path, checkpoints: Checkpoints) -> None:
    """`export` writes the checkpoint of a reference for torch.load."""
    reference = published(store, tmp_path / "out")
    assert checkpoints("export", reference, "state.pt", "--format", "torch").status == 0
    assert torch.load(tmp_path / "state.pt", weights_only=True)["step"] == 15


def test_what_was_changed_is_refused(
    store: DirectoryStore, tmp_path: Path, checkpoints: Checkpoints
) -> None:
    """`pull` refuses a changed checkpoint, and does not copy an older one instead."""
    reference = published(store, tmp_path / "out")
    [folder] = (tmp_path / "out").rglob("step-*")
    flip(next(folder.glob("*.safetensors")), -1)
    done = checkpoints("pull", reference, "kept")
    assert (done.status, "is damaged" in done.err) == (1, True)
    assert not (tmp_path / "kept").exists()
    done = checkpoints("pull", reference[:-1] + ("0" if reference[-1] != "0" else "1"), "kept")
    assert (done.status, "has changed since it was published" in done.err) == (1, True)
    done = checkpoints("pull", reference, "kept", "--step", 15)
    assert (done.status, "leave out --step" in done.err) == (2, True)
    assert place(store, 15).exists()
