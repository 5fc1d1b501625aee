"""Implement `rekindle policy` and `rekindle simulate`: convert a policy, and estimate its value."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from rekindle.console import say
from rekindle.errors import UsageError
from rekindle.recovery.policy.policy import without_effect
from rekindle.recovery.policy.policy_file import (
    PolicyFormat,
    notices_about,
    read_policy,
    write_policy,
)
from rekindle.simulation import costs, fault_mix
from rekindle.simulation.estimate import Scenario, judge
from rekindle.simulation.outcome import World
from rekindle.simulation.report import as_json, as_text
from rekindle.simulation.trace import DAY_S

_FEWEST_RUNS = 5  # fewer runs give almost no information about their spread

_MOST_FAULTS = 10_000_000  # in a run: the limit of memory and of about an hour


def policy(options: argparse.Namespace) -> None:
    """Check a policy and print it. Raises UsageError: the file has no valid policy."""
    found = read_policy(Path(options.file))
    for text in (*notices_about(Path(options.file)), *without_effect(found)):
        say(f"{options.file}: {text}")
    print(write_policy(found, PolicyFormat(options.to)), end="")


def simulate(options: argparse.Namespace) -> None:
    """Simulate, print and write.

    Raises UsageError: an option is invalid, or a file is not writable.
    """
    question = read_question(options)
    paths = [path for path in (options.policy, options.compare) if path is not None]
    policies = [read_policy(path) for path in paths]
    for path in (options.json, options.plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise UsageError(
                f"{path}: the folder {path.absolute().parent} does not exist; create it first"
            )
    traces = question.traces()
    estimates = [judge(question, policy, traces) for policy in policies]
    named = list(zip(_names(paths), estimates, strict=True))
    print(as_text(question, named), end="")
    if options.json is not None:
        text = json.dumps(as_json(question, estimates), indent=2) + "\n"
        _write(options.json, lambda path: path.write_text(text, encoding="utf-8"))
    if options.plot is not None:
        from rekindle.simulation.plot import draw  # matplotlib takes a second to import

        _write(options.plot, lambda path: draw(question, named, path))


def read_question(options: argparse.Namespace) -> Scenario:
    """Make the scenario from parsed options. Raises UsageError: an option is invalid."""
    least = {"nodes": 1, "devices_per_node": 1, "spares": 0, "min_nodes": 0, "seed": 0}
    for name, fewest in (least | {"runs": _FEWEST_RUNS}).items():
        value = getattr(options, name)
        if value is not None and value < fewest:
            raise UsageError(
                f"--{name.replace('_', '-')} {value}: give a number of at least {fewest}"
            )
    if options.min_nodes > options.nodes:
        raise UsageError(
            f"--min-nodes {options.min_nodes}: give at most {options.nodes}, the number of nodes"
        )
    for name in ("days", "checkpoint_every"):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"--{name.replace('_', '-')} {value:g}: give a number above 0")
    question = Scenario(
        world=World(
            nodes=options.nodes,
            per_node=options.devices_per_node,
            spares=options.spares,
            least_nodes=options.min_nodes,
        ),
        mix=fault_mix.load(options.faults),
        costs=costs.load(options.times),
        days=options.days,
        runs=options.runs,
        seed=options.seed,
        checkpoint_s=options.checkpoint_every,
    )
    many = question.mix.rate(question.world.devices) * question.days * DAY_S
    if many > _MOST_FAULTS:
        raise UsageError(
            f"--faults {options.faults}: a run would have {many:.2g} faults, more than "
            f"{_MOST_FAULTS:.0e}; give fewer nodes or days, or a lower rate"
        )
    return question


def _names(paths: Sequence[Path]) -> list[str]:
    """Return the shortest distinct names of the policies: names or paths of their files."""
    short = [path.name for path in paths]
    return short if len(set(short)) == len(short) else [str(path) for path in paths]


def _write(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file. Raises UsageError: the path is not writable."""
    try:
        write(path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from error
