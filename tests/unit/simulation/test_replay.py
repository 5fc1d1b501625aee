"""Single faults and short stories: their decisions, and their exact losses."""

from __future__ import annotations

import pytest
from simulated import prices, setting, strike, with_strategy

from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.policy.policy import Policy, Strategy
from rekindle.simulation.outcome import Loss, Outcome
from rekindle.simulation.replay import replay
from rekindle.simulation.trace import Cause

FREE = Policy(max_restarts=3)
DAY = 86_400.0
RETRY, IN_PLACE, RECOVER = Strategy.RETRY, Strategy.RECOVER_IN_PLACE, Strategy.RECOVER
RESTART, DUMP, FAIL = Strategy.RESTART, Strategy.DUMP, Strategy.FAIL


def lost(outcome: Outcome) -> dict[Loss, float]:
    """Return the losses by kind, and check that they and the work add up to the total time."""
    total = sum(outcome.lost.values()) + outcome.work
    assert total == pytest.approx(outcome.seconds)
    return {loss: pytest.approx(seconds) for loss, seconds in outcome.lost.items() if seconds > 0}


def test_without_faults_nothing_is_lost() -> None:
    """Without faults, all time is work."""
    outcome = replay(setting(FREE), [], DAY)
    assert outcome.goodput == 1.0
    assert lost(outcome) == {}


def test_a_dead_process_costs_the_broken_step_and_its_recovery() -> None:
    """A dead process loses half a step, 0.5 s of detection, and 2 s of recovery in place."""
    outcome = replay(setting(FREE, costs=prices(0.5)), [strike(1005.0, FaultKind.PROCESS)], DAY)
    assert outcome.decisions == {IN_PLACE: 1}
    assert lost(outcome) == {Loss.RECOVERING: 2.5, Loss.REDONE: 5.0}


def test_a_restart_goes_back_to_the_snapshot() -> None:
    """After an error of the script, the job repeats everything since the snapshot at 1000 s."""
    outcome = replay(setting(FREE), [strike(1075.0, FaultKind.USER_CODE)], DAY)
    assert outcome.incidents == {RESTART: 1}
    assert lost(outcome) == {Loss.RECOVERING: 50.0, Loss.REDONE: 75.0}
    assert outcome.to_store == 0


def test_a_lost_node_is_replaced_and_repaired() -> None:
    """With unlimited spares the job does not wait.

    It needs a second spare only while the first lost node is in repair.
    """
    strikes = [
        strike(1000.0, FaultKind.NODE_LOST),
        strike(5000.0, FaultKind.NODE_LOST, nodes=(2,)),
        strike(16_000.0, FaultKind.NODE_LOST),
    ]
    outcome = replay(setting(FREE), strikes, DAY)
    assert outcome.incidents == {RECOVER: 3}
    assert outcome.needed == outcome.alone == [1, 2, 1]
    assert lost(outcome) == {Loss.RECOVERING: 12.0, Loss.REDONE: 12.0}


def test_without_a_spare_the_job_waits_for_a_node_that_is_mended() -> None:
    """Without a spare, the job waits for the repair of the node (500 s) and its start."""
    one = strike(1000.0, FaultKind.NODE_LOST, repair_s=500.0)
    outcome = replay(setting(FREE, spares=0), [one], DAY)
    assert outcome.decisions == {RECOVER: 1}
    assert lost(outcome) == {Loss.NODES: 530.0, Loss.RECOVERING: 4.0}


def test_a_node_that_does_not_come_ends_the_job() -> None:
    """The job waits for a node until the limit of the policy, and then ends.

    A person restarts the job when the node is back.
    """
    one = strike(1000.0, FaultKind.NODE_LOST)
    outcome = replay(setting(FREE, spares=0), [one], DAY)
    assert outcome.decisions == {RECOVER: 1, DUMP: 1}
    assert outcome.ended == 1
    assert lost(outcome)[Loss.PEOPLE] == 3000.0
    waited = outcome.lost[Loss.NODES] + outcome.lost[Loss.PEOPLE] + outcome.lost[Loss.RECOVERING]
    assert waited == pytest.approx(10_030.0)


