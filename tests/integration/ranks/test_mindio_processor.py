"""The order and arguments of MindIO's handler calls, and the messages to the agent."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from mindio_names.ranks import ARGUMENTS, CONTEXT, World, form_of
from waiting import result_of, wait_until

from rekindle.errors import SessionError
from rekindle.protocol import agent as protocol
from rekindle.rank.snapshot_schedule import Moment
from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.policy.plan import RankPlan, StateSource
from rekindle.training.mindio import begin_step, exception_handler, framework
from rekindle.training.mindio import enums as words
from rekindle.training.mindio.enums import RepairType, ReportState
from rekindle.training.mindio.processor import Processor

NORMAL, UCE = ReportState.RS_NORMAL, ReportState.RS_UCE
OWN = RankPlan(source=StateSource.SELF)
SENDS = RankPlan(source=StateSource.SELF, sends_to=(1,))
TAKES = RankPlan(source=StateSource.PEER, peer=0)
AFTER_2 = Moment(2, False, lambda: True)


@pytest.fixture
def pair() -> Iterator[World]:
    """Return two ranks that have done two steps."""
    world = World(2).start()
    world.step(1)
    world.step(2)
    assert [rank.hear(protocol.StepDone).finished for rank in world.ranks] == [1, 1]
    yield world
    world.close()


def repair(kind: RepairType, step: int, *, rebuild: bool, pair: tuple[int, int]) -> Any:
    """Return the expected call of a repair handler."""
    source, target = pair
    info = {
        "type": [0],
        "repair_type": kind.value,
        "src": [source],
        "dst": [target],
        "rank_list": sorted({source, target}),
    }
    return ("repair", step, rebuild, [target], info, ARGUMENTS, CONTEXT)


def cleaned(is_uce_error: bool) -> list[Any]:
    """Return the calls before each repair."""
    return [("stop", ARGUMENTS, CONTEXT), ("clean", is_uce_error, ARGUMENTS, CONTEXT)]


ROLLED_BACK = ("rollback", 2, ARGUMENTS, CONTEXT)


def test_damaged_memory_is_repaired_in_mindio_s_order(pair: World) -> None:
    """After damaged memory both ranks call stop, clean, repair and rollback.

    Training then continues from the step.
    """
    recovered = pair.recover(NORMAL, UCE)
    failed = pair.ranks[1].hear(protocol.StepFailed)
    assert (failed.kind, failed.finished, failed.error) == (FaultKind.DEVICE_MEMORY, 2, "RS_UCE")
    pair.over(1, 2)
    arrived = pair.form(2, 2, [SENDS, TAKES])
    assert [(each.finished, each.torn, each.state_generation) for each in arrived] == [
        (2, False, 1),
        (2, True, 1),
    ]
    pair.ready(2)
    assert all(result_of(each) for each in recovered)
    sends = repair(RepairType.RT_SEND, 2, rebuild=False, pair=(0, 1))
    takes = repair(RepairType.RT_UCE_HIGHLEVEL, 2, rebuild=True, pair=(0, 1))
    assert pair.ranks[0].calls == [*cleaned(False), sends, ROLLED_BACK]
    assert pair.ranks[1].calls == [*cleaned(True), takes, ROLLED_BACK]
    assert [rank.processor.generations.repair_step for rank in pair.ranks] == [2, 2]
    pair.step(3)
    assert [rank.hear(protocol.StepDone).finished for rank in pair.ranks] == [3, 3]


def test_a_failed_link_repairs_no_state(pair: World) -> None:
    """After a failed link both ranks keep their states and only roll back."""
    recovered = pair.recover(NORMAL, ReportState.RS_HCCL_FAILED)
    assert pair.ranks[1].hear(protocol.StepFailed).kind is FaultKind.LINK
    pair.over(1, 2)
    arrived = pair.form(2, 2, [OWN, OWN])
    assert not any(each.torn for each in arrived)
    pair.ready(2)
    assert all(result_of(each) for each in recovered)
    for rank in pair.ranks:
        assert rank.calls == [*cleaned(False), ROLLED_BACK]


def test_an_update_that_broke_off_leaves_no_state(pair: World) -> None:
    """A rank whose update broke off gets the state of a peer and keeps its model."""
    pair.ranks[1].processor.begin_update()
    recovered = pair.recover(NORMAL, ReportState.RS_HCCL_FAILED)
    pair.ranks[1].hear(protocol.StepFailed)
    pair.over(1, 2)
    assert [each.torn for each in pair.form(2, 2, [SENDS, TAKES])] == [False, True]
    pair.ready(2)
    assert all(result_of(each) for each in recovered)
    takes = repair(RepairType.RT_RECV_REPAIR, 2, rebuild=False, pair=(0, 1))
    assert takes in pair.ranks[1].calls


def test_memory_that_is_no_part_of_the_state_costs_none(pair: World) -> None:
    """If the clean handler answers 2, the damaged memory is not part of the state.

    The rank then offers its own state.
    """
    pair.ranks[1].answers["clean"] = 2
    recovered = pair.recover(NORMAL, UCE)
    pair.ranks[1].hear(protocol.StepFailed)
    pair.over(1, 2)
    assert not any(each.torn for each in pair.form(2, 2, [OWN, OWN]))
    pair.ready(2)
    assert all(result_of(each) for each in recovered)
    assert pair.ranks[1].calls == [*cleaned(True), ROLLED_BACK]


@pytest.mark.parametrize("kind", ["stop", "clean"])
def test_a_device_that_cannot_be_cleaned_ends_its_process(pair: World, kind: str) -> None:
    """If stop or clean fails, the process ends and does not join the next generation."""
    pair.ranks[1].answers[kind] = 1 if kind == "clean" else lambda: 1 / 0
    recovered = pair.recover(NORMAL, UCE)
    pair.ranks[1].hear(protocol.StepFailed)
    pair.over(1, 2)
    assert result_of(recovered[1]) is False
    pair.ranks[0].hear(protocol.Arrived)
    pair.ranks[0].tell(protocol.EndSession(finished=2))
    assert result_of(recovered[0]) is False


def test_a_repair_that_fails_ends_its_process(pair: World) -> None:
    """A failed repair ends the process with a device fault; the other rank arrives again."""
    pair.ranks[1].answers["repair"] = lambda: 1 / 0
    recovered = pair.recover(NORMAL, UCE)
    pair.ranks[1].hear(protocol.StepFailed)
    pair.over(1, 2)
    pair.form(2, 2, [SENDS, TAKES])
    failed = pair.ranks[1].hear(protocol.StepFailed)
    assert (failed.kind, failed.generation) == (FaultKind.DEVICE, 2)
    assert result_of(recovered[1]) is False
    pair.ranks[1].processor.generations.gate.leave()  # as the end of its process does
    assert pair.ranks[0].hear(protocol.StepFailed).kind is FaultKind.LINK
    pair.ranks[0].tell(protocol.GenerationEnded(generation=2))
    assert pair.ranks[0].hear(protocol.Arrived).torn is False
    pair.ranks[0].tell(protocol.EndSession(finished=2))
    result_of(recovered[0])


def test_what_asks_for_a_checkpoint_has_all_go_back_to_it(pair: World) -> None:
    """RS_RETRY: each rank's handler loads a checkpoint, and training continues from its step."""
    for rank in pair.ranks:
        rank.answers["repair"] = lambda each=rank: each.processor.loaded(1)
    recovered = pair.recover(NORMAL, ReportState.RS_RETRY)
    assert pair.ranks[1].hear(protocol.StepFailed).kind is FaultKind.TRANSIENT
    pair.over(1, 2)
    pair.form(2, 2, [OWN, OWN])
    pair.ready(1)
    assert all(result_of(each) for each in recovered)
    for rank in pair.ranks:
        loads = repair(RepairType.RT_LOAD_CKPT, 2, rebuild=False, pair=(rank.rank, rank.rank))
        assert rank.calls[2:] == [loads, ("rollback", 1, ARGUMENTS, CONTEXT)]
        assert (rank.processor.finished, rank.processor.generations.repair_step) == (1, 1)


