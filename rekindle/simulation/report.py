"""Format the answer as text and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rekindle.recovery.policy.policy import Strategy
from rekindle.simulation import estimate
from rekindle.simulation.estimate import FEWEST, Estimate, MeanInterval, Scenario, difference
from rekindle.simulation.outcome import Loss
from rekindle.words import columns

Row = tuple[str, ...]


def as_text(question: Scenario, named: Sequence[tuple[str, Estimate]]) -> str:
    """Return the text for people: one policy, or two policies and their difference."""
    estimates = [estimate for _, estimate in named]
    blocks = [_heading(question), columns([("", *(name for name, _ in named)), *_main(estimates)])]
    blocks.append(columns([("the time goes to", *("" for _ in named)), *_losses(estimates)]))
    blocks.append(columns([("incidents per run", *("" for _ in named)), *_incidents(estimates)]))
    blocks.append(columns([("checkpoints", *("" for _ in named)), *_checkpoints(estimates)]))
    if len(estimates) == 2:
        blocks.append(_verdict(named[1][0], difference(*estimates)))
    return "\n\n".join(blocks) + "\n"


def as_json(question: Scenario, estimates: Sequence[Estimate]) -> dict[str, Any]:
    """Return the data for programs; docs/operate/simulate.md lists keys and units."""
    world = question.world
    found = _as_json(estimates[0]) | {
        "nodes": world.nodes,
        "devices_per_node": world.per_node,
        "faults": question.mix.name,
        "days": question.days,
        "runs": question.runs,
        "seed": question.seed,
    }
    if len(estimates) == 2:
        found["compare"] = _as_json(estimates[1])
        found["difference"] = _interval(difference(*estimates))
    return found


def duration(seconds: float) -> str:
    """Return a time as text, in a suitable unit."""
    for unit, size in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            return f"{seconds / size:.1f}".removesuffix(".0") + f" {unit}"
    return f"{seconds:.0f} s"


def _heading(question: Scenario) -> str:
    world, mix = question.world, question.mix
    spares = "as many spares as it takes" if world.spares is None else f"{world.spares} spares"
    gap = 1 / mix.rate(world.devices)
    return (
        f"{world.nodes} nodes x {world.per_node} devices, {spares}, {question.days:g} days, "
        f"{question.runs} runs from seed {question.seed}\n"
        f"faults: {mix.name}, one every {duration(gap)} ({mix.odds.source})"
    )


def _main(estimates: Sequence[Estimate]) -> list[Row]:
    return [
        _row("goodput", estimates, lambda one: f"{one.goodput.mean:.4f}"),
        _row("  95 % interval", estimates, lambda one: _range(one.goodput)),
        _row("restarts by a person", estimates, lambda one: _times(one.mean(lambda o: o.ended))),
        _row("spares, so that 99 of 100", estimates, lambda one: str(one.spares)),
        _row("  faults do not wait", estimates, lambda one: f"{one.spares_alone} without groups"),
    ]


def _losses(estimates: Sequence[Estimate]) -> list[Row]:
    return [
        (f"  {loss.value}", *(f"{100 * one.lost(loss):.3f} %" for one in estimates))
        for loss in Loss
        if any(one.lost(loss) > 0 for one in estimates)
    ]


def _incidents(estimates: Sequence[Estimate]) -> list[Row]:
    found = [one.incidents for one in estimates]
    rows = [
        (f"  {strategy.value}", *(f"{many.get(strategy, 0.0):.1f}" for many in found))
        for strategy in Strategy
        if any(strategy in many for many in found)
    ]
    return [*rows, ("  all", *(f"{sum(many.values()):.1f}" for many in found))]


def _checkpoints(estimates: Sequence[Estimate]) -> list[Row]:
    return [
        _row("  one every", estimates, lambda one: duration(one.checkpoint_s)),
        _row("  loaded one, per run", estimates, _back),
        _row("  best interval", estimates, lambda one: duration(one.best_interval)),
        _row("  by Young", estimates, lambda one: duration(_young(one))),
        _row("  by Daly", estimates, lambda one: duration(_daly(one))),
    ]


def _back(one: Estimate) -> str:
    assumed = one.store_rate * one.seconds
    note = f" ({assumed:.3g} in all runs assumed)" if one.to_store < FEWEST else ""
    return _times(one.to_store / len(one.outcomes)) + note


def _young(one: Estimate) -> float:
    return estimate.young(one.store_rate, one.stall_s)


def _daly(one: Estimate) -> float:
    return estimate.daly(one.store_rate, one.stall_s)


def _verdict(name: str, found: MeanInterval) -> str:
    difference = f"{name}: goodput {found.mean:+.4f} ({found.low:+.4f} to {found.high:+.4f}, 95 %)"
    if found.low <= 0 <= found.high:
        return f"{difference}; more runs (--runs) may show a difference"
    return f"{difference}; it is {'better' if found.mean > 0 else 'worse'}"


def _as_json(one: Estimate) -> dict[str, Any]:
    return _interval(one.goodput) | {
        "incidents": {strategy.value: many for strategy, many in one.incidents.items()},
        "decisions": {strategy.value: many for strategy, many in one.decisions.items()},
        "lost": {loss.name.lower(): one.lost(loss) for loss in Loss},
        "ended": one.mean(lambda outcome: outcome.ended),
        "spares": one.spares,
        "spares_without_groups": one.spares_alone,
        "checkpoint_interval_s": one.best_interval,
        "checkpoint_interval_young_s": _young(one),
        "checkpoint_interval_daly_s": _daly(one),
        "checkpoint_interval_used_s": one.checkpoint_s,
    }


def _interval(found: MeanInterval) -> dict[str, float]:
    return {"goodput": found.mean, "goodput_low": found.low, "goodput_high": found.high}


def _row(label: str, estimates: Sequence[Estimate], cell: Callable[[Estimate], str]) -> Row:
    return (label, *(cell(one) for one in estimates))


def _range(found: MeanInterval) -> str:
    return f"{found.low:.4f} to {found.high:.4f}"


def _times(many: float) -> str:
    return "never" if many == 0 else f"{many:.1f} times"
