"""The node check: the orders that agents get, the pairs that they form, and the verdicts."""

from __future__ import annotations

import msgspec
import pytest
from jobs.driver import spec_of

from rekindle.coordinator.machine.job_state import CancelTimer, Send, SetTimer, Timer
from rekindle.coordinator.machine.node_check_run import CheckedAgent, NodeCheckRun, NodeJudged
from rekindle.names import SPARE
from rekindle.protocol.node_check import (
    CheckAlone,
    Checked,
    CheckOver,
    CheckPair,
    CheckReady,
    CheckStop,
)
from rekindle.recovery.node_check.evidence import Measurement
from rekindle.recovery.node_check.verdicts import Health

WELL = {Measurement.COMPUTE: 1.0, Measurement.MEMORY: 1.0}


class Visit:
    """A node check and simulated agents that obey its orders.

    Node numbers are connection numbers.
    """

    def __init__(self, nodes: int, spares: int = 0, *, beside_ranks: bool = False) -> None:
        self.commands: list[Send | SetTimer | CancelTimer] = []
        spec = spec_of(nodes=nodes, processes=1, spares=spares, network_check=True)
        awaited, do = nodes + spares, self.commands.append
        self.check = NodeCheckRun(spec, awaited, do, beside_ranks=beside_ranks)
        self.timers: set[Timer] = set()
        self.orders: list[tuple[int, CheckAlone | CheckPair]] = []
        self.stopped: list[int] = []
        self.judged: dict[int, NodeJudged] = {}
        self.over: list[int] = []
        self.cut: set[int] = set()  # agents whose collectives fail
        self.slow: dict[int, float] = {}
        self.silent: set[int] = set()
        self.dying: set[int] = set()

    def come(self, *agents: int, host: str = "") -> None:
        for agent in agents:
            self.check.add(
                CheckedAgent(
                    connection=agent,
                    node=SPARE,
                    host=host or f"host-{agent}",
                    address=f"10.0.0.{agent}",
                )
            )
            self.collect()

    def collect(self) -> None:
        commands = list(self.commands)
        self.commands.clear()
        for judged in self.check.take_judged():
            assert judged.connection not in self.judged
            self.judged[judged.connection] = judged
        for command in commands:
            match command:
                case SetTimer(timer=timer):
                    self.timers.add(timer)
                case CancelTimer(timer=timer):
                    self.timers.discard(timer)
                case Send(connection, CheckStop()):
                    self.stopped.append(connection)
                case Send(connection, CheckOver()):
                    self.over.append(connection)
                case Send(connection, CheckAlone() | CheckPair() as order):
                    self.orders.append((connection, order))

    def work(self) -> None:
        """Let the agents carry out all orders, until no order is left."""
        while self.orders:
            agent, order = self.orders.pop(0)
            if agent in self.silent:
                continue
            self.answer(agent, order)

    def answer(self, agent: int, order: CheckAlone | CheckPair) -> None:
        if agent in self.dying:
            self.say(agent, Checked(serial=order.serial, error="its process ended", device=0))
            return
        if isinstance(order, CheckAlone):
            self.say(agent, CheckReady(port=1000 + agent))
            factor = self.slow.get(agent, 1.0)
            seconds = {part: each * factor for part, each in WELL.items()}
            self.say(agent, Checked(serial=order.serial, seconds=seconds))
            return
        if agent in self.cut:
            self.say(agent, Checked(serial=order.serial, error="connection reset"))
        else:
            self.say(agent, Checked(serial=order.serial, seconds={Measurement.LINK: 1.0}))

    def say(self, agent: int, message: Checked | CheckReady) -> None:
        self.check.on_message(agent, message)
        self.collect()

    def time_out(self, timer: Timer) -> None:
        assert timer in self.timers
        self.timers.discard(timer)
        if timer in (Timer.CHECK_BEGINS, Timer.EXAMINATION_BEGINS):
            self.check.on_gathering_over()
        else:
            self.check.on_answers_late()
        self.collect()

    def healths(self) -> dict[int, Health]:
        return {agent: each.verdict.health for agent, each in sorted(self.judged.items())}


def all_come(nodes: int, spares: int = 0) -> Visit:
    visit = Visit(nodes, spares)
    visit.come(*range(nodes + spares))
    return visit


def test_the_healthy_are_let_in() -> None:
    visit = all_come(4)
    assert {agent for agent, _ in visit.orders} == {0, 1, 2, 3}
    visit.work()
    assert visit.healths() == dict.fromkeys(range(4), Health.HEALTHY)
    assert sorted(visit.over) == [0, 1, 2, 3]
    assert not visit.check.is_busy
    assert not visit.timers


def test_it_begins_when_all_have_come_spares_too() -> None:
    visit = Visit(2, spares=1)
    visit.come(0, 1)
    assert not visit.orders
    visit.come(2)
    assert {agent for agent, _ in visit.orders} == {0, 1, 2}


def test_it_begins_without_those_who_do_not_come() -> None:
    visit = Visit(4)
    visit.come(0, 1, 2)
    assert not visit.orders
    visit.time_out(Timer.CHECK_BEGINS)
    visit.work()
    assert visit.healths() == dict.fromkeys(range(3), Health.HEALTHY)


def test_pairs_meet_at_the_first_ones_store() -> None:
    visit = all_come(2)
    for agent, order in list(visit.orders):
        visit.answer(agent, order)
    (first, one), (second, other) = visit.orders[2:]
    assert isinstance(one, CheckPair)
    assert isinstance(other, CheckPair)
    assert (first, one.place, second, other.place) == (0, 0, 1, 1)
    assert (one.host, one.port) == (other.host, other.port) == ("10.0.0.0", 1000)
    assert one.serial == other.serial


