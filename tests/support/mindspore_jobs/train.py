"""A small classifier that Model.train trains, with or without a Session.

Arguments: a folder, and options. Each rank writes `result-<rank>-<pid>.json` there at its end. It
runs in MindSpore's environment.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import nn, ops
from mindspore.communication import get_group_size, get_rank, init
from mindspore.train import Callback, EarlyStopping, Model, ReduceLROnPlateau

from mindspore_jobs.simulated_npu import SimulatedNpu
from rekindle.training.mindspore import Session, recoverable

# As MindSpore's C++ code ends the text of an exception.
STACK = """

----------------------------------------------------
- C++ Call Stack: (For framework developers)
----------------------------------------------------
mindspore/ccsrc/tools/error_handler/error_handler.cc:177 TftProcessGraphRunError
"""
EPOCHS, PER_EPOCH, BATCH, FEATURES, CLASSES = 3, 10, 4, 32, 10


class Net(nn.Cell):
    """A network of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Dense(FEATURES, 64), nn.Dense(64, CLASSES)
        self.relu = nn.ReLU()

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        return self.second(self.relu(self.first(x)))


class Accumulating(nn.TrainOneStepCell):
    """Accumulate the gradients of two steps before each update."""

    def __init__(self, network: nn.Cell, optimizer: nn.Optimizer) -> None:
        super().__init__(network, optimizer)
        self.count = ms.Parameter(ms.Tensor([0], ms.int32), name="count", requires_grad=False)
        self.sums = self.weights.clone(prefix="sums", init="zeros")
        self.map = ops.HyperMap()

    def construct(self, *batch: ms.Tensor) -> ms.Tensor:
        loss = self.network(*batch)
        gradients = self.grad(self.network, self.weights)(*batch, ops.ones_like(loss))
        gradients = self.grad_reducer(gradients)
        loss = ops.depend(loss, self.map(ops.partial(_add), self.sums, gradients))
        self.count = self.count + 1
        if self.count % 2 == 0:
            loss = ops.depend(loss, self.optimizer(self.sums))
            loss = ops.depend(loss, self.map(ops.partial(_clear), self.sums))
        return loss


_add, _clear = ops.MultitypeFuncGraph("add"), ops.MultitypeFuncGraph("clear")


@_add.register("Tensor", "Tensor")
def _add_to(total: ms.Tensor, gradient: ms.Tensor) -> ms.Tensor:
    return ops.assign_add(total, gradient)


@_clear.register("Tensor")
def _clear_of(total: ms.Tensor) -> ms.Tensor:
    return ops.assign(total, ops.zeros_like(total))


class Breaking(nn.TrainOneStepCell):
    """Raise MindSpore's errors of a device, once each.

    break_with: called with a place: `before` the graph, `graph` (inside it, behind the update), or
    `behind` the graph. `Watch` has the places `device` (a wait for it) and `end` (of the
    training).
    """

    def __init__(
        self, network: nn.Cell, optimizer: nn.Optimizer, break_with: Callable[[str], None]
    ) -> None:
        super().__init__(network, optimizer)
        object.__setattr__(self, "break_with", break_with)
        self.strike = ops.Custom(self._strike, lambda x: x, lambda x: x, func_type="pyfunc")
        self.zero = ms.Tensor([0], ms.float32)

    def construct(self, *batch: ms.Tensor) -> ms.Tensor:
        loss = self.network(*batch)
        gradients = self.grad(self.network, self.weights)(*batch, ops.ones_like(loss))
        loss = ops.depend(loss, self.optimizer(self.grad_reducer(gradients)))
        return ops.depend(loss, self.strike(ops.depend(self.zero, loss)))

    def __call__(self, *batch: ms.Tensor) -> ms.Tensor:
        self.break_with("before")
        loss = super().__call__(*batch)
        self.break_with("behind")
        return loss

    def _strike(self, value: np.ndarray) -> np.ndarray:
        self.break_with("graph")
        return value


class Watch(Callback):
    """Record each step, and pause, end or stop the rank as the options specify."""

    def __init__(self, options: argparse.Namespace, rank: int) -> None:
        super().__init__()
        self._options, self._rank = options, rank
        self.seen: list[tuple[int, int, float, str]] = []
        self._data = ""
        self._at = 0
        self.npu = SimulatedNpu(lambda: self.break_with("device"))
        self._dying = False

    def break_with(self, place: str) -> None:
        """Raise the error that an option specifies for this step and place."""
        for given in self._options.error:
            rank, step, where, text = given.split(":")
            mark = self._options.folder / f"raised-{rank}-{step}"
            if (int(rank), int(step), where) == (self._rank, self._at, place) and not mark.exists():
                mark.touch()
                self.npu.text = text
                raise RuntimeError(text + STACK)

    def on_train_step_begin(self, run_context: object) -> None:
        if self._dying:  # no second step can finish before the end, even if steps are fast
            threading.Event().wait()
        params = run_context.original_args()
        batch = params.train_dataset_element[0].asnumpy()
        self._data = hashlib.md5(batch.tobytes()).hexdigest()
        at = self._at = params.cur_step_num - 1
        for given in self._options.die:
            rank, step, delay_s = given.split(":")
            mark = self._options.folder / f"died-{given}"
            if (int(rank), int(step)) == (self._rank, at) and not mark.exists():
                mark.touch()
                self._dying = True
                threading.Timer(float(delay_s), _die).start()
        self.wait(f"pause-{at}")

    def on_train_step_end(self, run_context: object) -> None:
        params = run_context.original_args()
        loss = float(params.net_outputs.asnumpy())
        self.seen.append((params.cur_epoch_num, params.cur_step_num, loss, self._data))
        if self._options.stop == params.cur_step_num:
            if not self._options.alone or self._rank == 0:
                run_context.request_stop()
        self.wait(f"rest-{params.cur_step_num}")

    def on_train_end(self, run_context: object) -> None:
        self.break_with("end")

    def wait(self, name: str) -> None:
        """Pause while a file of this name exists."""
        while (self._options.folder / name).exists():
            time.sleep(0.01)


