"""A residual network with the state that scripts often have: BatchNorm, EMA, meter, generator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

IMAGES = 2048
SIDE = 32  # pixels
WIDTH = 32
BLOCKS = 2
CLASSES = 10
NOISE = 0.1
DECAY = 0.999


class Residual(nn.Module):
    """Two convolutions with BatchNorm, and the input added to their result."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(WIDTH, WIDTH, 3, padding=1) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Return the result."""
        inner = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(x + self.norms[1](self.second(inner)))


class Meter:
    """The mean of a value, as scripts log it."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the sum and the count."""
        return vars(self).copy()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take another sum and count."""
        vars(self).update(state)


class HabitsTask:
    """The model, its optimizer and its images; the same on every rank.

    windows: the images. beside: the other objects that have a state, by name.
    """

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.windows = torch.randn(IMAGES, 3, SIDE, SIDE)
        self._classes = torch.randint(CLASSES, (IMAGES,))
        self.model = nn.Sequential(
            nn.Conv2d(3, WIDTH, 3, padding=1),
            *(Residual() for _ in range(BLOCKS)),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(WIDTH, CLASSES),
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self._average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
        self._meter, self._noise = Meter(), torch.Generator().manual_seed(0)
        self.beside = {"average": self._average, "meter": self._meter, "noise": self._noise}

    def forward(self, model: nn.Module, indices: list[int]) -> Tensor:
        """Return the loss on some images; `model` is the module or its wrapper."""
        images = self.windows[indices]
        images = images + NOISE * torch.randn(images.shape, generator=self._noise)
        return nn.functional.cross_entropy(model(images), self._classes[indices])

    def update(self, loss: Tensor) -> None:
        """Do the backward pass, one step of the optimizer, and what follows it."""
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        self._average.update_parameters(self.model)
        self._meter.total += loss.item()
        self._meter.count += 1
