"""What a PyTorch training script imports.

from rekindle.training.torch import Session, StepSampler
"""

from rekindle.training.sampler import StepSampler
from rekindle.training.torch_parts import Part
from rekindle.training.torch_placeholder import init_placeholder_group
from rekindle.training.torch_session import Session
from rekindle.training.torch_step import Step

__all__ = ["Part", "Session", "Step", "StepSampler", "init_placeholder_group"]
