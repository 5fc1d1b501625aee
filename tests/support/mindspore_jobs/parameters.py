"""Print what a Session detects about parameters and updates, as JSON.

The program runs in MindSpore's environment, in one process without a job. Its network has frozen
weights and BatchNorm. The update of its optimizer calls the update of the base class.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from types import SimpleNamespace

import mindspore as ms
import numpy as np
from mindspore import nn, ops, train

from rekindle.errors import SessionError
from rekindle.protocol.heartbeat_page import HeartbeatPage
from rekindle.rank.progress import HeldState, ProgressReporter
from rekindle.recovery.faults.fault import FaultKind
from rekindle.training.mindspore import Session, recoverable
from rekindle.training.mindspore.mindspore_generations import MindSporeGenerations
from rekindle.training.mindspore.state import LOOKS, LOOKS_AGAIN, SMALL_BYTES, Parameters
from rekindle.training.mindspore.steps import CallbackState, Pace, pace_of

WIDE = SMALL_BYTES // 4


class Net(nn.Cell):
    """Two layers, and frozen weights that it uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Dense(WIDE, 4), nn.BatchNorm1d(4), nn.Dense(4, 2)
        frozen = ms.Tensor(np.ones((4, WIDE), np.float32))
        self.frozen = ms.Parameter(frozen, name="frozen", requires_grad=False)

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        return self.second(self.norm(self.first(ops.matmul(x, self.frozen))))


class Clipped(nn.Momentum):
    """An optimizer with gradient clipping, as users write it."""

    def construct(self, gradients: tuple[ms.Tensor, ...]) -> object:
        return super().construct(ops.clip_by_global_norm(gradients, 1.0))


class Outer(nn.Cell):
    """A step inside another cell, whose name prefixes the names of the parameters."""

    def __init__(self, step: nn.Cell) -> None:
        super().__init__()
        self.step = step

    def construct(self, *batch: ms.Tensor) -> ms.Tensor:
        return self.step(*batch)


class Counts(train.Callback):
    """A callback of a user."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def kept_by_callbacks() -> list[object]:
    """Load the state of callbacks into others, in another order, and return the loaded values."""
    stops = train.EarlyStopping(monitor="loss")
    plateau = train.ReduceLROnPlateau(monitor="loss")
    whole = train.EarlyStopping(monitor="loss", restore_best_weights=True)
    stops.wait, stops.best, plateau.cooldown_counter = 3, np.float32(0.1), 2
    kept = CallbackState([stops, Counts(7), train.LossMonitor(), plateau, Counts(8), whole]).state()
    others = [
        train.ReduceLROnPlateau(monitor="loss"),
        *(Counts(0), Counts(0), Counts(0)),
        train.EarlyStopping(monitor="loss"),
    ]
    CallbackState(others).load(json.loads(json.dumps(kept)))
    reduces, first, second, third, stops_too = others
    counts = [each.count for each in (first, second, third)]
    same = stops_too.best == np.float32(0.1) and stops_too.best.dtype == np.float32
    return [len(kept), reduces.cooldown_counter, counts, stops_too.wait, bool(same)]


def refused(net: nn.Cell) -> list[str]:
    """Return the errors for modes in which a Session cannot train here."""
    data = ms.dataset.NumpySlicesDataset(np.ones((8, 4), np.float32)).batch(2)
    texts = []
    for world, mode, shards in (
        ("1", "semi_auto_parallel", False),
        ("2", "semi_auto_parallel", False),
        ("2", "data_parallel", True),
    ):
        os.environ["WORLD_SIZE"] = world
        ms.set_auto_parallel_context(parallel_mode=mode, enable_parallel_optimizer=shards)
        with _noted(texts):
            Session(train.Model(net))
    ms.reset_auto_parallel_context()
    with _noted(texts):
        pace_of(3, data, sink=True)
    assert pace_of(3, data, sink=False) == Pace(4, 1)
    get_context = ms.get_context
    ms.get_context = lambda name: "Ascend" if name == "device_target" else get_context(name)
    assert pace_of(3, data, sink=True) == Pace(1, 4)
    assert pace_of(3, data, sink=True, sink_size=2) == Pace(1, 2)
    ms.get_context = get_context
    return texts


@contextlib.contextmanager
def _noted(texts: list[str]) -> Iterator[None]:
    try:
        yield
    except SessionError as error:
        texts.append(str(error))


def broken() -> list[object]:
    """Return for broken steps whether a rank can leave them, and its valid steps.

    The counters belong to two optimizers, and the rank has finished 3 steps.
    """
    found = []
    for interrupts in (True, False):
        for begun in ((1, 1), (1, 0), None):
            found.append(_broken(begun, interrupts=interrupts, ended=False))
        found.append(_broken((1, 1), interrupts=interrupts, ended=True))
    return found


def _broken(
    begun: tuple[int, ...] | None, *, interrupts: bool, ended: bool
) -> tuple[bool, int | None]:
    parameters = SimpleNamespace(begun=begun and (0, 0))
    device = SimpleNamespace(interrupts=interrupts, finish=lambda: None)
    state = HeldState()
    state.step_done(3, 0)
    progress = ProgressReporter(HeartbeatPage())
    generations = MindSporeGenerations(0, parameters, device, None, state, progress)
    generations.step.begin()
    parameters.begun = begun
    if ended:
        generations.end_step()
    left = generations.break_step(FaultKind.DEVICE_MEMORY, spread=True)
    generations.close()
    return left, generations.valid_steps


def main() -> None:
    """Run some steps and print the result."""
    ms.set_device("CPU")
    ms.set_context(mode=ms.GRAPH_MODE)
    net = Net()
    optimizer = recoverable(Clipped)(net.trainable_params(), 0.1, 0.9)
    step = nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer)
    network = Outer(step).set_train()
    parameters = Parameters(network)
    x = np.random.RandomState(0).randn(8, 4).astype(np.float32)
    batch = ms.Tensor(x), ms.Tensor(x[:, :2].copy())
    results: dict[str, object] = {"class": type(optimizer).__name__, "begun": []}
    for _ in range(LOOKS + 1):
        parameters.remember()
        results["begun"].append(parameters.begun)
        network(*batch)
    parameters.remember()
    results["changing"] = sorted(parameters.before_step.remembered)
    results["as_before"] = parameters.are_as_before
    net.frozen.copy_(ms.Tensor(np.zeros((4, WIDE), np.float32)))
    results["frozen_changed"] = parameters.are_as_before
    for _ in range(LOOKS_AGAIN - LOOKS - 2):
        parameters.remember()
    results["found"] = [sorted(parameters.before_step.remembered), parameters.are_as_before]
    plain = nn.Adam(net.trainable_params())
    other = nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), plain)
    uncounted = Parameters(other)
    uncounted.remember()
    results["uncounted"] = [uncounted.begun, sorted(uncounted.before_step.remembered)]
    results["refused"] = refused(step)
    results["broken"] = broken()
    net.odd = ms.Parameter(ms.Tensor(np.ones(3, np.complex128)), name="odd")
    try:
        Parameters(net)
    except SessionError as error:
        results["odd"] = str(error)
    results["kept"] = kept_by_callbacks()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
