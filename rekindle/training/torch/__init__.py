"""What a PyTorch training script imports.

from rekindle.training.torch import Session, StepSampler
"""

from rekindle.training.sampler import StepSampler
from rekindle.training.torch.parts import Part
from rekindle.training.torch.placeholder import init_placeholder_group
from rekindle.training.torch.session import Session
from rekindle.training.torch.step import Step
from rekindle.training.torch.stream import ElasticStream

__all__ = ["ElasticStream", "Part", "Session", "Step", "StepSampler", "init_placeholder_group"]
