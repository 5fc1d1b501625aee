"""States of models and optimizers: a transfer is exact, in place, and equal to torch's loading."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from states import move
from torch import nn
from torch.optim import lr_scheduler

from rekindle.errors import SessionError
from rekindle.training.torch.state.capture import CapturedState, as_bytes, capture, prepare

Make = Callable[..., Any]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adam-tensor-lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adadelta": torch.optim.Adadelta,
    "adafactor": torch.optim.Adafactor,
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "rprop": torch.optim.Rprop,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "asgd": torch.optim.ASGD,
    "adamax": torch.optim.Adamax,
    "lbfgs": lambda p: torch.optim.LBFGS(p, max_iter=3),
}


class Decay:
    """A learning rate function with a state of its own, which LambdaLR keeps."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return 0.9**epoch


SCHEDULERS: dict[str, Make] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.95**epoch),
    "lambda-object": lambda o: lr_scheduler.LambdaLR(o, Decay()),
    "lambda-numpy": lambda o: lr_scheduler.LambdaLR(o, lambda e: 1 + np.cos(e / 10)),
    "lambda-float32": lambda o: lr_scheduler.LambdaLR(o, lambda e: np.float32(1 / (e + 1))),
    "step": lambda o: lr_scheduler.StepLR(o, 2),
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, [1, 3, 3]),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "onecycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "polynomial": lr_scheduler.PolynomialLR,
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.StepLR(o, 2)]
    ),
}


class Extra(nn.Module):
    """A module whose extra state has a number, and a tensor that is a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def get_extra_state(self) -> dict[str, Any]:
        return {"seen": self.seen, "as_tensor": torch.tensor(self.seen)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        assert state["as_tensor"].item() == state["seen"]
        self.seen = state["seen"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return x


def make_model(extra: bool = False, dtype: torch.dtype = torch.float32) -> nn.Module:
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5)]
    layers += [Extra()] if extra else []
    return nn.Sequential(*layers).to(dtype)


def train(named: Mapping[str, Any], steps: int) -> None:
    model, optimizer, scheduler = named["model"], named["optimizer"], named.get("scheduler")
    for _ in range(steps):
        x = torch.randn(8, 3, 6, 6).to(next(model.parameters()).dtype)

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).float().pow(2).mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        if scheduler is not None:
            scheduler.step()


def bits(state: CapturedState) -> tuple[bytes, list[tuple[str, bytes]]]:
    tensors = [(name, as_bytes(t).numpy().tobytes()) for name, t in state.tensors.items()]
    return state.skeleton, tensors


def same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return bits(capture(a)) == bits(capture(b))


def check_against_torch(make: Callable[[], dict[str, Any]], behind: int) -> None:
    """Check that a receiver of the state continues like its sender, and like torch's loading.

    behind: the steps that the receiver has done before.
    """
    torch.manual_seed(0)
    sender, receiver, loaded = make(), make(), make()
    train(sender, 5)
    train(receiver, behind)
    references = dict(receiver["model"].named_parameters())
    for name, thing in loaded.items():
        thing.load_state_dict(copy.deepcopy(sender[name].state_dict()))
    move(capture(sender), receiver)
    assert same(receiver, sender)
    assert same(loaded, sender)
    assert all(p is references[name] for name, p in receiver["model"].named_parameters())
    for each in (sender, receiver, loaded):
        torch.manual_seed(1)
        train(each, 3)
    assert bits(capture(receiver)) == bits(capture(sender)) == bits(capture(loaded))


@pytest.mark.parametrize("behind", [0, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_continue_bit_for_bit(name: str, behind: int):
    """A receiver continues like with torch's loading, if its optimizer has a state and if not."""

    def make() -> dict[str, Any]:
        model = make_model()
        if name == "lbfgs":  # LBFGS supports only one group, of plain layout
            return {"model": model, "optimizer": OPTIMIZERS[name](model.parameters())}
        model.to(memory_format=torch.channels_last)
        groups = [{"params": model[0].parameters()}, {"params": model[4].parameters()}]
        optimizer = OPTIMIZERS[name](groups)
        return {"model": model, "optimizer": optimizer}

    check_against_torch(make, behind)