def test_what_a_late_error_has_spoilt_no_peer_repairs(pair: World) -> None:
    """RS_UCE_CORRUPTED: all ranks load a checkpoint; the damaged rank first rebuilds its model."""
    for rank in pair.ranks:
        rank.answers["repair"] = lambda each=rank: each.processor.loaded(1)
    recovered = pair.recover(NORMAL, ReportState.RS_UCE_CORRUPTED)
    assert pair.ranks[1].hear(protocol.StepFailed).kind is FaultKind.DEVICE_MEMORY
    pair.over(1, 2)
    pair.form(2, 2, [SENDS, TAKES])
    pair.ready(1)
    assert all(result_of(each) for each in recovered)
    kinds = [(RepairType.RT_LOAD_CKPT, False), (RepairType.RT_LOAD_REBUILD, True)]
    for rank, (kind, rebuild) in zip(pair.ranks, kinds, strict=True):
        loads = repair(kind, 2, rebuild=rebuild, pair=(rank.rank, rank.rank))
        assert rank.calls[2:] == [loads, ("rollback", 1, ARGUMENTS, CONTEXT)]


def test_without_a_checkpoint_to_go_back_to_its_process_ends(pair: World) -> None:
    """If the handler has not loaded a checkpoint, the processes end with a device fault."""
    recovered = pair.recover(NORMAL, ReportState.RS_RETRY)
    pair.ranks[1].hear(protocol.StepFailed)
    pair.over(1, 2)
    pair.form(2, 2, [OWN, OWN])
    assert [result_of(each) for each in recovered] == [False, False]
    for rank in pair.ranks:
        assert rank.hear(protocol.StepFailed).kind is FaultKind.DEVICE


