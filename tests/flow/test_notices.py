"""Notices: Prefect may be slow or away, and the job's supervision does not wait for it."""

from __future__ import annotations

import logging
import socket
import time
import uuid

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from rekindle.recovery.journal import Progress
from rekindle.tasks import notices
from rekindle.tasks.notices import Notices

FLUSH_S = 1.0


def test_a_server_that_never_answers_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Notices are taken at once while Prefect hangs, and closing waits no longer than it may."""
    monkeypatch.setattr(notices, "_FLUSH_S", FLUSH_S)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/api"
        with temporary_settings({PREFECT_API_URL: url}), caplog.at_level(logging.WARNING):
            closing = _tell_much()
    assert closing < FLUSH_S + 1.0
    assert "Prefect was not told" in caplog.text


def test_a_server_that_is_gone_is_mentioned_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A refused connection is one warning, however much there was to tell."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/api"
    with temporary_settings({PREFECT_API_URL: url}), caplog.at_level(logging.WARNING):
        _tell_much()
    assert caplog.text.count("Prefect's API fails; the job goes on without it") == 1


def _tell_much() -> float:
    """Tell as much as a lively hour brings; return how long closing took."""
    log = logging.getLogger("test.notices")
    begun = time.monotonic()
    with Notices(
        job_id="train-1", flow_run_id=uuid.uuid4(), flow_run_name="calm-owl", log=log
    ) as told:
        for step in range(1000):
            told.state("Recovering", f"incident {step}")
            told.progress(Progress(finished=step, newest=step, total=1000, metrics={}))
        assert time.monotonic() - begun < 1.0
        closing = time.monotonic()
    return time.monotonic() - closing
