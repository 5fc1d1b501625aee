"""The names that a MindSpore training script imports.

from rekindle.training.mindspore import Session, recoverable
"""

from rekindle.training.mindspore.session import Session
from rekindle.training.mindspore.state import recoverable

__all__ = ["Session", "recoverable"]
