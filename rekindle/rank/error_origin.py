"""Finds the statement that raised an error: one of the script, or one of an installed package."""

from __future__ import annotations

import opcode
import os
from pathlib import Path

from rekindle import names

# A `raise` or an `assert` ends with this instruction. An error of C++ code ends with a call.
_RAISE = opcode.opmap["RAISE_VARARGS"]
# The standard library, and this package, which may be a checkout.
_LIBRARIES = tuple(f"{Path(file).parent}{os.sep}" for file in (os.__file__, names.__file__))
_INSTALLED = {"site-packages", "dist-packages"}  # folders of installed packages


def is_raised_by_script(error: BaseException) -> bool:
    """Return whether a `raise` or `assert` statement of the script raised the error.

    False if an installed package, C++ code, or code without a file raised it, or if the error has
    no traceback.
    """
    frames = error.__traceback__
    if frames is None:
        return False
    while frames.tb_next is not None:
        frames = frames.tb_next
    code = frames.tb_frame.f_code
    if code.co_code[frames.tb_lasti] != _RAISE:
        return False
    file = code.co_filename
    return not (file.startswith(("<", *_LIBRARIES)) or _INSTALLED.intersection(Path(file).parts))
