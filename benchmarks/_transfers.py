"""Compare uploads to an S3 server and restores from it with rclone, in turn with the same bytes.

rclone provides the server, on this machine. Both restores end in memory: rclone writes to a file in
a memory file system.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from _common import summary

from rekindle.checkpoints.manifest import Manifest
from rekindle.checkpoints.open_store import open_store
from rekindle.checkpoints.retention import Retention
from rekindle.checkpoints.store import CheckpointFile
from rekindle.names import ENV_STORE_ACCESS_KEY_ID, ENV_STORE_SECRET_ACCESS_KEY

RCLONE = Path(sys.executable).parent / "rclone"
BUCKET, KEY, SECRET = "checkpoints", "benchmark", secrets.token_hex(16)
FILE = "state.safetensors"
UP_S = 30.0


def have_rclone() -> bool:
    """Return whether rclone is installed for the comparison."""
    return RCLONE.exists()


def transfers(folder: Path, megabytes: int, rounds: int) -> dict[str, dict[str, float | int]]:
    """Return the milliseconds of each way: Rekindle and rclone, up and down.

    The order alternates: after large files the machine has only the last ones in its page cache.
    """
    folder.mkdir(parents=True)
    source = folder / "source"
    with source.open("wb") as made:
        for _ in range(megabytes):
            made.write(os.urandom(1_000_000))
    took: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], Any]) -> None:
        begin = time.perf_counter()
        work()
        took.setdefault(name, []).append((time.perf_counter() - begin) * 1000)

    memory = tempfile.TemporaryDirectory(dir="/dev/shm")
    with _server(folder / "served") as port, memory as restored, source.open("rb") as file:
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        location = f"s3://{BUCKET}/job?endpoint=http://127.0.0.1:{port}&addressing=path"
        keys = {ENV_STORE_ACCESS_KEY_ID: KEY, ENV_STORE_SECRET_ACCESS_KEY: SECRET}
        store = open_store(location, keys)
        remote = f":s3,provider=Rclone,endpoint='http://127.0.0.1:{port}',access_key_id={KEY},"
        remote += f"secret_access_key={SECRET}:{BUCKET}/peer"

        def read(step: int) -> None:
            checkpoint = store.find(step, 1)
            assert checkpoint is not None
            checkpoint.read(FILE)

        for step in range(1, rounds + 1):
            there, back = f"{remote}/{step}", f"{restored}/state"
            up: list[tuple[str, Callable[[], Any]]] = [
                (
                    "upload",
                    partial(store.write, _manifest(step), {FILE: CheckpointFile([data], (0,))}),
                ),
                ("upload_rclone", partial(_rclone, "copyto", str(source), there)),
            ]
            down: list[tuple[str, Callable[[], Any]]] = [
                ("restore", partial(read, step)),
                ("restore_rclone", partial(_rclone, "copyto", there, back)),
            ]
            for ways in (up, down):
                for name, work in ways if step % 2 else reversed(ways):
                    timed(name, work)
            Path(back).unlink()  # rclone would not fetch a file that exists
            store.prune(Retention(last=1))
            _rclone("deletefile", there)
    shutil.rmtree(folder)
    return {name: summary(each) for name, each in took.items()}


def _manifest(step: int) -> Manifest:
    return Manifest(
        job_id="benchmark",
        step=step,
        generation=1,
        world_size=1,
        framework="torch",
        created=time.time(),
        writer="benchmark",
        rekindle="0",
    )


def _rclone(*arguments: str) -> None:
    command = [str(RCLONE), "--config", "", *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@contextlib.contextmanager
def _server(root: Path) -> Iterator[int]:
    """Run an S3 server for this folder, and yield its port."""
    (root / BUCKET).mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    command = [str(RCLONE), "serve", "s3", "--config", "", "--addr", f"127.0.0.1:{port}"]
    command += ["--auth-key", f"{KEY},{SECRET}", str(root)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + UP_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            if server.poll() is not None or time.monotonic() > deadline:
                sys.exit("rclone's server did not start")
            time.sleep(0.05)
        yield port
    finally:
        server.kill()
        server.wait()
