"""The text that a rank runs: a digest of its script and of each module of the script's own code.

Ranks with different texts of a file must not train together. The digests are those of the first
arrival. Modules that a rank loads later do not count, because ranks may load different ones.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from rekindle.rank.error_origin import is_of_library

MOST_BYTES = 32 << 10  # of paths and digests; a message of a rank has at most 128 KiB
_BYTES = 8  # of a digest
_read: dict[str, str] = {}  # the digest of each file, by its path
_skipped: set[str] = set()  # names of modules


def note(path: str) -> None:
    """Read a file that this process runs; only the first call for a path has an effect."""
    path = str(Path(path).absolute())
    if path not in _read:
        try:
            content = Path(path).read_bytes()
        except OSError:  # a module from an archive, or a file that was removed after its import
            return
        _read[path] = hashlib.blake2b(content, digest_size=_BYTES).hexdigest()


def skip_loaded() -> None:
    """Leave out the modules that are loaded now: the fork server has loaded them, not the script.

    With torch they are 2,000. A look at each of them takes 10 ms of every new rank, because the
    rank shares their memory with the fork server until it touches them.
    """
    _skipped.update(sys.modules)


@functools.cache
def digests() -> dict[str, str]:
    """Return the digest of each file by its path. Only the first call reads the modules.

    The script is the first, and the modules follow in the order of their import. Files beyond
    MOST_BYTES are left out, and so is a path that is not UTF-8.
    """
    for _, file, _ in own_modules():
        note(file)
    found, size = dict[str, str](), 0
    for path, digest in _read.items():
        size += len(os.fsencode(path)) + len(digest)
        if size > MOST_BYTES:
            break
        if path == path.encode(errors="replace").decode():
            found[path] = digest
    return found


def own_modules() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield name, file and variables of each module of the script, in the order of their import."""
    for name, module in _new_modules():
        # isinstance() trusts __class__, and libraries of cffi have a wrong one.
        if name not in _skipped and issubclass(type(module), ModuleType):
            # getattr() would import a module that is loaded at its first use.
            variables = ModuleType.__getattribute__(module, "__dict__")
            file = variables.get("__file__")
            if isinstance(file, str) and file and not is_of_library(name, file):
                yield name, file, variables


def _new_modules() -> list[tuple[str, ModuleType]]:
    """Return the modules after the skipped ones, in the order of their import.

    All modules, if the script has removed a skipped one or has loaded it again.
    """
    count = max(len(sys.modules) - len(_skipped), 0)
    newest = list(itertools.islice(reversed(sys.modules.items()), count + 1))
    if [name in _skipped for name, _ in newest] == [*[False] * count, True]:
        return newest[-2::-1]
    return list(sys.modules.items())
