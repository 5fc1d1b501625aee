"""The text that a rank runs: a digest of its script and of each module of the script's own code.

Ranks with different texts of a file must not train together. The digests are those of the first
arrival. Modules that a rank loads later do not count, because ranks may load different ones.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from rekindle.rank.error_origin import is_of_library

MOST_BYTES = 32 << 10  # of paths and digests; a message of a rank has at most 128 KiB
_BYTES = 8  # of a digest
_read: dict[str, str] = {}  # the digest of each file, by its path


def note(path: str) -> None:
    """Read a file that this process runs; only the first call for a path has an effect."""
    path = str(Path(path).absolute())
    if path not in _read:
        try:
            content = Path(path).read_bytes()
        except OSError:  # a module from an archive, or a file that was removed after its import
            return
        _read[path] = hashlib.blake2b(content, digest_size=_BYTES).hexdigest()


@functools.cache
def digests() -> dict[str, str]:
    """Return the digest of each file by its path. Only the first call reads the modules.

    The script is the first, and the modules follow in the order of their import. Files beyond
    MOST_BYTES are left out, and so is a path that is not UTF-8.
    """
    for file in _own_files():
        note(file)
    found, size = dict[str, str](), 0
    for path, digest in _read.items():
        size += len(os.fsencode(path)) + len(digest)
        if size > MOST_BYTES:
            break
        if path == path.encode(errors="replace").decode():
            found[path] = digest
    return found


def _own_files() -> Iterator[str]:
    for name, module in list(sys.modules.items()):
        # isinstance() trusts __class__, and libraries of cffi have a wrong one.
        if issubclass(type(module), ModuleType):
            # getattr() would import a module that is loaded at its first use.
            file = ModuleType.__getattribute__(module, "__dict__").get("__file__")
            if isinstance(file, str) and not is_of_library(name, file):
                yield file
