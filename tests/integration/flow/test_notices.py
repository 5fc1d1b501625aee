"""PrefectNotifier: a slow or absent Prefect server does not delay the job's supervision."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import httpx
import pytest
from prefect import flow, get_client, task
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Running
from servers import serving
from waiting import wait_until

from rekindle.recovery.journal.journal import FirstStep, Progress
from rekindle.tasks.prefect_api import notifier as notices
from rekindle.tasks.prefect_api.notifier import PrefectNotifier


def test_a_server_that_never_answers_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """If Prefect hangs, the notifier accepts notices, and close() ends without an answer."""
    monkeypatch.setattr(notices, "_FLUSH_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/api"
        with temporary_settings({PREFECT_API_URL: url}), caplog.at_level(logging.WARNING):
            _tell_much(logging.getLogger("test.silent"), tmp_path / "told")
    assert "Prefect did not receive" in caplog.text


def test_a_server_that_is_gone_is_mentioned_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """A refused connection causes one warning, for any number of notices."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/api"
    with temporary_settings({PREFECT_API_URL: url}), caplog.at_level(logging.WARNING):
        _tell_much(logging.getLogger("test.gone"), tmp_path / "told")
    # The thread of another test may still run.
    messages = [record.getMessage() for record in caplog.records if record.name == "test.gone"]
    assert (
        sum("Prefect's API fails; the job continues without it" in text for text in messages) == 1
    )


