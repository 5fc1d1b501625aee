"""The options of `rekindle run` about checkpoints."""

from __future__ import annotations

import argparse

import pytest

from rekindle.checkpoints.retention import Retention
from rekindle.cli.local_options import RUN
from rekindle.cli.options import add
from rekindle.cli.run_spec import read_spec


def parsed(*options: str) -> tuple[object, Retention]:
    parser = argparse.ArgumentParser()
    add(parser, RUN)
    spec = read_spec(parser.parse_args([*options, "train.py"]))
    return spec.checkpoint_every, spec.keep


@pytest.mark.parametrize(
    ("options", "every", "rules"),
    [
        ((), 0, {}),
        (("--checkpoint-every", "50", "--keep-last", "3"), 50, {"last": 3}),
        (("--checkpoint_every", "auto", "--keep_every=1000"), "auto", {"every_steps": 1000}),
        (("--keep-best", "2:val:loss"), 0, {"best": 2, "metric": "val:loss"}),
        (("--keep-best=1:f1:max",), 0, {"best": 1, "metric": "f1", "highest": True}),
        (("--keep-hours", "1.5"), 0, {"hours": 1.5}),
    ],
)
def test_what_they_say(
    options: tuple[str, ...], every: int | str, rules: dict[str, object]
) -> None:
    """Each retention rule has an option; without an option all checkpoints stay."""
    assert parsed(*options) == (every, Retention(**rules))