def add_watched(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `Watch`."""
    die = "RANK:STEP:SECONDS, once, so long after the beginning of the step"
    parser.add_argument("--die", action="append", default=[], help=die)
    error = "RANK:STEP:PLACE:TEXT, once, at a place of Breaking"
    parser.add_argument("--error", action="append", default=[], help=error)
    parser.add_argument("--stop", type=int, default=0, help="behind so many steps")
    parser.add_argument("--alone", action="store_true", help="rank 0 stops, and no other")


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dataset(rank: int, world: int, *, augment: bool = False) -> ds.Dataset:
    """Return this rank's share of random samples, in a new random order for each epoch."""
    random = np.random.RandomState(0)
    count = PER_EPOCH * BATCH * world
    x = random.randn(count, FEATURES).astype(np.float32)
    y = random.randint(0, CLASSES, count).astype(np.int32)
    shared = ds.NumpySlicesDataset((x, y), shuffle=True, num_shards=world, shard_id=rank)
    if augment:
        ds.config.set_fast_recovery(False)
        # one worker keeps the order of the samples
        shared = shared.map(_noisy, "column_0", num_parallel_workers=1)
    return shared.batch(BATCH, drop_remainder=True)


def _noisy(x: np.ndarray) -> np.ndarray:
    return x + np.random.rand(FEATURES).astype(np.float32)


def digest(model: Model) -> str:
    """Return a checksum of all parameters except the Session's parameters."""
    total = hashlib.md5()
    for parameter in sorted(model.train_network.get_parameters(), key=lambda each: each.name):
        if not parameter.name.startswith("rekindle"):
            total.update(parameter.name.encode() + parameter.asnumpy().tobytes())
    return total.hexdigest()


def parsed() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--plain", action="store_true", help="no Session, and a plain optimizer")
    parser.add_argument("--plateau", action="store_true", help="callbacks that keep something")
    parser.add_argument("--patience", type=int, default=9, help="epochs")
    parser.add_argument("--accumulate", action="store_true", help="an update every two steps")
    parser.add_argument("--augment", action="store_true", help="samples with random noise")
    parser.add_argument("--npu", action="store_true", help="a simulated NPU")
    parser.add_argument("--own-seed", action="store_true", help="other weights on each rank")
    add_watched(parser)
    return parser.parse_args()


def main() -> None:
    """Train, with the options of the command line."""
    options = parsed()
    ms.set_device("CPU")
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(1)
    ds.config.set_seed(5)
    init()
    ms.set_auto_parallel_context(parallel_mode=ms.ParallelMode.DATA_PARALLEL, gradients_mean=True)
    rank, world = get_rank(), get_group_size()
    if options.own_seed:
        ms.set_seed(1 + rank)
    net = Net()
    rate = nn.cosine_decay_lr(0.01, 0.1, EPOCHS * PER_EPOCH, PER_EPOCH, EPOCHS)
    callbacks: list[Callback] = [watch := Watch(options, rank)]
    if options.npu:
        watch.npu.install()
    if options.plateau:
        rate = 0.1
        never_better = {"monitor": "loss", "min_delta": 100.0}
        if not options.error:  # MindSpore gives callbacks no optimizer of an own train network
            callbacks.append(ReduceLROnPlateau(patience=2, **never_better))
        callbacks.append(EarlyStopping(patience=options.patience, **never_better))
    kind = nn.Momentum if options.plain else recoverable(nn.Momentum)
    optimizer = kind(net.trainable_params(), rate, 0.9)
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    if options.error:
        with_loss = nn.WithLossCell(net, loss)
        model = Model(Breaking(with_loss, optimizer, watch.break_with))
    elif options.accumulate:
        model = Model(Accumulating(nn.WithLossCell(net, loss), optimizer))
    else:
        model = Model(net, loss, optimizer)
    data = dataset(rank, world, augment=options.augment)
    if options.plain:
        model.train(EPOCHS, data, callbacks=callbacks, dataset_sink_mode=False)
    else:
        with Session(model) as session:
            session.train(EPOCHS, data, callbacks=callbacks)
    result = {"pid": os.getpid(), "digest": digest(model), "seen": watch.seen}
    result["calls"] = watch.npu.calls
    (options.folder / f"result-{rank}-{os.getpid()}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
