"""Finds who raised an error: the script, or a library. See docs/decisions/023.

The code of the script is that of its main module, of the package of `-m`, and of other files
outside of the installed packages and the standard library.
"""

from __future__ import annotations

import opcode
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from rekindle import names

# A `raise` or an `assert` ends with this instruction. An error of compiled code ends with a call.
_RAISE = opcode.opmap["RAISE_VARARGS"]
# The standard library, and this package, which may be a checkout.
_LIBRARIES = tuple(f"{Path(file).parent}{os.sep}" for file in (os.__file__, names.__file__))
_INSTALLED = {"site-packages", "dist-packages"}  # folders of installed packages
_FRAMEWORKS = {"torch", "torch_npu", "mindspore"}  # also in a folder of their own
# Types that Python raises for mistakes in a program.
_MISTAKES = (
    *(TypeError, NameError, AttributeError, LookupError, ValueError, AssertionError),
    *(ArithmeticError, ImportError, SyntaxError, NotImplementedError, FileNotFoundError),
)


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, then each error that it came from: a script may wrap an error."""
    visited: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in visited:
        visited.add(id(each))
        yield each
        each = each.__cause__ or each.__context__


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors of the chain, up to a mistake in the script's handling of an error.

    `raise ... from` names a cause. Without it, a KeyError after another error is a mistake of its
    own. An error that nothing has raised is not a cause.
    """
    for each in chain_of(error):
        if each is error or each.__traceback__ is not None:
            yield each
        if isinstance(each, _MISTAKES) and each.__cause__ is None:
            return


def is_of_script(error: BaseException) -> bool:
    """Return whether the script raised the error, and no system error caused it."""
    return is_raised_by_script(error) and all(
        is_raised_by_script(each) or isinstance(each, _MISTAKES)
        for each in causes_of(error)
        if isinstance(each, (RuntimeError, OSError))
    )


def is_raised_by_script(error: BaseException) -> bool:
    """Return whether a `raise` or `assert` statement of the script raised this error.

    False if a library raised it, or if the error has no traceback.
    """
    frames = error.__traceback__
    if frames is None:
        return False
    while frames.tb_next is not None:
        frames = frames.tb_next
    at = frames.tb_lasti  # below 0 for Cython's frames in Python 3.10, which have no instructions
    instruction = frames.tb_frame.f_code.co_code[max(at, 0) : at + 1]
    return instruction == bytes((_RAISE,)) and not _is_of_library(frames.tb_frame)


def _is_of_library(frame: FrameType) -> bool:
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    if package in ("__main__", _package_of_script()):
        return False
    file = frame.f_code.co_filename
    return package in _FRAMEWORKS or bool(
        file.startswith(("<", *_LIBRARIES)) or _INSTALLED.intersection(Path(file).parts)
    )


def _package_of_script() -> str | None:
    """Return the package of `-m package.module`; None for a script."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec.name.partition(".")[0] if spec is not None else None