def test_a_notice_that_prefect_refuses_does_not_stop_the_others(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """A notice that the API refuses is dropped with a warning; the others are sent."""
    with (
        refusing_server() as (url, asked),
        temporary_settings({PREFECT_API_URL: url}),
        caplog.at_level(logging.WARNING),
    ):
        _tell_much(logging.getLogger("test.refused"), tmp_path / "told", count=3)
    assert len(asked) >= 4  # three states and the progress
    messages = [record.getMessage() for record in caplog.records if record.name == "test.refused"]
    assert sum("Prefect refuses a notice" in text for text in messages) == 1
    assert not any("Prefect did not receive" in text for text in messages)


def test_an_adoption_closes_only_the_task_runs_of_earlier_processes(
    prefect_api: str, tmp_path: Path
) -> None:
    """A task run of the killed process is Crashed; an own one that Prefect lists as running stays.

    Prefect may list an ended task run as running for a moment.
    """
    with (
        temporary_settings({PREFECT_API_URL: prefect_api}),
        get_client(sync_client=True) as client,
    ):
        run = client.create_flow_run(flow(lambda: None, name="train"))
        runs = []
        for key in ("launch-of-killed", "launch-of-own"):
            client.set_flow_run_state(run.id, Running(), force=True)
            one = client.create_task_run(task(lambda: None), run.id, dynamic_key=key)
            client.set_task_run_state(one.id, Running())
            runs.append(one.id)
        earlier, own = map(client.read_task_run, runs)
        assert earlier.flow_run_run_count < own.flow_run_run_count
        with PrefectNotifier(
            job_id="train-1",
            flow_run_id=run.id,
            flow_run_name=run.name,
            last_sent_file=tmp_path / "told",
            log=logging.getLogger("test.adopted"),
        ) as notifier:
            notifier.adopted(own.flow_run_run_count)
        names = [client.read_task_run(one).state_name for one in runs]
    assert names == ["Crashed", "Running"]


def test_what_was_told_is_not_told_again(
    monkeypatch: pytest.MonkeyPatch, prefect_api: str, tmp_path: Path
) -> None:
    """An adopting process sends only new incidents.

    Otherwise an automation would notify users of old ones.
    """
    emitted: list[dict[str, int]] = []
    monkeypatch.setattr(notices, "emit_event", lambda *_, payload, **__: emitted.append(payload))
    with temporary_settings({PREFECT_API_URL: prefect_api}):
        for first, last in ((1, 3), (1, 5)):
            with PrefectNotifier(
                job_id="train-1",
                flow_run_id=uuid.uuid4(),
                flow_run_name="calm-owl",
                last_sent_file=tmp_path / "told",
                log=logging.getLogger("test.told"),
            ) as notifier:
                for number in range(first, last + 1):
                    notifier.incident(
                        "closed",
                        FirstStep(generation=1, step=1, incident=1, seq=number),
                        {"n": number},
                    )
    assert [payload["n"] for payload in emitted] == [1, 2, 3, 4, 5]


def test_a_full_disk_loses_no_notice(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """If the notifier cannot write its file, states, incidents and questions still arrive."""
    sent: list[object] = []
    monkeypatch.setattr(PrefectNotifier, "_set_state", lambda _, client, state: sent.append(state))
    monkeypatch.setattr(PrefectNotifier, "_emit", lambda _, client, step: sent.append(step))
    monkeypatch.setattr(notices, "_ARRIVES_S", 0.0)
    log = logging.getLogger("test.full")
    with (
        nowhere(),
        caplog.at_level(logging.WARNING),
        notifier(tmp_path / "no" / "told", log) as mine,
    ):
        for number in range(3):
            event = FirstStep(generation=1, step=1, incident=1, seq=number + 1)
            mine.incident("closed", event, {})
            mine.state("Awaiting approval", f"incident {number}")
    assert len(sent) == 6
    texts = [record.getMessage() for record in caplog.records if record.name == "test.full"]
    [text] = texts
    assert "A rerun of the flow may report incidents to Prefect again" in text


def test_a_bug_in_one_notice_loses_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """A notice that cannot be sent because of a bug is left out with its stack in the log."""
    sent: list[object] = []

    def deliver(_: PrefectNotifier, client: object, notice: Any) -> None:
        if notice.message == "1":
            raise KeyError("a bug")
        sent.append(notice.message)

    monkeypatch.setattr(PrefectNotifier, "_deliver", deliver)
    log = logging.getLogger("test.bug")
    with nowhere(), caplog.at_level(logging.WARNING), notifier(tmp_path / "told", log) as mine:
        for number in range(4):
            mine.state("Recovering", str(number))
    assert sent == ["0", "2", "3"]
    [record] = [record for record in caplog.records if record.name == "test.bug"]
    assert "Rekindle leaves out a notice to Prefect, because of a bug" in record.getMessage()
    assert record.exc_info is not None


def test_no_incident_is_dropped_for_a_newer_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The notifier keeps all incidents and the newest state while Prefect does not answer."""
    away, sent = threading.Event(), list[Any]()
    away.set()

    def deliver(_: PrefectNotifier, client: object, notice: Any) -> None:
        if away.is_set():
            raise OSError("no route to the server")
        sent.append(notice)

    monkeypatch.setattr(PrefectNotifier, "_deliver", deliver)
    monkeypatch.setattr(notices, "_RETRY_PAUSE_S", 0.01)
    with nowhere(), notifier(tmp_path / "told", logging.getLogger("test.kept")) as mine:
        for number in range(5000):
            event = FirstStep(generation=1, step=1, incident=1, seq=number + 1)
            mine.incident("closed", event, {})
            mine.state("Recovering", f"incident {number}")
        away.clear()
        wait_until(lambda: not mine._queue, "all notices")
    assert [each.event.seq for each in sent if hasattr(each, "event")] == [*range(1, 5001)]
    assert [each.message for each in sent if hasattr(each, "message")][-1] == "incident 4999"


@pytest.mark.parametrize("status", [401, 403, 503])
def test_no_notice_is_dropped_because_of_the_key(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int
) -> None:
    """A notice that the server refuses because of the key, or its load, is sent later."""
    refusing, sent = threading.Event(), list[Any]()
    refusing.set()
    asked = threading.Event()

    def deliver(_: PrefectNotifier, client: object, notice: Any) -> None:
        if refusing.is_set():
            asked.set()
            request = httpx.Request("POST", "http://127.0.0.1:1/api")
            raise httpx.HTTPStatusError("no", request=request, response=httpx.Response(status))
        sent.append(notice.message)

    monkeypatch.setattr(PrefectNotifier, "_deliver", deliver)
    monkeypatch.setattr(notices, "_RETRY_PAUSE_S", 0.01)
    with nowhere(), notifier(tmp_path / "told", logging.getLogger("test.key")) as mine:
        mine.state("Recovering", "one")
        wait_until(asked.is_set, "the server refuses")
        refusing.clear()
        wait_until(lambda: not mine._queue, "all notices")
    assert sent == ["one"]


def nowhere() -> contextlib.AbstractContextManager[object]:
    """Set the address of an API that no test calls."""
    return temporary_settings({PREFECT_API_URL: "http://127.0.0.1:1/api"})


def notifier(file: Path, log: logging.Logger) -> PrefectNotifier:
    return PrefectNotifier(
        job_id="train-1",
        flow_run_id=uuid.uuid4(),
        flow_run_name="calm-owl",
        last_sent_file=file,
        log=log,
    )


@contextlib.contextmanager
def refusing_server() -> Iterator[tuple[str, list[str]]]:
    """Start a server that refuses all requests; return its address and the requested methods."""
    asked: list[str] = []

    def refuse(request: BaseHTTPRequestHandler) -> None:
        asked.append(request.command)
        request.send_error(404)

    with serving(refuse) as port:
        yield f"http://127.0.0.1:{port}/api", asked


def _tell_much(log: logging.Logger, told_file: Path, count: int = 1000) -> None:
    """Send as many notices as in a busy hour, and close."""
    with PrefectNotifier(
        job_id="train-1",
        flow_run_id=uuid.uuid4(),
        flow_run_name="calm-owl",
        last_sent_file=told_file,
        log=log,
    ) as notifier:
        for step in range(count):
            notifier.state("Recovering", f"incident {step}")
            notifier.progress(Progress(finished=step, newest=step, total=count, metrics={}))
