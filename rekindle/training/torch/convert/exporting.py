"""A state as torch's users know it: nested state dicts of whole tensors.

{"model": ..., "optimizer": ..., ..., "step": 100}
"""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from rekindle.checkpoints.files import explained, sync_directory
from rekindle.errors import CheckpointError, UsageError

STEP = "step"
# What only a skeleton tells: torch's DCP makes texts of whole numbers that are keys.
REKINDLE = "rekindle"


def check_out(out: Path) -> None:
    """Raise UsageError if nothing can be made at this path."""
    if out.exists():
        raise UsageError(f"there is something at {out}: remove it, or give another name")
    if not out.parent.is_dir():
        raise UsageError(f"there is no folder {out.parent}; make it first")


def save_torch(states: Mapping[str, Any], step: int, out: Path) -> None:
    """Write a file for torch.load(weights_only=True); it appears when it is whole.

    Raises UsageError: there is something in its place. CheckpointError: it cannot be written.
    """
    with _appearing(out) as path:
        torch.save({**states, STEP: step}, path)
        with path.open("rb") as file:
            os.fsync(file.fileno())


def save_dcp(states: Mapping[str, Any], step: int, skeleton: str, out: Path) -> None:
    """Write a folder for torch.distributed.checkpoint; it appears when it is whole.

    Raises UsageError: there is something in its place. CheckpointError: it cannot be written.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    with _appearing(out) as path, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            save(
                {**states, STEP: step, REKINDLE: skeleton},
                storage_writer=FileSystemWriter(path),
                no_dist=True,
            )
        except ValueError as error:  # two names that DCP does not tell apart
            raise CheckpointError(f"DCP cannot hold this state: {error}") from error


@contextlib.contextmanager
def _appearing(out: Path) -> Iterator[Path]:
    """A path beside `out` to write to; it is renamed when that is done, else removed."""
    check_out(out)
    path = out.with_name(f".{out.name}.{os.getpid()}")
    with explained("write", out):
        try:
            yield path
            path.rename(out)
            sync_directory(out.parent)
        except RuntimeError as error:  # torch's writer tells of a full disk so
            raise CheckpointError(f"cannot write {out}: {error}") from error
        finally:
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
