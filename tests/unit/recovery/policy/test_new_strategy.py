"""A strategy is in all places that need it, or the test names the missing edit."""

import re
from typing import get_type_hints

import pytest
import simulated
from jobs.driver import Driver
from repository import ROOT

from rekindle.recovery.faults.fault import Fault, FaultKind
from rekindle.recovery.policy.history import Situation
from rekindle.recovery.policy.policy import (
    ALLOWABLE,
    INNER,
    LADDER,
    OUTER,
    RESTARTS,
    Policy,
    Strategy,
)
from rekindle.recovery.policy.strategies import STARTS_NO_PROCESS, STRATEGIES
from rekindle.reporting.run_state import STATES
from rekindle.settings import declared
from rekindle.simulation.costs import load

POLICY = "rekindle/recovery/policy/policy.py"
PAGE = "docs/recover/policy.md"
LAST = (Strategy.DUMP, Strategy.FAIL)  # they end the job and are not in the ladder


def edits_of(strategy: Strategy) -> dict[str, bool]:
    """Return the edits that a strategy needs, and whether each was made."""
    groups = (INNER, RESTARTS, OUTER, LAST)
    return {
        f"name it in one of INNER, RESTARTS and OUTER in {POLICY}": sum(
            strategy in group for group in groups
        )
        == 1,
        f"name it in the description of Policy.strategies in {POLICY}": strategy.value
        in described()
        or strategy is Strategy.FAIL,
        "add its function to STRATEGIES in rekindle/recovery/policy/strategies.py": strategy
        in {*STRATEGIES, *LAST},
        "add it to Recovery.ways in rekindle/coordinator/machine/recovery.py": strategy
        in Driver().machine.recovery.ways,
        "name the job's state in STATES in rekindle/reporting/run_state.py": strategy in STATES,
        "add its [[strategy]] to rekindle/simulation/data/times.toml": strategy
        in load().strategies,
        "add it to TIMES in tests/support/simulated/__init__.py": strategy in simulated.TIMES,
        **edits_of_page(strategy),
    }


def described() -> list[str]:
    """Return the words of the description of `Policy.strategies`."""
    meta = declared(get_type_hints(Policy, include_extras=True)["strategies"])
    assert meta is not None
    return re.findall(r"[a-z-]+", str(meta.description))


def edits_of_page(strategy: Strategy) -> dict[str, bool]:
    """Return the edits of the user's page: the lines that must name the strategy, and must not."""
    lines = (ROOT / PAGE).read_text().splitlines()
    inner = strategy in INNER
    wanted = {
        f"| `{strategy.value}` |": True,
        "| `strategies` |": strategy not in Policy().strategies,
        "- Only a script with a [Session]": inner,
        "- A job of MindSpore": inner and strategy not in STARTS_NO_PROCESS,
        **({"| `max_recoveries` |": True} if inner else {}),
    }
    return {
        f"{'add it to' if named else 'remove it from'} the line {begin!r} of {PAGE}": named
        == any(line.startswith(begin) and f"`{strategy.value}`" in line for line in lines)
        for begin, named in wanted.items()
    }


@pytest.mark.parametrize("strategy", Strategy)
def test_no_edit_is_missing(strategy: Strategy) -> None:
    """Decision, execution, state name, simulation and page know each strategy."""
    missing = [edit for edit, done in edits_of(strategy).items() if not done]
    assert not missing, f"{strategy.value}: " + "; ".join(missing)


@pytest.mark.parametrize("kind", FaultKind)
@pytest.mark.parametrize("strategy", STARTS_NO_PROCESS)
def test_a_dead_rank_needs_a_process(strategy: Strategy, kind: FaultKind) -> None:
    """A strategy that starts no process does not help against the end of a rank."""
    fault = Fault(kind=kind, message="it ended", rank=1, node=0)
    situation = Situation(fault=fault, session=True, formed=True, newest=5, dead=True)
    assert STRATEGIES[strategy](Policy(strategies=ALLOWABLE), situation) is None


def test_the_enumeration_has_the_order_of_the_ladder() -> None:
    """Incidents and the simulation compare strategies by their order in the enumeration."""
    assert tuple(Strategy) == (*LADDER, *LAST)
