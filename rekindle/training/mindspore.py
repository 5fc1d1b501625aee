"""What a MindSpore training script imports.

from rekindle.training.mindspore import Session, recoverable
"""

from rekindle.training.mindspore_optimizer import recoverable
from rekindle.training.mindspore_session import Session

__all__ = ["Session", "recoverable"]
