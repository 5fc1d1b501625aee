"""Which variables of a job's description a joining node takes from the coordinator."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from jobs.driver import spec_of

from rekindle import names
from rekindle.cli.local_options import RUN
from rekindle.cli.options import add
from rekindle.cli.run import _ours

GIVEN = {"LR": "0.1", names.ENV_STORE_ACCESS_KEY_ID: "key", names.ENV_PROFILING_CAP_MB: "9"}


@pytest.mark.parametrize(
    ("pod", "taken"),
    [(True, GIVEN), (False, {names.ENV_PROFILING_CAP_MB: "9"})],
)
def test_variables_of_the_description(
    pod: bool, taken: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod takes all, because its cluster proves the coordinator; a machine only our numbers."""
    monkeypatch.delenv(names.ENV_POD_IP, raising=False)
    if pod:
        monkeypatch.setenv(names.ENV_POD_IP, "10.0.0.1")
    parser = argparse.ArgumentParser()
    add(parser, RUN)
    options = parser.parse_args(["--coordinator", "10.0.0.9:29600"])
    options.given = set()
    spec = spec_of(nodes=2, processes=1, environment=GIVEN)
    assert _ours(spec, options, tmp_path).environment == taken
