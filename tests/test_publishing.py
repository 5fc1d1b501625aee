"""A published checkpoint: verified, once, with a reference that stays."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from rekindle.checkpoints.directory import DirectoryStore
from rekindle.checkpoints.manifest import Manifest
from rekindle.checkpoints.publishing import publish
from rekindle.checkpoints.store import Checkpoint, Part
from rekindle.errors import CorruptError


def written(root: Path, job_id: str = "job", step: int = 7) -> Checkpoint:
    """A checkpoint of two files in a store."""
    manifest = Manifest(
        job_id=job_id,
        step=step,
        generation=2,
        world_size=2,
        framework="torch",
        created=time.time(),
        writer="test",
        rekindle="0",
    )
    parts = {
        f"rank-{rank}.safetensors": Part([np.arange(100, dtype=np.uint8).data], (rank,))
        for rank in range(2)
    }
    store = DirectoryStore(root)
    store.write(manifest, parts)
    found = store.newest().checkpoint
    assert found is not None
    return found


def test_it_is_a_copy_with_a_reference(tmp_path: Path) -> None:
    """It outlives the job's own checkpoints."""
    source = written(tmp_path / "store")
    published = publish(source, tmp_path / "published")
    assert not published.existed
    assert published.path.is_relative_to(tmp_path / "published" / "job")
    assert published.reference.startswith(f"{published.path}#xxh3_128:")
    (source.path / "manifest.json").unlink()
    again = DirectoryStore(published.path.parent).newest().checkpoint
    assert again is not None
    assert again.manifest.step == 7


def test_twice_is_once(tmp_path: Path) -> None:
    """The same reference, and nothing is written."""
    source = written(tmp_path / "store")
    first = publish(source, tmp_path / "published")
    second = publish(source, tmp_path / "published")
    assert second.existed
    assert (second.reference, second.path) == (first.reference, first.path)


def test_a_damaged_copy_is_made_again(tmp_path: Path) -> None:
    """With the reference that it had."""
    source = written(tmp_path / "store")
    first = publish(source, tmp_path / "published")
    victim = next(first.path.glob("*.safetensors"))
    victim.write_bytes(b"x" * victim.stat().st_size)
    second = publish(source, tmp_path / "published")
    assert (second.existed, second.reference) == (False, first.reference)


def test_what_is_damaged_is_not_published(tmp_path: Path) -> None:
    """However it came to be after it was found."""
    source = written(tmp_path / "store")
    victim = next(source.path.glob("*.safetensors"))
    victim.write_bytes(b"x" * victim.stat().st_size)
    with pytest.raises(CorruptError):
        publish(source, tmp_path / "published")
    assert not list((tmp_path / "published").rglob("manifest.json"))


def test_jobs_do_not_meet(tmp_path: Path) -> None:
    """Two nights' runs reach the same step."""
    both = [
        publish(written(tmp_path / name, job_id=name), tmp_path / "published")
        for name in ("monday", "tuesday")
    ]
    assert both[0].path != both[1].path
    assert both[0].reference != both[1].reference
