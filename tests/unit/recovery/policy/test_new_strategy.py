"""A strategy is in all places that need it; a failure names the missing edit."""

import pytest
from jobs.driver import Driver
from repository import ROOT

from rekindle.recovery.policy.policy import INNER, LADDER, OUTER, RESTARTS, Strategy
from rekindle.recovery.policy.strategies import RUNGS
from rekindle.reporting.run_state import STATES
from rekindle.simulation.costs import load

POLICY = "rekindle/recovery/policy/policy.py"
LAST = (Strategy.DUMP, Strategy.FAIL)  # they end the job and are not in the ladder


def edits_of(strategy: Strategy) -> dict[str, bool]:
    """Return the edits that a strategy needs, and whether each was made."""
    page = (ROOT / "docs" / "recover" / "policy.md").read_text()
    groups = (INNER, RESTARTS, OUTER, LAST)
    return {
        f"name it in one of INNER, RESTARTS and OUTER in {POLICY}": sum(
            strategy in group for group in groups
        )
        == 1,
        "add its rung to RUNGS in rekindle/recovery/policy/strategies.py": strategy
        in {*RUNGS, *LAST},
        "add it to Recovery.ways in rekindle/coordinator/machine/recovery.py": strategy
        in Driver().machine.recovery.ways,
        "name the job's state in STATES in rekindle/reporting/run_state.py": strategy in STATES,
        "add its [[strategy]] to rekindle/simulation/data/times.toml": strategy
        in load().strategies,
        "add its row to the table of docs/recover/policy.md": f"| `{strategy.value}` |" in page,
    }


@pytest.mark.parametrize("strategy", Strategy)
def test_no_edit_is_missing(strategy: Strategy) -> None:
    """Decision, execution, state name, simulation and page know each strategy."""
    missing = [edit for edit, done in edits_of(strategy).items() if not done]
    assert not missing, f"{strategy.value}: " + "; ".join(missing)


def test_the_enumeration_has_the_order_of_the_ladder() -> None:
    """Incidents and the simulation compare strategies by their order in the enumeration."""
    assert tuple(Strategy) == (*LADDER, *LAST)
