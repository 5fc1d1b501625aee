"""Checkpoints that tests write and read, in this process and in child processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
from hypothesis import strategies as st

import rekindle
from rekindle.checkpoints.format import plan_layout, write_header
from rekindle.checkpoints.manifest import FileEntry, Manifest
from rekindle.checkpoints.open_store import open_pointer
from rekindle.checkpoints.publishing import LATEST_FILE, Latest
from rekindle.checkpoints.store import (
    Checkpoint,
    CheckpointFile,
    CheckpointStore,
    Written,
    read_file,
)

LOCK = ".lock"

# Arbitrary texts and JSON values for the content of a file.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**70) | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)

# The start of a child process that writes the same checkpoints as the tests.
CHILD = """
import itertools, os, resource, signal, sys
from pathlib import Path
from rekindle.checkpoints import files
from rekindle.checkpoints.open_store import open_store
from rekindle.checkpoints.store import CheckpointFile
from rekindle.checkpoints.manifest import Manifest
from rekindle.checkpoints.retention import Retention
from rekindle.errors import CheckpointError

store = open_store(sys.argv[1])

def manifest(step):
    return Manifest(job_id="job", step=step, generation=1, world_size=2, framework="torch",
                    created=0.0, writer=str(os.getpid()), rekindle="0")

def parts(byte, size):
    data = bytes([byte]) * size
    return {f"state-{i}.safetensors": CheckpointFile([data], (i,)) for i in range(2)}
"""

# The start of a child process that kills itself before the system call with a given number.
CRASH_AT = """
files._PIECE = 400

def crash_at(call):
    def profile(frame, event, function):
        nonlocal call
        if event == "c_call" and function.__module__ in ("posix", "fcntl"):
            call -= 1
            if call < 0:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.setprofile(profile)
"""


def manifest(step: int, generation: int = 1, job: str = "job") -> Manifest:
    return Manifest(
        job_id=job,
        step=step,
        generation=generation,
        world_size=2,
        framework="torch",
        data_position={"seen": step},
        created=1.5,
        writer="test",
        rekindle="0",
    )


def shard(value: int) -> memoryview:
    """Return a small safetensors file in the format of a snapshot."""
    layout = plan_layout([("w", "U8", (4,))], 2)
    buffer = memoryview(bytearray([value]) * layout.total_bytes)
    write_header(layout, {}, buffer)
    return buffer


def put(store: CheckpointStore, step: int, generation: int = 1) -> Written:
    """Write a checkpoint of two files whose content depends on the step."""
    parts = {f"state-{i}.safetensors": CheckpointFile([shard(step + i)], (i,)) for i in range(2)}
    return store.write(manifest(step, generation), parts)


def write_parts(
    store: CheckpointStore, step: int, generation: int = 1, size: int = 200
) -> tuple[FileEntry, ...]:
    """Write two parts whose content depends on step, generation and rank."""
    return tuple(
        store.write_part(step, generation, f"state-{rank}", CheckpointFile([data], (rank,)))
        for rank in range(2)
        for data in [bytes([step, generation, rank]).ljust(size, b".")]
    )


def with_files(step: int, files: tuple[FileEntry, ...], generation: int = 1) -> Manifest:
    return msgspec.structs.replace(manifest(step, generation), files=files)


def put_parts(store: CheckpointStore, step: int, generation: int = 1) -> Written:
    return store.commit(with_files(step, write_parts(store, step, generation), generation))


def newest_step(store: CheckpointStore) -> int | None:
    found = store.newest().checkpoint
    return found.manifest.step if found else None


def content(checkpoint: Checkpoint) -> dict[str, bytes]:
    return {
        entry.name: bytes(read_file(checkpoint, entry.name)) for entry in checkpoint.manifest.files
    }


def tree(path: Path) -> dict[str, bytes]:
    """Return the content of each file below a folder, by its path."""
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def child(script: str, location: object, *arguments: object) -> subprocess.Popen[str]:
    """Start a Python process that runs the script after CHILD."""
    source = str(Path(rekindle.__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, "-c", CHILD + script, str(location), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": source},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def run_child(script: str, location: object, *arguments: object) -> str:
    process = child(script, location, *arguments)
    output, _ = process.communicate()
    assert process.returncode == 0
    return output


def latest_at(location: str, environment: Mapping[str, str] = os.environ) -> Latest | None:
    """Return the latest publication at this location, or None if there is none."""
    data = open_pointer(location, LATEST_FILE, environment).read()
    return None if data is None else msgspec.json.decode(data, type=Latest)
