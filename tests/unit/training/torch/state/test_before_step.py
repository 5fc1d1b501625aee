"""A repeated step begins with the same state as the first time."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import pytest
import torch

from rekindle.training.torch.state import before_step
from rekindle.training.torch.state.before_step import BeforeStep
from rekindle.training.torch.state.capture import Modes

LARGE = 20_000  # elements of a tensor that has a copy only if a step changes it early


def guard_of(named: dict[str, Any], *, tells: bool = False) -> BeforeStep:
    """Return the guard of these objects, at the begin of a generation."""
    guard = BeforeStep(named, Modes(), tells=tells)
    guard.look()
    return guard


def state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of the module's state."""
    return {name: value.clone() for name, value in module.state_dict().items()}


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    """Return whether two states are equal to the bit."""
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


class Thing:
    """An object whose state is this mapping, and whose load puts new objects in place."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def test_a_broken_step_leaves_no_trace_in_batch_norm() -> None:
    """After each broken step, the guard restores the statistics and counters of batch norm.

    They then come from finished steps only.
    """
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
    guard = guard_of({"model": module})
    for _ in range(3):
        guard.keep()
        module(torch.randn(16, 4))  # a step that is finished
        before = state(module)
        guard.keep()
        for _ in range(2):
            module(torch.randn(16, 4))  # a step that breaks
            assert not same(state(module), before)
            assert guard.restore()
            assert same(state(module), before)


def test_a_buffer_that_was_replaced_is_followed() -> None:
    """If a module replaces its buffer with a new tensor, the guard restores the values there."""
    module = torch.nn.Module()
    module.register_buffer("seen", torch.zeros(2))
    guard = guard_of({"model": module})
    guard.keep()
    module.seen = torch.ones(2)
    guard.keep()
    module.seen.add_(5)
    module.seen = torch.full((2,), 9.0)
    assert guard.restore()
    assert module.seen.tolist() == [1.0, 1.0]


class OnDevice(torch.Tensor):
    """A tensor that reports that it is on a device."""

    is_cpu = False


def test_a_buffer_on_a_device_is_kept_without_a_look_at_its_counter() -> None:
    """The guard copies a buffer on a device at each step, without a look at its version counter.

    The replay of a CUDA graph changes buffers, but not the counter.
    """
    module = torch.nn.Module()
    module.register_buffer("seen", torch.zeros(2).as_subclass(OnDevice))
    guard = guard_of({"model": module})
    guard.keep()
    for step in (1.0, 2.0):
        uncounted = module.seen.data  # the same memory with a counter of its own
        uncounted += 1
        guard.keep()
        uncounted += 7
        assert guard.restore()
        assert module.seen.tolist() == [step, step]


class Mode(enum.Enum):
    """A value of a class of the script."""

    WARM = "warm"
    COLD = "cold"


class Move(NamedTuple):
    """A value with names."""

    place: int
    reward: torch.Tensor


def test_values_of_classes_of_the_script_return() -> None:
    """A named tuple does not return as a tuple, and an Enum not as a text."""
    thing = Thing(mode=Mode.WARM, moves=[Move(1, torch.ones(2))])
    guard = guard_of({"thing": thing})
    guard.keep()
    thing.mode = Mode.COLD
    thing.moves.append(Move(2, torch.zeros(2)))
    assert guard.restore()
    assert thing.mode is Mode.WARM
    [move] = thing.moves
    assert (type(move), move.place, move.reward.tolist()) == (Move, 1, [1.0, 1.0])


def test_values_of_an_object_return_and_its_containers_stay() -> None:
    """The guard restores nested values; lists, mappings and tensors stay the same objects."""
    thing = Thing(count=1, rows=[1.5, [2]], by_name={"a": [0]}, sums=[torch.ones(2)])
    rows, inner, by_name, sums = thing.rows, thing.rows[1], thing.by_name["a"], thing.sums[0]
    guard = guard_of({"thing": thing})
    for _ in range(2):
        guard.keep()
        thing.count = 2
        rows.append(3)
        inner[0] = 7
        by_name.clear()
        sums.add_(float("nan"))
        assert guard.restore()
        assert (thing.count, rows, by_name, sums.tolist()) == (1, [1.5, [2]], [0], [1.0, 1.0])
        assert thing.rows is rows
        assert thing.rows[1] is inner
        assert thing.by_name["a"] is by_name
        assert thing.sums[0] is sums


def test_an_object_without_a_change_is_not_loaded() -> None:
    """The guard calls load_state_dict() only after a change."""
    thing = Thing(count=1, sums=torch.tensor([float("nan")]))
    thing.load_state_dict = None  # a call would fail
    thing.state_dict = lambda: {"count": 1, "sums": thing.sums}
    guard = guard_of({"thing": thing})
    guard.keep()
    assert guard.restore()


@pytest.mark.parametrize("counted", [True, False])
def test_a_large_tensor_gets_a_copy_when_a_step_changes_it_early(counted: bool) -> None:
    """A large tensor has no copy at first; a broken step that changes it is not restored.

    A change before the update, also one through `tensor.data`, gives it a copy from the next step.
    """
    teacher = torch.nn.Linear(LARGE, 1, bias=False)
    weight = teacher.weight.detach() if counted else teacher.weight.data
    table = Thing(rows=torch.zeros(LARGE))
    rows = table.rows if counted else table.rows.data
    guard = guard_of({"teacher": teacher, "table": table})
    guard.keep()
    weight.add_(1)
    rows.add_(1)
    if counted:
        assert not guard.restore()
        guard.look()
    else:
        guard.update_begins()
    for _ in range(2):
        guard.keep()
        before = weight.clone(), rows.clone()
        weight.add_(1)
        rows.add_(1)
        assert guard.restore()
        assert torch.equal(weight, before[0])
        assert torch.equal(rows, before[1])


def test_what_follows_the_update_needs_no_copy() -> None:
    """A large average that changes after the update of each step has no copy."""
    average = torch.nn.Linear(LARGE, 1, bias=False)
    guard = guard_of({"average": average})
    for _ in range(3):
        guard.keep()
        guard.update_begins()
        average.weight.detach().add_(1)
    guard.keep()
    assert all(kept.copy is None for kept in guard._tensors.kept())
    assert guard.restore()


def test_a_parameter_that_changes_before_its_update_is_noticed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A parameter of an optimizer has no copy; after such a change no broken step is restored."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = guard_of({"model": model, "optimizer": optimizer}, tells=True)
    guard.keep()
    assert guard.restore()
    model.weight.detach().add_(1)
    assert not guard.restore()
    guard.keep()
    assert not guard.restore()
    assert "the script changes parameters before optimizer.step()" in capfd.readouterr().err


def test_rates_and_groups_return() -> None:
    """The guard restores the values of an optimizer's groups in place, and removes new groups."""
    model, more = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1), capturable=False)
    group = optimizer.param_groups[0]
    guard = guard_of({"model": model, "optimizer": optimizer})
    guard.keep()
    group["lr"].fill_(0.5)
    group["betas"] = (0.5, 0.5)
    optimizer.add_param_group({"params": list(more.parameters())})
    assert guard.restore()
    assert optimizer.param_groups[0] is group
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": list(more.parameters())})
    guard.keep()
    assert guard.restore()
    assert len(optimizer.param_groups) == 2
    assert (round(group["lr"].item(), 6), group["betas"]) == (0.1, (0.9, 0.999))


