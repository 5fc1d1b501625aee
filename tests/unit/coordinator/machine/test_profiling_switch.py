"""Light profiling: the agents that get the switch, and the state that later ones inherit."""

from __future__ import annotations

import pytest
from jobs.driver import Driver

from rekindle.coordinator.machine.inheritance import earlier
from rekindle.profiling.switch import ProfilingOrder, Switch, switch_of
from rekindle.protocol import agent as p
from rekindle.recovery.journal import journal

FOUR = switch_of(("step",))


def order(driver: Driver, *kinds: str, on: bool = True) -> str:
    """Switch profiling. Return the reason if the job refuses it."""
    refused = driver.machine.switch.switch(ProfilingOrder(on=on, kinds=kinds, by="ada"), now=7.9)
    driver.collect()
    return refused


def test_all_nodes_are_told_and_so_are_later_generations() -> None:
    driver = Driver(nodes=2, processes=1)
    driver.train()
    assert order(driver) == ""
    wanted = p.Profile(switch=FOUR, since=7)
    settings = driver.sent_by_node(p.Settings)
    assert {node: each.profile for node, each in settings.items()} == {0: wanted, 1: wanted}
    driver.exits(1, signal=9, finished=3)
    driver.spawned()
    driver.arrive([0], 3)
    driver.arrive([1])
    assert {form.settings.profile for form in driver.sent_by_node(p.FormGeneration).values()} == {
        wanted
    }


def test_what_changes_nothing_is_not_said() -> None:
    driver = Driver(nodes=1, processes=1)
    driver.train()
    order(driver)
    order(driver, "forward")
    driver.say(0, p.ProfilingSwitchRead(switch=Switch()))
    assert len(driver.recorded(journal.Profiled)) == 1
    assert not driver.sent_by_node(p.Settings)


def test_a_switch_that_an_agent_reads() -> None:
    driver = Driver(nodes=2, processes=1)
    driver.train()
    driver.say(1, p.ProfilingSwitchRead(switch=FOUR))
    assert driver.last(journal.Profiled).by == "data-trace"
    assert set(driver.sent_by_node(p.Settings)) == {0, 1}


@pytest.mark.parametrize("before", [Switch(), FOUR])
@pytest.mark.parametrize("another", [False, True])
def test_what_the_switch_has_said_before_is_no_news(before: Switch, another: bool) -> None:
    """An old switch file that an agent reads again does not turn profiling on.

    A user has turned profiling off since then. This also holds after a takeover, and if the file
    matched the state at that time.
    """
    driver = Driver(nodes=2, processes=1)
    driver.train()
    if before.words:
        order(driver)
    driver.say(0, p.ProfilingSwitchRead(switch=FOUR))
    order(driver, on=False)
    if another:
        driver.lose_coordinator()
        for node in range(2):
            live = p.LiveRank(rank=node, pid=driver.pids[node], training=True)
            driver.hello(node, generation=1, ranks=(live,))
    driver.say(1, p.ProfilingSwitchRead(switch=FOUR))
    assert not driver.sent_by_node(p.Settings)
    driver.say(1, p.ProfilingSwitchRead(switch=Switch()))
    driver.say(1, p.ProfilingSwitchRead(switch=FOUR))
    assert set(driver.sent_by_node(p.Settings)) == {0, 1}


def test_before_ranks_are_there() -> None:
    driver = Driver(nodes=1, processes=1)
    driver.start()
    assert order(driver, "communication") == ""
    driver.arrive(driver.ranks)
    assert driver.sent_by_node(p.FormGeneration)[0].settings.profile.switch.communication


def test_what_cannot_be_is_refused() -> None:
    driver = Driver(nodes=1, processes=1)
    driver.train()
    order(driver, "communication")
    assert "off only together with communication" in order(driver, "step", on=False)
    assert "is not a kind of record" in order(driver, "kernels")
    driver.stop()
    assert order(driver) == "the job is ending"


def test_the_folder_keeps_its_name() -> None:
    """A new coordinator or attempt resumes profiling in the same folder."""
    events = [
        journal.Profiled(switch=FOUR, since=7),
        journal.Profiled(switch=Switch(), since=7),
        journal.Profiled(switch=switch_of(("communication",)), since=7),
    ]
    assert earlier(events).profile == p.Profile(switch=events[-1].switch, since=7)
    assert earlier([]).profile == p.Profile()
