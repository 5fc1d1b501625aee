"""What of light profiling is torch's: the forward pass, and collectives."""

from __future__ import annotations

import torch
from torch.utils.hooks import RemovableHandle

from rekindle.training import torch_waits
from rekindle.training.profiler import Profiler


class TorchProfiler(Profiler):
    """The records of a rank that trains this model; hooks are there only while it writes."""

    def __init__(self, slot: int, device: int, model: torch.nn.Module) -> None:
        super().__init__(slot, device)
        self._model = model
        self._hooks: list[RemovableHandle] = []

    def switched(self) -> None:
        """Hook into the model and its collectives, or out of them."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self.on.forward:
            self._hooks = [
                self._model.register_forward_pre_hook(self.begin_forward),
                self._model.register_forward_hook(self.end_forward),
            ]
        torch_waits.record(self.joined if self.on.communication else None)
