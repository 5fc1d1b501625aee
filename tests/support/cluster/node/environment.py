"""The environment variables and the command line of a container's process."""

from __future__ import annotations

import base64
import os
import re
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

Object = dict[str, Any]
K = TypeVar("K")
# Returns the object of a kind (configmaps, secrets) and name, or None.
Lookup = Callable[[str, str], Awaitable[Object | None]]

_GUEST = Path(__file__).parents[1] / "guest"
_REFERENCE = re.compile(r"\$\$|\$\(([^)\s]+)\)")
_KEYED = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")


class CannotConfigure(Exception):
    """An object that the container needs is missing."""


def expand(text: str, values: dict[str, str]) -> str:
    """Replace $(NAME) by its value if the value is known, and $$ by $."""

    def replacement(found: re.Match[str]) -> str:
        if found.group() == "$$":
            return "$"
        return values.get(found.group(1), found.group())

    return _REFERENCE.sub(replacement, text)


def command(container: Object, values: dict[str, str]) -> list[str]:
    words = [*(container.get("command") or []), *(container.get("args") or [])]
    return [expand(word, values) for word in words]


def field(pod: Object, path: str) -> str:
    """Return the value of a fieldRef.

    Raises CannotConfigure: the path is not supported.
    """
    metadata, spec, status = pod["metadata"], pod["spec"], pod["status"]
    if found := _KEYED.fullmatch(path):
        return str((metadata.get(found.group(1)) or {}).get(found.group(2), ""))
    values = {
        "metadata.name": metadata["name"],
        "metadata.namespace": metadata["namespace"],
        "metadata.uid": metadata["uid"],
        "spec.nodeName": spec.get("nodeName", ""),
        "spec.serviceAccountName": spec.get("serviceAccountName", ""),
        "status.podIP": status.get("podIP", ""),
        "status.podIPs": status.get("podIP", ""),
        "status.hostIP": status.get("hostIP", ""),
        "status.hostIPs": status.get("hostIP", ""),
    }
    if path not in values:
        raise CannotConfigure(f"field label not supported: {path}")
    return str(values[path])


def data(kind: str, thing: Object) -> dict[str, bytes]:
    """Return the files that a ConfigMap or a Secret contains."""
    if kind == "secrets":
        return {name: base64.b64decode(text) for name, text in (thing.get("data") or {}).items()}
    files = {name: text.encode() for name, text in (thing.get("data") or {}).items()}
    binary = thing.get("binaryData") or {}
    return files | {name: base64.b64decode(text) for name, text in binary.items()}


async def variables(pod: Object, container: Object, lookup: Lookup) -> dict[str, str]:
    """Return the variables from env and envFrom of the container.

    Raises CannotConfigure: a required object or key is missing.
    """
    values: dict[str, str] = {}
    for source in container.get("envFrom") or []:
        for kind, name in (("configMapRef", "configmaps"), ("secretRef", "secrets")):
            if reference := source.get(kind):
                found = await lookup(name, reference["name"])
                if found is None and not reference.get("optional"):
                    raise CannotConfigure(f'{name[:-1]} "{reference["name"]}" not found')
                prefix = source.get("prefix", "")
                for key, value in data(name, found or {}).items():
                    values[prefix + key] = value.decode(errors="replace")
    for variable in container.get("env") or []:
        source = variable.get("valueFrom")
        if source is None:
            values[variable["name"]] = expand(variable.get("value", ""), values)
            continue
        value = await _from(pod, source, lookup)
        if value is not None:
            values[variable["name"]] = value
    return values


def mounted(words: dict[K, str], mounts: dict[str, str]) -> dict[K, str]:
    """Replace a mountPath at the start of a word or value by the folder of the volume."""
    return {key: _mounted(word, mounts) for key, word in words.items()}


def _mounted(word: str, mounts: dict[str, str]) -> str:
    for path in sorted(mounts, key=len, reverse=True):
        if word == path or word.startswith(f"{path}/"):
            return mounts[path] + word[len(path) :]
    return word


def base(pod: Object, root: Path) -> dict[str, str]:
    """Return variables that an image would set, and those of the pod's simulated network."""
    kept = {name: os.environ[name] for name in ("LANG", "LC_ALL") if name in os.environ}
    # The programs of the image are the programs next to this Python interpreter, even if PATH does
    # not contain them.
    path = (str(Path(sys.executable).parent), os.environ.get("PATH", ""))
    paths = (str(_GUEST), os.environ.get("PYTHONPATH", ""))
    return {
        **kept,
        "PATH": os.pathsep.join(filter(None, path)),
        "HOSTNAME": pod["spec"].get("hostname") or pod["metadata"]["name"],
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "SIMULATED_ADDRESS": (pod.get("status") or {}).get("podIP", ""),
        "SIMULATED_SERVICES": str(root / "services.json"),
    }


async def _from(pod: Object, source: Object, lookup: Lookup) -> str | None:
    if "fieldRef" in source:
        return field(pod, source["fieldRef"]["fieldPath"])
    for kind, name in (("configMapKeyRef", "configmaps"), ("secretKeyRef", "secrets")):
        if reference := source.get(kind):
            found = await lookup(name, reference["name"])
            files = data(name, found or {})
            if reference["key"] in files:
                return files[reference["key"]].decode(errors="replace")
            if reference.get("optional"):
                return None
            if found is None:
                raise CannotConfigure(f'{name[:-1]} "{reference["name"]}" not found')
            raise CannotConfigure(f"couldn't find key {reference['key']} in {reference['name']}")
    raise CannotConfigure(f"not supported: {', '.join(source)}")
