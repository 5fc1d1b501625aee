"""`rekindle simulate` with extreme rates: very rare faults, or too many."""

from __future__ import annotations

from pathlib import Path

import pytest
from simulated import plain_mix, prices

from rekindle.errors import UsageError
from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.policy.policy import Policy
from rekindle.simulation import fault_mix
from rekindle.simulation.estimate import Scenario, judge
from rekindle.simulation.outcome import World

MIX = '[[mix]]\nsource = "ours"\nper_1000_devices_per_day = {rate}\nlemon_factor = {lemon}\n'
FAULT = '[[fault]]\nname = "{name}"\nkind = "link"\nweight = {weight}\n'


@pytest.mark.parametrize("runs", [5, 20, 80])
def test_rare_faults_are_judged_alike_however_many_runs_there_are(runs: int) -> None:
    """For rare faults, judge() uses the rate of the mix, for any number of runs.

    The checkpoint interval is then the whole run.
    """
    question = Scenario(
        world=World(nodes=1, per_node=1),
        mix=plain_mix(0.013, FaultKind.NODE_LOST),
        costs=prices(checkpoint_stall_s=30.0),
        days=3.0,
        runs=runs,
        seed=0,
    )
    found = judge(question, Policy(), question.traces())
    assert found.to_store == 0
    assert found.store_rate == pytest.approx(question.mix.rate(1))
    assert found.goodput.mean == pytest.approx(1.0, abs=1e-3)


def test_no_fewer_faults_are_assumed_than_were_seen() -> None:
    """If the runs have more faults than the mix predicts, judge() uses the rate of the runs."""
    question = Scenario(
        world=World(nodes=4, per_node=2),
        mix=plain_mix(500.0, FaultKind.USER_CODE),
        costs=prices(checkpoint_stall_s=30.0),
        days=3.0,
        runs=5,
        seed=0,
    )
    found = judge(question, Policy(strategies=()), question.traces())
    assert found.to_store >= 3
    assert found.store_rate == found.to_store / (5 * 3 * 86_400.0)


@pytest.mark.parametrize(
    ("rate", "lemon", "weight", "says"),
    [
        ("1e20", "10.0", "1.0", ":3: .* is 1e\\+20: .* at most 1e9"),
        ("1.0", "inf", "1.0", ":4: lemon_factor is inf: .*; give 1 or more, at most 1e9"),
        ("1.0", "nan", "1.0", ":4: lemon_factor is nan: "),
        ("1.0", "10.0", "1e308", ":8: weight is 1e\\+308: "),
    ],
)
def test_a_mix_that_cannot_be_counted_with_is_refused(
    tmp_path: Path, rate: str, lemon: str, weight: str, says: str
) -> None:
    """load() refuses an unusable number with the file and the line."""
    path = tmp_path / "own.toml"
    faults = "".join(FAULT.format(name=name, weight=weight) for name in "ab")
    path.write_text(MIX.format(rate=rate, lemon=lemon) + faults)
    with pytest.raises(UsageError, match=f"own.toml{says}"):
        fault_mix.load(str(path))
