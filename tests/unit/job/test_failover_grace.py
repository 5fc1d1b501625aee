"""The time that old ranks have to end before a reschedule: the environment variable of seed 004."""

from __future__ import annotations

import argparse

import pytest
from jobs.driver import Driver, spec_of
from jobs.trained import trained

from rekindle import names
from rekindle.cli.local_options import RUN
from rekindle.cli.options import add
from rekindle.cli.run_spec import read_spec
from rekindle.errors import UsageError
from rekindle.job.spec import check
from rekindle.protocol import agent as p
from rekindle.recovery.policy.policy import ALLOWABLE, INNER, Policy

OUTER_ONLY = tuple(strategy for strategy in ALLOWABLE if strategy not in INNER)
PLACED_ANEW = Policy(strategies=OUTER_ONLY, max_restarts=0, max_reschedules=1)
POD = Policy(strategies=OUTER_ONLY, max_restarts=0, max_pod_reschedules=1)
RESTARTED = Policy(strategies=OUTER_ONLY, max_restarts=1)


def graces(job: Driver) -> set[float]:
    """Return the grace periods of the Kill messages that the coordinator sent."""
    return {kill.grace_s for kill in job.sent_by_node(p.Kill).values()}


@pytest.mark.parametrize(
    ("policy", "given", "grace_s"),
    [
        (PLACED_ANEW, {}, 10.0),
        (PLACED_ANEW, {names.ENV_FAILOVER_GRACE: "-1"}, 10.0),
        (PLACED_ANEW, {names.ENV_FAILOVER_GRACE: "3"}, 3.0),
        (POD, {names.ENV_FAILOVER_GRACE: "3"}, 3.0),
        (RESTARTED, {names.ENV_FAILOVER_GRACE: "3"}, 10.0),  # a restart does not move the job
    ],
)
def test_a_reschedule_waits_so_long_for_the_old_ranks(
    policy: Policy, given: dict[str, str], grace_s: float
) -> None:
    """A reschedule gives the old ranks the configured grace period before the agents kill them."""
    job = trained(5, nodes=2, policy=policy, environment=given)
    if policy is POD:
        job.lose(1)
    else:
        job.exits(1, code=3)
    assert graces(job) == {grace_s}


@pytest.mark.parametrize("text", ["0", "-2", "ten", "", "1.5", "9" * 12])
def test_what_is_no_number_of_seconds_is_refused(text: str) -> None:
    """check() refuses an invalid number of seconds before the job starts, with the valid values."""
    spec = spec_of(nodes=1, processes=1, environment={names.ENV_FAILOVER_GRACE: text})
    with pytest.raises(UsageError, match="whole number of seconds, at least 1, or -1"):
        check(spec)


def test_the_command_line_passes_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line copies the variable into the spec.

    The coordinator does not have the environment of the command line.
    """
    monkeypatch.setenv(names.ENV_FAILOVER_GRACE, "7")
    parser = argparse.ArgumentParser()
    add(parser, RUN)
    assert read_spec(parser.parse_args(["train.py"])).failover_grace_s == 7.0
