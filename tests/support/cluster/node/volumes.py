"""Volumes as folders.

There are no mounts. A mountPath below the kubelet's root becomes a link to the volume.
SIMULATED_MOUNTS (JSON: mountPath to folder) passes all mountPaths to the process. In the command
line and in values of variables, the folder replaces a mountPath at the start of a word.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

from cluster.node.environment import CannotConfigure, Lookup, data, field

Object = dict[str, Any]


class Volumes:
    """The volumes of one pod, in its folder."""

    def __init__(self, root: Path, folder: Path, pod: Object, lookup: Lookup) -> None:
        self._root = root
        self._folder = folder / "volumes"
        self._pod = pod
        self._lookup = lookup
        self._links: list[Path] = []
        self._places: dict[str, Path] = {}

    async def make(self) -> None:
        """Create the folders of the volumes.

        Raises CannotConfigure: a required source does not exist.
        """
        for volume in self._pod["spec"].get("volumes") or []:
            self._places[volume["name"]] = await self._make(volume)

    def mounts(self, container: Object) -> dict[str, str]:
        """Return the folder of each mountPath of a container, and create the possible links."""
        found = {}
        for mount in container.get("volumeMounts") or []:
            source = self._places[mount["name"]] / mount.get("subPath", "")
            if mount.get("subPath") and not source.exists():
                source.mkdir(parents=True)
            found[mount["mountPath"]] = str(source)
            path = Path(mount["mountPath"])
            if path.is_relative_to(self._root) and path != source:
                self._link(path, source)
        return found

    def remove(self) -> None:
        for link in self._links:
            with contextlib.suppress(OSError):
                if str(link.readlink()).startswith(str(self._folder)):
                    link.unlink()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _link(self, path: Path, source: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():
            there = path.readlink()
            if there == source:
                return
            if there.exists() and not _are_equal(there, source):
                raise CannotConfigure(
                    f"{path} is a volume of another pod: there are no mounts here"
                )
            path.unlink()
        elif path.exists():
            raise CannotConfigure(f"{path} is there already")
        path.symlink_to(source)
        self._links.append(path)

    async def _make(self, volume: Object) -> Path:
        folder = self._folder / volume["name"]
        if "hostPath" in volume:
            return Path(volume["hostPath"]["path"])
        if "persistentVolumeClaim" in volume:
            name = volume["persistentVolumeClaim"]["claimName"]
            if await self._lookup("persistentvolumeclaims", name) is None:
                raise CannotConfigure(f'persistentvolumeclaim "{name}" not found')
            folder = self._root / "claims" / self._pod["metadata"]["namespace"] / name
        folder.mkdir(parents=True, exist_ok=True)
        sources = (volume.get("projected") or {}).get("sources") or [volume]
        for source in sources:
            for name, content in (await self._files(source)).items():
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
        return folder

    async def _files(self, source: Object) -> dict[str, bytes]:
        secret = "secretName" if "secretName" in source.get("secret", {}) else "name"
        for kind, name, field_name in (
            ("configMap", "configmaps", "name"),
            ("secret", "secrets", secret),
        ):
            if kind in source:
                wanted = source[kind]
                found = await self._lookup(name, wanted[field_name])
                if found is None and not wanted.get("optional"):
                    raise CannotConfigure(f'{name[:-1]} "{wanted[field_name]}" not found')
                files = data(name, found or {})
                items = wanted.get("items")
                return {each["path"]: files[each["key"]] for each in items} if items else files
        if "downwardAPI" in source:
            return {
                each["path"]: field(self._pod, each["fieldRef"]["fieldPath"]).encode()
                for each in source["downwardAPI"].get("items") or []
            }
        if "serviceAccountToken" in source:
            account = self._pod["spec"].get("serviceAccountName", "default")
            token = await self._lookup("tokens", account)
            return {source["serviceAccountToken"]["path"]: str((token or {}).get("token")).encode()}
        return {}


def _are_equal(one: Path, other: Path) -> bool:
    """Return whether both folders have the same files, for example of two equal ConfigMaps."""
    first = {path.name: path.read_bytes() for path in one.iterdir() if path.is_file()}
    second = {path.name: path.read_bytes() for path in other.iterdir() if path.is_file()}
    return bool(first) and first == second
