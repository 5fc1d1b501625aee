"""Faults that a rank injects into itself on an order (`rekindle inject`).

This module breaks the process or its node, for any framework. The frameworks raise the errors.
"""

from __future__ import annotations

import logging
import os
import signal
import time

from rekindle.console import say
from rekindle.protocol.agent import Inject, InjectionKind


def received(fault: Inject) -> str:
    """Return the line that a rank logs for an order, after which the fault can occur."""
    when = "its next step" if fault.step is None else f"step {fault.step}"
    return f"rank {fault.rank} will inject {fault.kind.value} into {when}"


def due(faults: list[Inject], step: int) -> list[tuple[Inject, str]]:
    """Remove the faults that are due in `step` from the list; return each with its log text."""
    found = []
    for fault in faults.copy():
        if fault.step is not None and fault.step > step:
            continue
        faults.remove(fault)
        if fault.step is not None and fault.step < step:
            say(f"no {fault.kind.value} was injected: step {fault.step} is over")
            continue
        text = f"injected into step {step} of rank {fault.rank}"
        say(f"{fault.kind.value} {text}", logging.INFO)
        found.append((fault, text))
    return found


def break_process(fault: Inject) -> bool:
    """Break this process, hang, or be slow, as the order demands; False: another kind of fault."""
    match fault.kind:
        case InjectionKind.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        case InjectionKind.NODE_LOST:
            os.kill(os.getppid(), signal.SIGKILL)  # the agent; its ranks end with it
            signal.pause()
        case InjectionKind.SLOW:
            time.sleep(fault.seconds)
        case InjectionKind.HANG:
            while True:
                time.sleep(3600)
        case InjectionKind.STOP:
            os.kill(os.getpid(), signal.SIGSTOP)
        case InjectionKind.LIVELOCK:
            while True:
                pass
        case _:
            return False
    return True
