"""The run with DDP and ZeroRedundancyOptimizer: complete model, sharded optimizer state."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from rekindle.training.torch import init_placeholder_group
from training_jobs.train import Network, Run


class ZeroRun(Run):
    """The training objects and the loop of one rank."""

    def make(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        init_placeholder_group()
        network = Network(self.faults)
        return network, ZeroRedundancyOptimizer(
            network.parameters(), torch.optim.AdamW, lr=1e-2, weight_decay=0.1
        )

    def session_options(self) -> dict[str, Any]:
        return {"ddp": {"bucket_cap_mb": 0.01}}

    def optimizer_state(self) -> dict[Any, Any]:
        return self.optimizer.optim.state_dict()["state"]
