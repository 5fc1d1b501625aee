"""Whether calls fit MindSpore's signatures; runs where MindSpore is, not where the tests are.

Reads a JSON object of calls, {name: [arguments by place, names of the others]}, and prints one:
MindSpore's version, of each call that does not fit, why, and what has no signature, being made in
C++: of that no more is known than that it is there.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from typing import Any

BY_PLACE = object()


def found(name: str) -> Any:
    """Return what a dotted name means."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            value = getattr(value, part)
        return value
    raise ModuleNotFoundError(name)


def main() -> None:
    """Check."""
    wrong, without = {}, []
    for name, (places, keywords) in json.load(sys.stdin).items():
        try:
            called = found(name)
            assert callable(called)
            signature = inspect.signature(called)
            signature.bind(*[BY_PLACE] * places, **dict.fromkeys(keywords, BY_PLACE))
        except ValueError:
            without.append(name)
        except Exception as error:
            wrong[name] = f"{type(error).__name__}: {error}"
    version = importlib.import_module("mindspore").__version__
    print("\n" + json.dumps({"version": version, "wrong": wrong, "without": without}))


if __name__ == "__main__":
    main()
