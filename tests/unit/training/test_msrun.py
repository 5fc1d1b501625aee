"""The options that Rekindle adds to msrun's command line."""

from __future__ import annotations

import pytest

from rekindle.errors import UsageError
from rekindle.training.msrun import Agent, options_of


def test_what_the_job_knows_about_nodes() -> None:
    known = {"MASTER_ADDR": "n0", "MASTER_PORT": "4711", "GROUP_RANK": "1", "LOCAL_WORLD_SIZE": "1"}
    assert options_of(known) == [
        "--join=True",
        "--worker_num=0",
        "--master_addr=n0",
        "--master_port=4711",
        "--node_rank=1",
    ]


def test_without_a_job_msrun_has_its_own_defaults() -> None:
    assert options_of({}) == ["--join=True", "--worker_num=0"]


def test_several_msruns_on_a_node_are_refused() -> None:
    with pytest.raises(UsageError, match="this node has 2 msruns; give --nproc-per-node 1"):
        options_of({"LOCAL_WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("", "{RSC:1}"),
        ("{TRE:1}", "{TRE:1, RSC:1}"),
        ("{}", "{RSC:1}"),
        ("{UCE:1, TTP:1}", "{UCE:1, TTP:1}"),
    ],
)
def test_an_agent_is_asked_for_and_nothing_is_taken_away(text: str, asked: str) -> None:
    assert Agent({"MS_ENABLE_TFT": text}).environment()["MS_ENABLE_TFT"] == asked


def test_the_agent_is_of_mindspore_alone() -> None:
    api = Agent({}).modules()["taskd.api.taskd_agent_api"]
    assert api["init_taskd_agent"]({"Framework": "MindSpore"})
    assert not api["init_taskd_agent"]({"Framework": "PyTorch"})


def test_the_plugin_of_earlier_taskds_is_the_same_agent() -> None:
    """MindSpore registers four callbacks at `MSRunPlugin`, and starts it."""
    agent = Agent({})
    module = agent.modules()["taskd.python.framework.agent.ms_mgr.msrun_plugin"]
    plugin = module["MSRunPlugin"]()
    for name in ("KILL_WORKER", "START_ALL_WORKER", "START_WORKER_LIST", "MONITOR"):
        plugin.register_callbacks(name, print)
    assert set(agent._callbacks) == {
        "KILL_WORKER",
        "START_ALL_WORKER",
        "START_WORKER_LIST",
        "MONITOR",
    }
    assert plugin.start == agent.start


def test_the_users_own_intervals_stay() -> None:
    environment = Agent({"MS_RETRY_INTERVAL_LOWER": "3"}).environment()
    assert (environment["MS_RETRY_INTERVAL_LOWER"], environment["MS_RETRY_INTERVAL_UPPER"]) == (
        "3",
        "1",
    )
