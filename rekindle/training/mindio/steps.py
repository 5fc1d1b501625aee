"""What a loop adds where a step cannot be broken off, as on CPU: all ranks begin it, or none."""

from __future__ import annotations

import socket

from rekindle.errors import StaleError
from rekindle.protocol.agent import Inject, InjectionKind
from rekindle.rank.injection import break_process, due
from rekindle.rank.step_vote import PeerGoneError
from rekindle.training.mindio import framework
from rekindle.training.mindio import report_signals as words

_LOST = (OSError, PeerGoneError, StaleError)


def begin_step() -> None:
    """All ranks are about to do the next step.

    Raises RuntimeError: they do not, in the words that MindSpore's loop and MindIO's look for.
    """
    processor = framework.current()
    processor.progress.begin_step()
    member, step = processor.member, processor.finished
    if member is None:
        return
    told = _suffer(member.channel.injected, step)
    can = told is None and not member.is_held and not member.is_over
    agreed = False
    try:
        agreed = processor.generations.gate.agree(step, can=can)
    except _LOST as error:
        if told is None and not member.is_over:
            raise words.cut_off(error) from error
    if told is not None:
        raise words.damaged(told)
    if not agreed:
        raise words.stopped(step)


def line(source: int, target: int) -> socket.socket:
    """Return a line between two ranks, for a repair handler whose framework brings none.

    One of them is this rank. Raises OSError, PeerGoneError, StaleError: the other is lost, and the
    handler is to raise it.
    """
    return framework.current().line(source, target)


def _suffer(faults: list[Inject], step: int) -> str | None:
    """Suffer the faults that are due; return what is said of a damaged memory."""
    for fault, told in due(faults, step):
        if fault.kind in (InjectionKind.UCE, InjectionKind.TORN_UPDATE):
            return told
        if not break_process(fault):
            raise ValueError(f"{fault.kind.value} was {told}, and means nothing here")
    return None
