"""Check whether calls match MindSpore's signatures. The program runs in MindSpore's environment.

It reads a JSON object of calls, {name: [number of positional arguments, names of keyword
arguments]}. It prints a JSON object: MindSpore's version, the error of each call that does not
match, and the names without a signature. Functions in C++ have no signature; for them it checks
only the existence.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from typing import Any

BY_PLACE = object()


def found(name: str) -> Any:
    """Return the object with a dotted name.

    Raises ModuleNotFoundError: no module has this name.
    """
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
    """Check all calls on standard input and print the result."""
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