def test_nodes_of_one_host_take_turns() -> None:
    visit = Visit(4)
    visit.come(0, 1, host="a")
    visit.come(2, 3, host="b")
    busy = [agent for agent, _ in visit.orders]
    assert busy == [0, 2]
    visit.work()
    assert visit.healths() == dict.fromkeys(range(4), Health.HEALTHY)


def test_those_whose_collectives_fail_are_named() -> None:
    visit = all_come(4)
    visit.cut = {2}
    visit.work()
    found = visit.healths()
    assert found.pop(2) is Health.FAULTY
    assert set(found.values()) == {Health.HEALTHY}
    assert "host-" in visit.judged[2].verdict.reason
    assert list(visit.judged)[-1] == 2  # the last, so that other agents can replace it


def test_one_that_dies_is_stopped_being_waited_for() -> None:
    visit = all_come(4)
    visit.dying = {1}
    visit.work()
    verdict = visit.judged[1].verdict
    assert (verdict.health, verdict.part, verdict.device) == (Health.FAULTY, Measurement.COMPUTE, 0)
    assert "(2 times)" in verdict.reason


def test_a_partner_of_one_that_failed_is_told_to_stop() -> None:
    visit = all_come(2)
    for agent, order in list(visit.orders):
        visit.answer(agent, order)
    _, order = visit.orders[2]
    visit.orders.clear()
    visit.say(0, Checked(serial=order.serial, error="connection reset"))
    assert visit.stopped == [1]
    visit.say(1, Checked(serial=order.serial, error="killed"))
    assert visit.healths() == {0: Health.UNKNOWN, 1: Health.UNKNOWN}


def test_a_slow_one_is_named() -> None:
    visit = all_come(8)
    visit.slow = {3: 1.3, 5: 1.4}
    visit.work()
    slow = [agent for agent, each in visit.healths().items() if each is Health.STRAGGLER]
    assert slow == [3, 5]


def test_a_silent_one_is_not_waited_for_longer_than_the_limit() -> None:
    visit = all_come(4)
    visit.silent = {0}
    while visit.check.is_busy:
        visit.work()
        if visit.check.is_busy:
            visit.time_out(Timer.CHECK)
    assert visit.healths()[0] is Health.FAULTY
    assert "did not answer within 120 s" in visit.judged[0].verdict.reason
    assert 0 in visit.stopped


@pytest.mark.parametrize("when", ["before", "alone", "pair"])
def test_one_whose_agent_goes_is_forgotten(when: str) -> None:
    visit = Visit(3) if when == "before" else all_come(3)
    if when == "before":
        visit.come(0, 1)
    if when == "pair":
        for agent, order in list(visit.orders):
            visit.answer(agent, order)
        visit.orders = visit.orders[3:]
    visit.silent = {1}
    assert visit.check.on_lost(1)
    visit.collect()
    assert not visit.check.knows(1)
    if when == "before":
        visit.time_out(Timer.CHECK_BEGINS)
    visit.work()
    assert not visit.check.is_busy
    assert 1 not in visit.judged
    assert set(visit.judged) == {0, 2} if when != "before" else {0}


def test_a_stranger_that_goes_is_none_of_ours() -> None:
    visit = all_come(2)
    assert not visit.check.on_lost(77)


def test_whoever_comes_meanwhile_is_checked_next() -> None:
    visit = all_come(2)
    visit.come(7)
    assert {agent for agent, _ in visit.orders} == {0, 1}
    visit.work()
    assert visit.healths() == dict.fromkeys((0, 1, 7), Health.HEALTHY)
    visit.come(8)
    visit.work()
    assert visit.judged[8].verdict.health is Health.HEALTHY


def test_an_answer_that_comes_too_late_means_nothing() -> None:
    visit = all_come(2)
    (_, order), *_ = visit.orders
    visit.say(0, Checked(serial=order.serial + 100, error="late"))
    visit.say(1, Checked(serial=order.serial, error="another's"))
    visit.work()
    assert set(visit.healths().values()) == {Health.HEALTHY}


def test_verdicts_survive_the_journal() -> None:
    visit = all_come(4)
    visit.cut = {1}
    visit.work()
    verdict = visit.judged[1].verdict
    assert msgspec.json.decode(msgspec.json.encode(verdict), type=type(verdict)) == verdict
    assert "faulty" in verdict.in_words()


def test_whose_partner_has_no_memory_is_not_blamed() -> None:
    """A node has no fault if its partner runs out of memory, even if the node reports first."""
    visit = all_come(2)
    for agent, order in list(visit.orders):
        visit.answer(agent, order)
    _, order = visit.orders[2]
    visit.orders.clear()
    visit.say(1, Checked(serial=order.serial, error="connection reset"))
    visit.say(0, Checked(serial=order.serial, error="OutOfMemoryError: CUDA out of memory."))
    assert visit.healths() == {0: Health.UNKNOWN, 1: Health.UNKNOWN}
    assert "not measured with another node: OutOfMemoryError" in visit.judged[1].verdict.reason


@pytest.mark.parametrize("beside_ranks", [True, False])
def test_checkers_are_told_whether_ranks_hold_the_devices(beside_ranks: bool) -> None:
    """Each order of a check states whether ranks hold the devices: only while they train."""
    visit = Visit(4, beside_ranks=beside_ranks)
    visit.come(*range(4))
    beside: list[bool] = []
    while visit.orders:
        agent, order = visit.orders.pop(0)
        beside.append(order.beside_ranks)
        visit.answer(agent, order)
    assert beside == [beside_ranks] * (4 + 2 * 6)
