"""What a PyTorch training script imports.

from rekindle.training.torch import Session, StepSampler
"""

from rekindle.training.sampler import StepSampler
from rekindle.training.torch_parts import Part
from rekindle.training.torch_placeholder import init_placeholder_group
from rekindle.training.torch_session import Session
from rekindle.training.torch_step import Step
from rekindle.training.torch_stream import ElasticStream

__all__ = ["ElasticStream", "Part", "Session", "Step", "StepSampler", "init_placeholder_group"]
