"""The names that a PyTorch training script imports.

from rekindle.training.torch import Session, StepSampler
"""

from rekindle.rank.member import Recovery
from rekindle.training.sampler import StepSampler
from rekindle.training.torch.data.elastic_stream import ElasticStream
from rekindle.training.torch.data.session_data import MicroBatch
from rekindle.training.torch.epochs import Block
from rekindle.training.torch.groups.ddp import DistributedDataParallel
from rekindle.training.torch.groups.script_groups import init, init_placeholder_group
from rekindle.training.torch.guard import Guard
from rekindle.training.torch.loop import Step
from rekindle.training.torch.private import before_fork as before_fork
from rekindle.training.torch.session import Session

__all__ = [
    "Block",
    "DistributedDataParallel",
    "ElasticStream",
    "Guard",
    "MicroBatch",
    "Recovery",
    "Session",
    "Step",
    "StepSampler",
    "init",
    "init_placeholder_group",
]
