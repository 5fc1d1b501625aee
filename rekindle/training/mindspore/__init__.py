"""The names that a MindSpore training script imports.

from rekindle.training.mindspore import Session, recoverable
"""

from rekindle.training.mindspore.optimizer import recoverable
from rekindle.training.mindspore.session import Session

__all__ = ["Session", "recoverable"]