@pytest.mark.parametrize(
    ("policy", "decisions"),
    [
        (Policy(max_restarts=3), {RESTART: 1, DUMP: 1}),
        (Policy(max_pod_reschedules=1), {Strategy.RESCHEDULE_POD: 1, DUMP: 1}),
        (
            Policy(max_restarts=0, max_reschedules=2),
            {Strategy.RESCHEDULE_JOB_ISOLATED: 1, Strategy.RESCHEDULE_JOB: 1, FAIL: 1},
        ),
    ],
)
def test_no_strategy_waits_longer_for_a_node_than_the_policy(
    policy: Policy, decisions: dict[Strategy, int]
) -> None:
    """Each strategy has the limit of the policy, also when it reschedules the job or a pod.

    The real state machine behaves the same.
    """
    one = strike(1000.0, FaultKind.NODE_LOST)
    outcome = replay(setting(policy, costs=prices(session=False), spares=0), [one], DAY)
    assert outcome.decisions == decisions
    assert outcome.ended == 1
    assert lost(outcome)[Loss.PEOPLE] == 3000.0


def test_a_smaller_world_goes_on_and_grows() -> None:
    """Three of four nodes train until the fourth node is repaired and started."""
    one = strike(1000.0, FaultKind.NODE_LOST)
    outcome = replay(setting(FREE, spares=0, least_nodes=3), [one], DAY)
    assert outcome.incidents == {Strategy.SHRINK: 1}
    found = lost(outcome)
    assert found[Loss.SMALLER] == (10_030.0 - 3.0) / 4
    assert found[Loss.RECOVERING] == 6.0


def test_a_world_that_is_too_small_waits() -> None:
    """If too few nodes are left, the job waits for both lost nodes."""
    both = strike(1000.0, FaultKind.NODE_LOST, nodes=(0, 1), repair_s=100.0)
    outcome = replay(setting(FREE, spares=0, least_nodes=3), [both], DAY)
    assert outcome.decisions == {RECOVER: 2}
    assert outcome.needed == [2]
    assert outcome.alone == []


def test_a_sick_node_is_waited_for_before_the_world_shrinks() -> None:
    """For a faulty node with a live agent, the job waits for a replacement, and then shrinks."""
    one = strike(1000.0, FaultKind.NODE)
    outcome = replay(setting(FREE, spares=0, least_nodes=3), [one], DAY)
    assert outcome.decisions == {RECOVER: 1}
    found = lost(outcome)
    assert found[Loss.NODES] == 600.0
    assert found[Loss.SMALLER] == (10_030.0 - 604.0) / 4


def test_a_restart_waits_for_late_nodes_but_shortly() -> None:
    """Without a Session, the job restarts all ranks after 20 s, in a smaller world."""
    one = strike(1000.0, FaultKind.NODE_LOST)
    costs = prices(session=False)
    outcome = replay(setting(FREE, costs=costs, spares=0, least_nodes=3), [one], DAY)
    assert outcome.decisions == {RESTART: 1}
    found = lost(outcome)
    assert found[Loss.NODES] == 20.0
    assert found[Loss.SMALLER] == (10_030.0 - 70.0) / 4


def test_a_broken_place_comes_again_until_it_is_left() -> None:
    """A device fault returns after a recovery in place, so the job then replaces the node."""
    one = strike(1000.0, FaultKind.PROCESS, cause=Cause.PLACE, becomes=FaultKind.DEVICE)
    outcome = replay(setting(FREE), [one], DAY)
    assert outcome.decisions == {IN_PLACE: 1, RECOVER: 1}
    assert outcome.incidents == {RECOVER: 1}
    assert lost(outcome) == {Loss.RECOVERING: 6.0}


def test_an_error_of_the_script_is_the_scripts() -> None:
    """If the same error returns at the same step, the job does not restart a third time."""
    one = strike(1075.0, FaultKind.USER_CODE, cause=Cause.SCRIPT)
    outcome = replay(setting(FREE), [one], DAY)
    assert outcome.decisions == {RESTART: 2, DUMP: 1}
    assert outcome.ended == 1
    found = lost(outcome)
    assert found[Loss.PEOPLE] == 3000.0
    assert found[Loss.REDONE] == 3 * 75.0


def test_budgets_are_used_up_and_begin_anew_with_a_person() -> None:
    """After three restarts the job ends, and a person's restart resets the budget."""
    strikes = [strike(5000.0 * n, FaultKind.USER_CODE) for n in range(1, 6)]
    outcome = replay(setting(FREE), strikes, DAY)
    assert outcome.decisions == {RESTART: 4, DUMP: 1}
    assert outcome.ended == 1


