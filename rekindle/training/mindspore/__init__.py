"""The names that a MindSpore training script imports.

from rekindle.training.mindspore import Session, recoverable

With MINDIO_FOR_MINDSPORE=1 the import also supplies the names of MindIO and of older MindSpores.
"""

from rekindle.training.mindio.handlers import for_mindspore
from rekindle.training.mindspore.session import Session
from rekindle.training.mindspore.state import recoverable

__all__ = ["Session", "recoverable"]

if for_mindspore():
    from rekindle.training.mindspore import tft

    tft.install()
