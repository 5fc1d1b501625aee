"""A training with the calls, names and settings of document 003. Only `on_cpu.py` runs it."""

import math
import os

import mindspore as ms
import mindspore.dataset as ds
from mindspore import Parameter, nn, ops, train
from mindspore.common.initializer import HeUniform, initializer
from mindspore.communication import init

ms.set_context(mode=ms.GRAPH_MODE, jit_level="O1")
ms.set_device(device_target="Ascend")
ms.set_auto_parallel_context(parallel_mode=ms.ParallelMode.SEMI_AUTO_PARALLEL)
init()


class Product(nn.Cell):
    """A layer whose product is printed."""

    def __init__(self) -> None:
        super().__init__()
        self.param = Parameter(initializer(HeUniform(math.sqrt(5)), [28 * 28, 512]), name="param")
        self.print = ops.Print()
        self.matmul = ops.MatMul()

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        product = self.matmul(x, self.param)
        self.print("out is:", product)
        return product


class Network(nn.Cell):
    """Three layers for pictures of digits."""

    def __init__(self) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.layer1, self.relu1 = Product(), nn.ReLU()
        self.layer2, self.relu2 = nn.Dense(512, 512), nn.ReLU()
        self.layer3 = nn.Dense(512, 10)

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        x = self.relu1(self.layer1(self.flatten(x)))
        return self.layer3(self.relu2(self.layer2(x)))


def pictures(batch_size: int) -> ds.Dataset:
    """Return the pictures and their labels."""
    found = ds.MnistDataset(os.getenv("DATA_PATH"))
    changes = [
        ds.vision.Rescale(1.0 / 255.0, 0),
        ds.vision.Normalize(mean=(0.1307,), std=(0.3081,)),
        ds.vision.HWC2CHW(),
    ]
    found = found.map(changes, "image")
    found = found.map(ds.transforms.TypeCast(ms.int32), "label")
    return found.batch(batch_size)


network = Network()
optimizer = nn.OptTFTWrapper(nn.SGD(network.trainable_params(), 1e-2))
model = ms.Model(network, loss_fn=nn.CrossEntropyLoss(), optimizer=optimizer)
callbacks = [
    train.TimeMonitor(data_size=1),
    train.LossMonitor(1),
    train.TFTRegister(0, "127.0.0.1", 30051, "./ttp_checkpoints/"),
]
model.train(5, pictures(32), callbacks=callbacks)
