"""The 12 hops of docs/architecture.md, compared with a real fault."""

from collections.abc import Iterator

import pytest
from architecture.hops import hops_of, missing
from architecture.picture import PAGE
from jobs import Place
from traced.fault import Trace, lines_of, trace_sigkill


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trace]:
    """Return the calls of all processes of a job from the SIGKILL of a rank to the first step."""
    with Place(tmp_path_factory.mktemp("traced") / "place") as place:
        yield trace_sigkill(place)


def test_the_hops_of_the_page(trace: Trace) -> None:
    """Processes call the functions, and the journal has the events, in the order of the page."""
    hops = hops_of(PAGE.read_text())
    assert missing(hops, trace.calls, trace.processes, lines_of) == []
    on_page = [event for hop in hops for event in hop.events]
    in_journal = [type(event).__name__ for event in trace.events]
    assert [*dict.fromkeys(each for each in in_journal if each in on_page)] == on_page
