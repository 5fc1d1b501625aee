"""MindSpore's UCE example on real handwritten digits: Model.train in a Session.

The network and the loop come from MindSpore's tutorial on fast recovery from UCE faults. README.md
lists the names that replace the tutorial's names.
"""

from __future__ import annotations

import argparse
import math

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import nn, ops, train
from mindspore.common.initializer import HeUniform, initializer
from mindspore.communication import get_group_size, get_rank, init
from sklearn.datasets import load_digits

from rekindle.training.mindspore import Session, recoverable

BATCH, EPOCHS, STEPS_PER_EPOCH = 22, 3, 20  # per rank; 4 ranks use 1,760 of 1,797 digits
PIXELS, CLASSES = 8 * 8, 10


class MatMulCell(nn.Cell):
    """A product with a matrix."""

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__()
        self.param = ms.Parameter(initializer(HeUniform(math.sqrt(5)), shape), name="param")
        self.matmul = ops.MatMul()

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        return self.matmul(x, self.param)


class Network(nn.Cell):
    """A network of three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1, self.relu1 = MatMulCell((PIXELS, 512)), nn.ReLU()
        self.layer2, self.relu2 = nn.Dense(512, 512), nn.ReLU()
        self.layer3 = nn.Dense(512, CLASSES)

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        x = self.relu1(self.layer1(x))
        return self.layer3(self.relu2(self.layer2(x)))


def digits(rank: int, world: int, *, shuffle: bool) -> ds.Dataset:
    """Return this rank's share of the digits that come with scikit-learn."""
    images, labels = load_digits(return_X_y=True)
    count = BATCH * STEPS_PER_EPOCH * world
    if count > len(labels):
        raise SystemExit(f"{world} ranks need {count} digits, and there are {len(labels)}")
    columns = (images[:count] / 16.0).astype(np.float32), labels[:count].astype(np.int32)
    shared = ds.NumpySlicesDataset(columns, shuffle=shuffle, num_shards=world, shard_id=rank)
    return shared.batch(BATCH, drop_remainder=True)


def main() -> None:
    """Train on this rank."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shuffle", action="store_true", help="another order in each epoch")
    parser.add_argument("--decay", action="store_true", help="a learning rate that falls")
    options = parser.parse_args()
    ms.set_device("CPU")
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(1)  # all ranks begin with the same weights
    ds.config.set_seed(1)
    init()
    ms.set_auto_parallel_context(parallel_mode=ms.ParallelMode.DATA_PARALLEL, gradients_mean=True)
    steps = EPOCHS * STEPS_PER_EPOCH
    rate = nn.cosine_decay_lr(1e-3, 1e-1, steps, STEPS_PER_EPOCH, EPOCHS) if options.decay else 1e-2
    net = Network()
    optimizer = recoverable(nn.SGD)(net.trainable_params(), rate)  # OptTFTWrapper in the tutorial
    # nn.CrossEntropyLoss in the tutorial; its last bit depends on a batch's address in memory.
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    model = ms.Model(net, loss_fn=loss, optimizer=optimizer)
    data = digits(get_rank(), get_group_size(), shuffle=options.shuffle)
    with Session(model) as session:  # TFTRegister in the tutorial
        session.train(EPOCHS, data, callbacks=[train.LossMonitor(STEPS_PER_EPOCH)])


if __name__ == "__main__":
    main()
