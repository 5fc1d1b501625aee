"""Puts MindIO's names where `import mindio_ttp` finds them, unless MindIO is there."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types

from rekindle.training.mindio import controller, exceptions, framework, update_times

NAME = "mindio_ttp"
_WHERE = "mindio_ttp of Rekindle"


def install() -> bool:
    """Have `mindio_ttp` mean this, from now on; False: MindIO itself is installed, and is used."""
    there = sys.modules.get(NAME)
    if there is not None:
        return getattr(there.__spec__, "origin", None) == _WHERE
    if importlib.util.find_spec(NAME) is not None:
        return False
    _put(NAME)
    _put(f"{NAME}.framework_ttp", framework, exceptions)
    # Adaptors import some names from the module that MindIO has them in.
    _put(f"{NAME}.framework_ttp.ttp_decorator", framework, exceptions)
    _put(f"{NAME}.controller_ttp", controller)
    _put(f"{NAME}.utils", update_times)
    return True


def _put(name: str, *sources: types.ModuleType) -> None:
    """Make a module with the public names of others, and let it be found."""
    module = types.ModuleType(name, "MindIO's names, of Rekindle: see rekindle.training.mindio.")
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, origin=_WHERE, is_package=True)
    module.__path__ = []
    for source in sources:
        for key, value in vars(source).items():
            if key.startswith(("tft_", "set_mindio", "get_")) or key in _TYPES:
                setattr(module, key, value)
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)


_TYPES = ("Action", "OptimizerType", "RepairType", "ReportState")