def test_nothing_strikes_a_job_that_does_not_run() -> None:
    """The simulation ignores faults while the job waits for a person."""
    strikes = [strike(1000.0, FaultKind.USER_CODE), strike(2000.0, FaultKind.PROCESS)]
    outcome = replay(setting(Policy(max_restarts=0)), strikes, DAY)
    assert outcome.decisions == {DUMP: 1}
    outcome = replay(setting(Policy(max_restarts=0), snapshot=0.0), strikes, DAY)
    assert outcome.decisions == {FAIL: 1}


def test_a_fault_during_recovery_begins_it_again() -> None:
    """A fault 30 s into a restart starts it again: 80 s in total, and one incident."""
    strikes = [strike(1000.0, FaultKind.USER_CODE), strike(1030.0, FaultKind.USER_CODE, nodes=(2,))]
    outcome = replay(setting(FREE), strikes, DAY)
    assert outcome.incidents == {RESTART: 1}
    assert outcome.decisions == {RESTART: 2}
    assert lost(outcome) == {Loss.RECOVERING: 80.0}


def test_a_restart_under_way_is_not_cut_short() -> None:
    """During a restart no generation exists, so a lighter fault also leads to a restart."""
    strikes = [strike(1000.0, FaultKind.USER_CODE), strike(1010.0, FaultKind.PROCESS, nodes=(2,))]
    outcome = replay(setting(FREE), strikes, DAY)
    assert outcome.decisions == {RESTART: 2}
    assert lost(outcome) == {Loss.RECOVERING: 60.0}


def test_a_second_fault_strikes_inside_the_recovery() -> None:
    """The second fault belongs to the trace of the first, and occurs during its recovery."""
    second = strike(0.0, FaultKind.PROCESS, nodes=(3,))
    one = strike(1000.0, FaultKind.PROCESS, second=(0.5, second))
    outcome = replay(setting(FREE), [one], DAY)
    assert outcome.incidents == {IN_PLACE: 1}
    assert outcome.decisions == {IN_PLACE: 2}
    assert lost(outcome) == {Loss.RECOVERING: 3.0}


def test_a_lemon_strikes_until_it_is_replaced() -> None:
    """After the replacement of a lemon node, its later faults do not occur."""
    strikes = [
        strike(1000.0, FaultKind.PROCESS, of_lemon=True),
        strike(2000.0, FaultKind.NODE_LOST, of_lemon=True),
        strike(3000.0, FaultKind.PROCESS, of_lemon=True),
        strike(4000.0, FaultKind.PROCESS),
    ]
    outcome = replay(setting(FREE), strikes, DAY)
    assert outcome.decisions == {IN_PLACE: 2, RECOVER: 1}


def test_the_loss_of_all_nodes_goes_back_to_the_store() -> None:
    """After the loss of all nodes, no replica or snapshot exists, so the store is the source."""
    everybody = strike(1055.0, FaultKind.NODE_LOST, nodes=(0, 1, 2, 3))
    outcome = replay(setting(FREE, checkpoint=500.0), [everybody], DAY)
    assert outcome.to_store == 1
    assert outcome.needed == [4]
    assert lost(outcome)[Loss.REDONE] == 55.0


def test_approval_is_waited_for() -> None:
    """A person approves after 60 s; if the approval timeout is shorter, the job ends."""
    one = strike(1000.0, FaultKind.USER_CODE)
    asked = Policy(max_restarts=1, approve=(RESTART,))
    assert lost(replay(setting(asked), [one], DAY)) == {Loss.PEOPLE: 60.0, Loss.RECOVERING: 50.0}
    hasty = Policy(max_restarts=1, approve=(RESTART,), approval_timeout_s=10.0)
    outcome = replay(setting(hasty), [one], DAY)
    assert outcome.ended == 1
    assert outcome.lost[Loss.PEOPLE] == pytest.approx(3010.0)


def test_a_strategy_that_fails_is_followed_by_another() -> None:
    """If a retry fails, the next strategy restarts the rank."""
    costs = with_strategy(prices(), RETRY, succeeds=1e-12)
    one = strike(1000.0, FaultKind.DEVICE_MEMORY)
    outcome = replay(setting(FREE, costs=costs), [one], DAY)
    assert outcome.decisions == {RETRY: 1, IN_PLACE: 1}
    assert lost(outcome) == {Loss.RECOVERING: 3.0}


def test_a_recovery_may_outlast_the_simulated_time() -> None:
    """Time after the end of the simulation does not count."""
    outcome = replay(setting(FREE), [strike(990.0, FaultKind.USER_CODE)], 1000.0)
    assert lost(outcome) == {Loss.RECOVERING: 10.0, Loss.REDONE: 90.0}
