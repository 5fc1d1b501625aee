"""How much is written down, and how often: TaskD's figures, unless the environment says others."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import msgspec

from rekindle import names

MEBIBYTE = 1024 * 1024
MOST_FLUSH_S = 3600.0
_MOST_MB = 10**9


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """cap_bytes: of all files. file_bytes: of one, from which on another is begun.

    flush_s: between two times that a rank writes; as much is lost of one that is killed.
    """

    cap_bytes: int = 5000 * MEBIBYTE
    file_bytes: int = 10 * MEBIBYTE
    flush_s: float = 5.0


def limits_in(environment: Mapping[str, str]) -> Limits:
    """Return what the environment says; what is no figure there is said, and left out.

    Nobody's training may end for how much is known about it.
    """
    usual = Limits()
    cap = _figure(environment, names.ENV_PROFILING_CAP_MB, usual.cap_bytes / MEBIBYTE, _MOST_MB)
    file = _figure(environment, names.ENV_PROFILING_FILE_MB, usual.file_bytes / MEBIBYTE, _MOST_MB)
    flush_s = _figure(environment, names.ENV_PROFILING_FLUSH_S, usual.flush_s, MOST_FLUSH_S)
    return Limits(cap_bytes=int(cap * MEBIBYTE), file_bytes=int(file * MEBIBYTE), flush_s=flush_s)


def _figure(environment: Mapping[str, str], name: str, usual: float, most: float) -> float:
    text = environment.get(name, "")
    if not text:
        return usual
    try:
        figure = float(text)
    except ValueError:
        figure = 0.0
    if 0 < figure <= most:  # which nan is not
        return figure
    why = f"{name} is {text!r}, no number above 0 up to {most:g}: {usual:g} is taken"
    print(f"rekindle: {why}", file=sys.stderr, flush=True)
    return usual
