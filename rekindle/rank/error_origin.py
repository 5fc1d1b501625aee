"""Finds who raised an error: the script, or a library. See docs/decisions/023.

The code of the script is that of its main module, of the package of `-m`, and of other files
outside of the installed packages and the standard library.
"""

from __future__ import annotations

import opcode
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from rekindle import names

# A `raise` or an `assert` ends with this instruction. An error of compiled code ends with a call.
_RAISE = opcode.opmap["RAISE_VARARGS"]
# The standard library, and this package, which may be a checkout.
_LIBRARIES = tuple(f"{Path(file).parent}{os.sep}" for file in (os.__file__, names.__file__))
_INSTALLED = {"site-packages", "dist-packages"}  # folders of installed packages
_FRAMEWORKS = {"torch", "torch_npu", "mindspore"}  # also in a folder of their own
_OF_PYTHON = {"sitecustomize", "usercustomize"}  # Python imports them before each program
# Types that Python raises for mistakes in a program.
_MISTAKES = (
    *(TypeError, NameError, AttributeError, LookupError, ValueError, AssertionError),
    *(ArithmeticError, ImportError, SyntaxError, NotImplementedError, FileNotFoundError),
)
# Errors of a script's worker processes, which torch and Python raise again in the rank.
_OF_LOADER = re.compile(r"Caught \w+ in DataLoader worker process")
_OF_POOL = {"RemoteTraceback", "_RemoteTraceback"}  # the causes of such errors
# Types by which Python reports a fault of the system, also if a script raises them.
_SYSTEM_ERRORS = (OSError, MemoryError)


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, then each error that it came from: a script may wrap an error."""
    visited: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in visited:
        visited.add(id(each))
        yield each
        each = each.__cause__ or each.__context__


def all_of(error: BaseException) -> list[BaseException]:
    """Return the error and each error that it holds, as cause or as context, directly or not."""
    found: list[BaseException] = []
    waiting = [error]
    while waiting:
        each = waiting.pop()
        if not any(each is known for known in found):
            found.append(each)
            waiting += filter(None, (each.__cause__, each.__context__))
    return found


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


def is_text_of_script(error: BaseException) -> bool:
    """Return whether the script chose the text of this error, so that it reports no system fault.

    False if a library raised the error, if a system error caused it, or if its type is one of
    Python's system errors, a library's, or a subclass of one of these.
    """
    kinds = [kind for kind in type(error).__mro__ if issubclass(kind, BaseException)]
    return is_of_script(error) and not any(
        kind in _SYSTEM_ERRORS or is_of_library(str(kind.__module__), _file_of(kind))
        for kind in kinds
    )


def is_of_script(error: BaseException) -> bool:
    """Return whether the script raised the error, and no system error caused it."""
    return is_raised_by_script(error) and all(
        is_raised_by_script(each) or isinstance(each, _MISTAKES)
        for each in causes_of(error)
        if isinstance(each, (RuntimeError, *_SYSTEM_ERRORS))
    )


def is_raised_by_script(error: BaseException) -> bool:
    """Return whether a `raise` or `assert` statement of the script raised this error.

    The script's worker processes belong to it. False if a library raised the error, or if it has no
    traceback.
    """
    frames = error.__traceback__
    if frames is None:
        return False
    if _is_of_worker(error):
        return True
    while frames.tb_next is not None:
        frames = frames.tb_next
    at = frames.tb_lasti  # below 0 for Cython's frames in Python 3.10, which have no instructions
    instruction = frames.tb_frame.f_code.co_code[max(at, 0) : at + 1]
    if instruction != bytes((_RAISE,)):
        return False
    code, module = frames.tb_frame.f_code, frames.tb_frame.f_globals.get("__name__", "")
    return not is_of_library(str(module), code.co_filename)


def _is_of_worker(error: BaseException) -> bool:
    text = error.args[0] if error.args else ""
    of_loader = isinstance(text, str) and _OF_LOADER.match(text) is not None
    return of_loader or type(error.__cause__).__name__ in _OF_POOL


def _file_of(kind: type) -> str:
    """Return the file that defines a type; an empty text for a built-in type."""
    return getattr(sys.modules.get(str(kind.__module__)), "__file__", None) or ""


def is_of_library(module: str, file: str) -> bool:
    """Return whether code or a type of this module and file belongs to a library."""
    package = module.partition(".")[0]
    if package in ("__main__", _package_of_script()):
        return False
    return package in (*_FRAMEWORKS, *_OF_PYTHON) or bool(
        file.startswith(("<", *_LIBRARIES)) or _INSTALLED.intersection(Path(file).parts)
    )


def _package_of_script() -> str | None:
    """Return the package of `-m package.module`; None for a script."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec.name.partition(".")[0] if spec is not None else None
