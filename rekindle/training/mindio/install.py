"""Make `import mindio_ttp` find these names; agree on steps where none can be broken off."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import socket
import sys
import types
from collections.abc import Mapping
from typing import Any

from rekindle.protocol.agent import Inject, InjectionKind
from rekindle.rank.injection import break_process, due
from rekindle.rank.step_vote import LOST
from rekindle.training.mindio import controller, exception_handler, framework, update_times
from rekindle.training.mindio import enums as words

NAME = "mindio_ttp"
_WHERE = "mindio_ttp of Rekindle"
_TYPES = ("Action", "OptimizerType", "RepairType", "ReportState")


def begin_step() -> None:
    """Agree with all ranks to do the next step.

    Raises RuntimeError: the ranks do not do it. MindSpore's loop and MindIO's search the text for
    these words.
    """
    processor = framework.current()
    processor.progress.begin_step()
    member, step = processor.member, processor.finished
    if member is None:
        return
    text = _inject(member.channel.injected, step)
    can = text is None and not member.is_held and not member.is_over
    agreed = False
    try:
        agreed = processor.generations.gate.agree(step, can=can)
    except LOST as error:
        if text is None and not member.is_over:
            raise words.cut_off(error) from error
    if text is not None:
        raise words.damaged(text)
    if not agreed:
        raise words.stopped(step)


def connection(source: int, target: int) -> socket.socket:
    """Return a connection between two ranks, for a handler whose framework has none of its own.

    This rank is one of the two. Raises OSError, StaleError: the other is lost. The handler must
    pass the error on.
    """
    return framework.current().generations.connection(source, target)


def _inject(faults: list[Inject], step: int) -> str | None:
    """Inject the faults that are due; return the text of an injected memory fault."""
    for fault, text in due(faults, step):
        if fault.kind in (InjectionKind.UCE, InjectionKind.TORN_UPDATE):
            return text
        if not break_process(fault):
            raise ValueError(
                f"{fault.kind.value} was {text}, but a script with MindIO's names cannot have "
                "this fault"
            )
    return None


def install() -> bool:
    """Make `import mindio_ttp` find this package; False: MindIO itself is installed and stays."""
    there = sys.modules.get(NAME)
    if there is not None:
        return getattr(there.__spec__, "origin", None) == _WHERE
    if importlib.util.find_spec(NAME) is not None:
        return False
    _put(NAME, {})
    names = vars(framework) | framework.registering | vars(exception_handler)
    _put(f"{NAME}.framework_ttp", names)
    # Adaptors import some names from the module that has them in MindIO.
    _put(f"{NAME}.framework_ttp.ttp_decorator", names)
    _put(f"{NAME}.controller_ttp", vars(controller))
    _put(f"{NAME}.utils", vars(update_times))
    return True


def _put(name: str, names: Mapping[str, Any]) -> None:
    """Create a module that `import` finds. It gets only the names that MindIO has."""
    module = types.ModuleType(name, "MindIO's names, of Rekindle: see rekindle.training.mindio.")
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, origin=_WHERE, is_package=True)
    module.__path__ = []
    for key, value in names.items():
        if key.startswith(("tft_", "set_mindio", "get_")) or key in _TYPES:
            setattr(module, key, value)
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)