def test_an_error_of_the_script_ends_its_process(pair: World) -> None:
    """RS_UNKNOWN: the process ends by its exception, without a wait or a handler call."""
    processor = pair.ranks[0].processor
    processor.report(ReportState.RS_UNKNOWN, "", ValueError("mine"))
    assert not processor.wait_clean()
    assert not processor.wait_repaired()
    assert pair.ranks[0].calls == []


def test_a_new_process_joins_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """MindIO's ARF: the new process builds its model; all ranks then rebuild their groups."""
    world = World(2, takes_in=True).start()
    world.step(1)
    world.step(2)
    old = world.ranks[0]
    old.hear(protocol.StepDone)
    kinds: list[str] = []
    for kind in ("clean", "rebuild_group"):
        old.answers[kind] = lambda: kinds.append(old.processor.generations.repair_type)
    goes_on = world.pool.submit(retried, old.processor, ReportState.RS_HCCL_FAILED)
    assert old.hear(protocol.StepFailed).kind is FaultKind.LINK
    new = world.replace(1, monkeypatch)
    new.processor.start()  # it does not meet the others yet
    assert new.processor.joins_running_ranks
    new.processor.replicas([{"rank_list": [0, 1], "replica_cnt": 2}], world_size=2)
    old.tell(protocol.GenerationEnded(generation=1, finished=2, process_lost=True))
    joined = world.pool.submit(retried, new.processor, ReportState.RS_PREREPAIR_FINISH)
    arrived = world.form(2, 2, [SENDS, TAKES])
    assert [(each.finished, each.needs_peer) for each in arrived] == [(2, False), (None, True)]
    world.ready(2)
    assert result_of(goes_on)
    assert result_of(joined)
    rebuilt = ("rebuild_group", [1], ARGUMENTS, CONTEXT)
    sends = repair(RepairType.RT_SEND, 2, rebuild=False, pair=(0, 1))
    takes = repair(RepairType.RT_RECV_REPAIR, 2, rebuild=False, pair=(0, 1))
    assert old.calls == [*cleaned(False), rebuilt, sends, ROLLED_BACK]
    assert new.calls == [rebuilt, takes, ROLLED_BACK]
    assert kinds == ["recover", "recover"]
    assert (new.processor.joins_running_ranks, new.processor.generations.repair_step) == (False, 2)
    world.step(3)
    assert [rank.hear(protocol.StepDone).finished for rank in world.ranks] == [3, 3]
    world.close()


def retried(processor: Processor, state: ReportState) -> bool:
    """Report an error and wait for the repair, as the decorator does."""
    processor.report(state, "", None)
    return processor.wait_clean() and processor.wait_repaired()


def test_a_world_of_another_size_is_refused(pair: World) -> None:
    """A rank refuses a generation of another world size, whose groups would have lost ranks."""
    recovered = pair.recover(NORMAL, ReportState.RS_HCCL_FAILED)
    pair.ranks[1].hear(protocol.StepFailed)
    pair.over(1, 2)
    for rank in pair.ranks:
        rank.hear(protocol.Arrived)
    pair.ranks[0].tell(form_of(0, OWN, [1]))
    assert not result_of(recovered[0])
    assert pair.ranks[0].hear(protocol.StepFailed).kind is FaultKind.DEVICE
    pair.ranks[1].tell(protocol.EndSession(finished=2))
    result_of(recovered[1])


def test_without_arf_a_new_process_joins_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ARF a new process raises an error that names the setting and the strategies."""
    world = World(1)
    new = world.replace(0, monkeypatch, takes_in=False)
    with pytest.raises(SessionError, match=r"enable_arf, or remove .* recover-in-place"):
        new.processor.start()
    world.close()


def test_a_new_process_that_finds_nobody_does_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new process without a peer does not train: it has not loaded its own state."""
    world = World(1, takes_in=True)
    new = world.replace(0, monkeypatch)
    new.processor.start()
    joined = world.pool.submit(retried, new.processor, ReportState.RS_PREREPAIR_FINISH)
    world.form(2, 0, [RankPlan(source=StateSource.FRESH)])
    assert not result_of(joined)
    assert new.hear(protocol.StepFailed).kind is FaultKind.DEVICE
    assert new.calls == []
    world.close()


