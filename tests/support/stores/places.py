"""The files of a store of any kind, which tests inspect and damage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rekindle.checkpoints.location import S3Location, parse
from rekindle.checkpoints.open_store import open_store
from rekindle.checkpoints.store import CheckpointStore
from stores.servers import BUCKET, Server

LOCK = ".lock"


class Place(ABC):
    """The files or objects of a store by name, including manifests.

    `creates_once`: if two writers commit one step at the same time, the store reports success to
    only one of them.
    """

    def __init__(self, location: str, *, creates_once: bool = True) -> None:
        self.location = location
        self.creates_once = creates_once

    def open(self) -> CheckpointStore:
        return open_store(self.location)

    def tree(self) -> dict[str, bytes]:
        """Return the content of all files."""
        return {name: self.get(name) for name in self.names()}

    def files(self, step: int, generation: int = 1) -> list[str]:
        """Return the names of a checkpoint's files, the manifest first."""
        start = f"step-{step:010d}-g{generation:06d}/"
        found = [name for name in self.names() if name.startswith(start)]
        return sorted(found, key=lambda name: (not name.endswith("manifest.json"), name))

    @abstractmethod
    def names(self) -> list[str]: ...

    @abstractmethod
    def get(self, name: str) -> bytes: ...

    @abstractmethod
    def put(self, name: str, data: bytes) -> None: ...

    @abstractmethod
    def delete(self, name: str) -> None: ...

    def unfinished_uploads(self) -> list[str]:
        return []


class DirectoryPlace(Place):
    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self._root = root

    def names(self) -> list[str]:
        found = (path for path in self._root.rglob("*") if path.is_file() and path.name != LOCK)
        return sorted(str(path.relative_to(self._root)) for path in found)

    def get(self, name: str) -> bytes:
        return (self._root / name).read_bytes()

    def put(self, name: str, data: bytes) -> None:
        (self._root / name).parent.mkdir(parents=True, exist_ok=True)
        (self._root / name).write_bytes(data)

    def delete(self, name: str) -> None:
        (self._root / name).unlink()


class S3Place(Place):
    def __init__(self, server: Server, client: Any, *, creates_once: bool = True) -> None:
        super().__init__(server.location(), creates_once=creates_once)
        where = parse(self.location)
        assert isinstance(where, S3Location)
        self.prefix = where.root
        self.client = client

    def names(self) -> list[str]:
        return sorted(name.removeprefix(self.prefix) for name in self._keys())

    def _keys(self) -> Iterator[str]:
        pages = self.client.get_paginator("list_objects_v2")
        for page in pages.paginate(Bucket=BUCKET, Prefix=self.prefix):
            yield from (found["Key"] for found in page.get("Contents", ()))

    def get(self, name: str) -> bytes:
        answer = self.client.get_object(Bucket=BUCKET, Key=self.prefix + name)
        data: bytes = answer["Body"].read()
        return data

    def put(self, name: str, data: bytes) -> None:
        self.client.put_object(Bucket=BUCKET, Key=self.prefix + name, Body=data)

    def delete(self, name: str) -> None:
        self.client.delete_object(Bucket=BUCKET, Key=self.prefix + name)

    def unfinished_uploads(self) -> list[str]:
        try:
            answer = self.client.list_multipart_uploads(Bucket=BUCKET, Prefix=self.prefix)
        except self.client.exceptions.NoSuchUpload:  # rclone's answer for a bucket without uploads
            return []
        return [found["Key"] for found in answer.get("Uploads", ())]
