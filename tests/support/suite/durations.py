"""Start slow test files first, so that both workers end at about the same time.

`durations.txt` lists the slow files: the seconds of one run, and the path. A full run with
`--save-durations` writes it. A file that is not listed counts as quick.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

TABLE = Path(__file__).with_name("durations.txt")
LEAST_S = 3.0  # the table omits quicker files


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--save-durations", action="store_true", help="write the seconds of slow files to a table"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--save-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder(), "rekindle-durations")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seconds = read()
    items.sort(key=lambda item: (-seconds.get(file_of(item.nodeid), 0.0), file_of(item.nodeid)))


def file_of(nodeid: str) -> str:
    """Return the path of a test's file."""
    return nodeid.partition("::")[0]


def read() -> dict[str, float]:
    """Return the seconds of each listed file."""
    rows = (line.split(maxsplit=1) for line in TABLE.read_text().splitlines())
    return {path: float(seconds) for seconds, path in rows}


def rows(seconds: dict[str, float]) -> Iterable[str]:
    """Return the lines of the table, slow files first."""
    slow = [(path, s) for path, s in seconds.items() if s >= LEAST_S]
    return [f"{s:.0f} {path}" for path, s in sorted(slow, key=lambda row: (-row[1], row[0]))]


class _Recorder:
    """Sum the durations of all tests of each file."""

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[file_of(report.nodeid)] += report.duration

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        yield
        TABLE.write_text("\n".join(rows(dict(self._seconds))) + "\n")