def test_at_its_end_a_rank_goes_on_with_those_that_are_not_done(pair: World) -> None:
    """A rank that has finished repairs a rank that fails in its last step.

    The finished rank then arrives as done a second time.
    """
    first, second = pair.ranks
    ended = pair.pool.submit(first.processor.end)
    arrived = first.hear(protocol.Arrived)
    assert (arrived.done, arrived.finished) == (True, 2)
    second.processor.report(UCE, "", None)
    second.hear(protocol.StepFailed)
    pair.over(1, 2)
    recovered = pair.pool.submit(
        lambda: second.processor.wait_clean() and second.processor.wait_repaired()
    )
    again = second.hear(protocol.Arrived)
    ports = [arrived.port, again.port]
    first.tell(form_of(0, SENDS, ports))
    second.tell(form_of(1, TAKES, ports))
    with pytest.raises(RuntimeError, match=r"ForceStopError.*FORCE STOP"):
        result_of(ended)
    assert result_of(recovered)
    assert [call[0] for call in first.calls] == ["stop", "clean", "repair", "rollback"]
    first.processor.report(NORMAL, "", None)
    assert first.processor.wait_clean()
    assert first.processor.wait_repaired()
    pair.ready(2)
    ended = pair.pool.submit(first.processor.end)
    assert first.hear(protocol.Arrived).done
    first.tell(protocol.EndSession(finished=2))
    result_of(ended)


def test_training_is_held_between_two_steps(pair: World) -> None:
    """A pause waits for the device's work and reports the finished step to the agent.

    The end of the generation then stops the loop.
    """
    rank = pair.ranks[0]
    rank.processor.pause()
    rank.tell(protocol.PauseRequest(rank=0, generation=1))
    wait_until(lambda: rank.processor.member.channel.is_held(1), "the rank to hear of it")
    held = pair.pool.submit(rank.processor.pause)
    assert rank.hear(protocol.Paused).finished == 2
    rank.tell(protocol.GenerationEnded(generation=1, finished=2))
    with pytest.raises(RuntimeError, match="FORCE STOP"):
        result_of(held)
    assert rank.calls[0] == ("stream_sync",)


@pytest.mark.parametrize("kind", [protocol.InjectionKind.UCE, None])
def test_all_ranks_begin_a_step_or_none(
    pair: World, monkeypatch: pytest.MonkeyPatch, kind: protocol.InjectionKind | None
) -> None:
    """A damaged rank raises the error name that loops search for; the other rank is stopped."""
    mine = {}
    monkeypatch.setattr(framework, "current", lambda: mine[threading.current_thread()])

    def begin(processor: Any) -> str:
        mine[threading.current_thread()] = processor
        try:
            begin_step()
        except RuntimeError as error:
            return str(error)
        return "begun"

    if kind is not None:
        fault = protocol.Inject(rank=1, kind=kind, step=2)
        pair.ranks[1].processor.member.channel.injected.append(fault)
    first, second = (result_of(each) for each in pair.on_all(begin))
    if kind is None:
        assert (first, second) == ("begun", "begun")
    else:
        assert "ForceStopError" in first
        assert "FORCE STOP" in first
        assert "UCEError" in second
        assert "UCE ERROR" in second


def test_words_of_one_loop_are_not_taken_for_those_of_another(pair: World) -> None:
    """Each error text has the same meaning in MindSpore's order of search and in MindIO's."""
    errors = {
        UCE: words.damaged("injected"),
        NORMAL: words.stopped(3),
        ReportState.RS_HCCL_FAILED: words.cut_off(OSError("gone")),
    }
    mindspore = {
        "UCEError": UCE,
        "HCCEError": ReportState.RS_HCCL_FAILED,
        "SuspectRemoteError": ReportState.RS_HCCL_FAILED,
        "ForceStopError": NORMAL,
    }
    for state, error in errors.items():
        assert exception_handler.state_of(str(error)) is state
        assert next(mindspore[word] for word in mindspore if word in str(error)) is state


def test_a_process_that_has_to_end_saves_renames_and_exits(
    pair: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that must end calls save_ckpt, rename and exit with MindIO's arguments.

    It does not save a torn state or a part of one.
    """
    processor = pair.ranks[0].processor
    processor._save_final_state(AFTER_2)
    info = [{"type": 0, "ranks": [0]}]
    saved = [("save_ckpt", 2, info, ARGUMENTS, CONTEXT), ("rename", 2, ARGUMENTS)]
    assert pair.ranks[0].calls == [*saved, ("exit", CONTEXT)]
    assert processor.generations.repair_type == "dump"
    monkeypatch.setenv("MINDIO_FOR_MINDSPORE", "1")
    processor._save_final_state(AFTER_2)
    assert pair.ranks[0].calls[4] == ("rename", 2, CONTEXT)
    before = len(pair.ranks[0].calls)
    processor.report(UCE, "", None)
    processor._save_final_state(AFTER_2)
    other = pair.ranks[1].processor
    other.replicas([{"rank_list": [1, 0], "replica_cnt": 1}], world_size=2)
    other._save_final_state(AFTER_2)
    assert (len(pair.ranks[0].calls), pair.ranks[1].calls) == (before, [])
