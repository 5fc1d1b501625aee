"""The coordinator's client, with a server that gives each test's answer."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler

import pytest
from servers import Answer, serving

from rekindle import names
from rekindle.engines.client import JobClient
from rekindle.errors import JobError, LeaseHeldError, UnansweredError
from rekindle.job.spec import Endpoint, bearer
from rekindle.recovery.journal import journal
from rekindle.recovery.journal.journal import Ended, Event, JobStarted, Stopping


@contextlib.contextmanager
def coordinator(answer: Answer) -> Iterator[JobClient]:
    """Return a client of a server that gives this answer to each request."""
    with serving(answer) as port:
        yield JobClient(Endpoint(host="127.0.0.1", port=port, pid=4711, attempt=1), "secret")


def lines(*content: bytes, whole: bool = True) -> Answer:
    """Return an answer of these lines as a chunked stream; if not `whole`, break off after them."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for line in content:
            handler.wfile.write(b"%x\r\n%s\n\r\n" % (len(line) + 1, line))
        if whole:
            handler.wfile.write(b"0\r\n\r\n")
        handler.close_connection = True

    return answer


def reply(status: int, body: object) -> Answer:
    """Return an answer with a JSON document or with raw bytes."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)

    return answer


def started(seq: int) -> Event:
    """Return the start of an attempt."""
    return JobStarted(seq=seq, job_id="j", attempt=1, nodes=1, processes_per_node=1, pid=1)


def ended(seq: int, outcome: str = "succeeded") -> Event:
    """Return the end of an attempt."""
    return Ended(seq=seq, outcome=outcome, reason="done", finished=3)


KEEPALIVE = b'{"type":"keepalive"}'


def test_a_lease_gives_the_events() -> None:
    """The event stream of a lease has no keepalives and ends after the job's end."""
    sent = [started(1), Stopping(seq=2, reason="enough"), ended(3)]
    stream = [KEEPALIVE, *map(journal.encode, sent), KEEPALIVE]
    with (
        coordinator(lines(*stream[:-1])) as client,
        client.steer(holder="me", token="t") as lease,
    ):
        assert list(lease) == sent


def test_the_end_of_an_earlier_attempt_does_not_end_the_stream() -> None:
    """The stream continues after the end of an earlier attempt."""
    sent = [started(1), ended(2, "failed"), started(3), ended(4)]
    with coordinator(lines(*map(journal.encode, sent))) as client, client.events() as events:
        assert list(events) == sent


@pytest.mark.parametrize("whole", [True, False])
def test_a_stream_that_breaks_off_before_the_end_is_an_error(whole: bool) -> None:
    """If the stream breaks off during a job, the error reports the coordinator's end."""
    with (
        coordinator(lines(journal.encode(started(1)), whole=whole)) as client,
        client.events() as events,
        pytest.raises(JobError, match="has ended"),
    ):
        list(events)


def test_a_held_lease_names_its_holder() -> None:
    """A request for a held lease raises an error with its holder."""
    body = {"error": "flow run calm-owl steers this job", "holder": "flow run calm-owl"}
    with (
        coordinator(reply(409, body)) as client,
        pytest.raises(LeaseHeldError, match="flow run calm-owl steers this job"),
    ):
        client.steer(holder="me", token="t")


def test_a_refusal_says_why() -> None:
    """The error of each request has the coordinator's reason."""
    with coordinator(reply(401, {"error": "wrong secret"})) as client:
        for ask in (client.status, client.events, lambda: client.stop(by="x")):
            with pytest.raises(JobError, match="HTTP status 401: wrong secret"):
                ask()


def test_a_page_of_another_server_is_cut_to_one_line() -> None:
    """A page of another server, after a wrong port for example, is cut to one line."""
    with coordinator(reply(404, b"<html>\n" * 100)) as client, pytest.raises(JobError) as caught:
        client.spec()
    assert re.search(r"\(process 4711\) refuses with HTTP status 404: .{,200}$", str(caught.value))


@pytest.mark.parametrize("body", [{}, ["no", "job"], "text"])
def test_an_answer_of_another_kind_is_refused(body: object) -> None:
    with coordinator(reply(200, body)) as client:
        for ask in (client.status, client.spec):
            with pytest.raises(JobError, match="has the wire version"):
                ask()


@pytest.mark.parametrize("status", [401, 404, 429, 500, 503])
def test_what_an_api_server_says_on_the_way_is_no_answer(status: int) -> None:
    """An API server's answer raises UnansweredError: the coordinator got no request."""
    body = {"kind": "Status", "apiVersion": "v1", "message": "try it later", "code": status}
    with (
        coordinator(reply(status, body)) as client,
        pytest.raises(UnansweredError, match=f"HTTP status {status}: try it later"),
    ):
        client.status()


@pytest.mark.parametrize("status", [200, 400])
def test_an_answer_that_breaks_off_is_none(status: int) -> None:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", "100")
        handler.end_headers()
        handler.wfile.write(b"{")
        handler.close_connection = True

    with (
        coordinator(answer) as client,
        pytest.raises(UnansweredError, match="its answer is incomplete"),
    ):
        client.status()


def test_no_coordinator_is_an_error_that_names_its_process() -> None:
    """If no process listens on the port, the error has the coordinator's process."""
    with coordinator(lines()) as client:
        pass
    with pytest.raises(JobError, match=r"coordinator \(process 4711\) does not answer"):
        client.status()


def test_requests_prove_the_secret_and_carry_their_order() -> None:
    """A request has the secret in its header; a stop has the user's name."""
    requests: list[tuple[str, str | None, bytes]] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        requests.append((handler.path, handler.headers[names.HEADER_SECRET], body))
        reply(200, {})(handler)

    with coordinator(answer) as client:
        client.stop(by="ann")
    [(path, authorization, body)] = requests
    assert path == "/stop"
    assert authorization == bearer("secret")
    assert json.loads(body) == {"by": "ann"}
