"""Signals that a launcher passes on: only to processes with a handler for them."""

from __future__ import annotations

import os
import signal

from rekindle.job.lifeline import catches


def test_a_handler_is_visible_from_outside() -> None:
    """`catches` finds the handler of a process, and no handler of a process that has ended."""
    before = signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    try:
        assert not catches(os.getpid(), signal.SIGUSR2)
        signal.signal(signal.SIGUSR2, lambda *_: None)
        assert catches(os.getpid(), signal.SIGUSR2)
        assert not catches(0, signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)