def test_modes_return() -> None:
    """The guard restores the mode of each module."""
    model = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Dropout())
    model[1].eval()
    guard = guard_of({"model": model})
    guard.keep()
    model.eval()
    assert guard.restore()
    assert [part.training for part in model.modules()] == [True, True, False]


def test_a_scaler_begins_again() -> None:
    """A scaler has the scale from before the step, and no mark of unscaled gradients."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    guard = guard_of({"model": model, "optimizer": optimizer, "scaler": scaler})
    guard.keep()
    scaler.scale(torch.ones(1))
    assert guard.restore()
    assert scaler.state_dict() == torch.amp.GradScaler("cpu", init_scale=4.0).state_dict()
    scaler.scale(torch.ones(1))
    for scale in (4.0, 2.0):
        guard.keep()
        for _ in range(2):
            loss = model(torch.ones(1, 2)).sum() * float("inf")
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == scale / 2
            scaler.unscale_(optimizer)
            guard.restore()
            guard.look()
            optimizer.zero_grad()
            guard.keep()
            assert scaler.get_scale() == scale
        scaler.update(scale / 2)


class Scaled(torch.nn.Module):
    """A module with a value that is not a tensor."""

    amount = 1

    def get_extra_state(self) -> Any:
        return {"amount": self.amount}

    def set_extra_state(self, state: Any) -> None:
        self.amount = state["amount"]


def test_extra_state_of_a_module_returns() -> None:
    """The guard restores the value of a module's get_extra_state()."""
    module = torch.nn.Sequential(Scaled())
    guard = guard_of({"model": module})
    guard.keep()
    module[0].amount = 2
    assert guard.restore()
    assert module[0].amount == 1


def test_what_is_too_large_is_announced(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor that is too large for a copy is named once, and a broken step is not restored."""
    monkeypatch.setattr(before_step, "LIMIT_BYTES", 4)
    thing = Thing(rows=torch.zeros(LARGE))
    guard = guard_of({"thing": thing}, tells=True)
    for _ in range(3):
        guard.keep()
        thing.rows.add_(1)
        guard.update_begins()
    assert not guard.restore()
    line = capfd.readouterr().err
    assert line.count("thing.rows changes within a step and is too large for a copy") == 1


def test_large_copies_are_announced_with_their_cost(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies that take long are announced once, with their size, their time, and their names."""
    monkeypatch.setattr(before_step, "NOTICE_BYTES", 4)
    monkeypatch.setattr(before_step, "NOTICE_VALUES", 4)
    thing = Thing(rows=torch.zeros(LARGE), text="much")
    guard = guard_of({"thing": thing}, tells=True)
    for _ in range(3):
        guard.keep()
        thing.rows.add_(1)
        guard.update_begins()
    text = capfd.readouterr().err
    assert text.count("0 MB that a step may change are copied before each step, in ") == 1
    assert " ms: thing.rows" in text
    assert text.count("of values of `extra` are written before each step") == 1