@pytest.mark.parametrize("behind", [0, 2])
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("ignore:Seems like `optimizer.step")
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step:UserWarning")
def test_schedulers_continue_bit_for_bit(name: str, behind: int):
    """With each kind of scheduler, the learning rates continue like with torch's own loading."""

    def make() -> dict[str, Any]:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return {"model": model, "optimizer": optimizer, "scheduler": SCHEDULERS[name](optimizer)}

    check_against_torch(make, behind)


class Float32Moments(torch.optim.SGD):
    """Keeps float32 moments for bfloat16 parameters, and a string."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state.setdefault("moment", torch.zeros(parameter.shape)).add_(parameter.float() / 3)
            state["mode"] = "warm"


@pytest.mark.parametrize("behind", [0, 2])
def test_moments_wider_than_their_parameter_are_not_rounded(behind: int):
    """Unlike torch's loading, a float32 state of a bfloat16 parameter keeps its bits."""
    torch.manual_seed(0)
    pair = []
    for _ in range(2):
        model = make_model(dtype=torch.bfloat16)
        pair.append({"model": model, "optimizer": Float32Moments(model.parameters(), lr=0.1)})
    sender, receiver = pair
    train(sender, 3)
    train(receiver, behind)
    move(capture(sender), receiver)
    assert same(receiver, sender)


def test_extra_state_and_tied_weights_survive():
    """The transfer includes a module's extra state. Tied weights occur once, and stay tied."""
    torch.manual_seed(0)
    pair = []
    for _ in range(2):
        model = make_model(extra=True)
        model.append(nn.Linear(5, 5))
        model.append(nn.Linear(5, 5))
        model[-1].weight = model[-2].weight
        pair.append({"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)})
    sender, receiver = pair
    train(sender, 3)
    state = capture(sender)
    assert sum(tuple(t.shape) == (5, 5) for t in state.tensors.values()) == 1
    move(state, receiver)
    assert same(receiver, sender)
    assert receiver["model"][5].seen == 3
    assert receiver["model"][-1].weight is receiver["model"][-2].weight


def test_a_state_of_another_model_is_refused_by_its_place():
    """For other shapes, names, dtypes, optimizers or objects, `prepare` raises a SessionError."""
    model = nn.Linear(3, 2)
    state = capture({"model": model}).skeleton
    for other, message in (
        (nn.Linear(4, 2), r"model\.\"weight\""),
        (nn.Linear(3, 2, bias=False), r"model\.\"bias\": missing"),
        (nn.Linear(3, 2).double(), r"model\.\"weight\".*F64.*F32"),
    ):
        with pytest.raises(SessionError, match=message):
            prepare({"model": other}, state)
    with pytest.raises(SessionError, match="another"):
        prepare({"another": model}, state)
    adam = capture({"optimizer": torch.optim.Adam(model.parameters())}).skeleton
    with pytest.raises(SessionError, match="optimizer"):
        prepare({"optimizer": torch.optim.SGD([torch.zeros(1), torch.zeros(1)])}, adam + b"")


def test_the_skeleton_is_plain_json_and_tensors_are_live():
    """The skeleton has no elements, and the tensors of capture() share the model's memory."""
    model = nn.Linear(3, 2)
    state = capture({"model": model})
    tree = msgspec.json.decode(state.skeleton)
    assert tree["model"]["OrderedDict"][1] == [
        "bias",
        {"tensor": ["model.bias", "F32", [2], "cpu", None]},
    ]
    assert state.tensors["model.weight"].data_ptr() == model.weight.data_ptr()
    assert as_bytes(model.weight).data_ptr() == model.weight.data_ptr()
