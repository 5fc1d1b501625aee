"""Make an optimizer whose update is visible: it begins once, when all gradients are there.

A graph runs each operation that can run. If another rank fails in a step, some parameters may be
updated, while gradients of others never arrive. Then the state belongs to no step. Here each update
waits for all gradients, and counts itself before it begins. So a rank that is interrupted in a step
has the state of the step before. The counter proves that no update began since then.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import mindspore
from mindspore import nn, ops

BEGUN = "rekindle_begun"  # the parameter that counts the updates that began; a part of the state


@functools.cache
def recoverable(optimizer: type[nn.Optimizer]) -> type[nn.Optimizer]:
    """Return the optimizer's class with complete updates: recoverable(nn.Momentum)(...).

    The computed numbers are the same as the optimizer's own, bit for bit. Raises TypeError: the
    argument is not a class of an optimizer.
    """
    if not (isinstance(optimizer, type) and issubclass(optimizer, nn.Optimizer)):
        raise TypeError(
            f"recoverable() takes the class of an optimizer, such as nn.Momentum, not {optimizer!r}"
        )

    class Recoverable(optimizer):  # type: ignore[misc]  # a class of the caller's choice
        """The optimizer, with undivided updates."""

        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            zero = mindspore.Tensor([0], mindspore.int32)
            self.rekindle_begun = mindspore.Parameter(zero, name=BEGUN, requires_grad=False)
            self.rekindle_one = mindspore.Tensor([1], mindspore.int32)
            self.rekindle_after = ops.Depend()
            # On the instance, which gets the optimizer's own class again. MindSpore compiles only
            # one level of calls to super().construct(), and the optimizer may use that level
            # itself.
            object.__setattr__(self, "rekindle_update", self.construct)
            object.__setattr__(self, "construct", types.MethodType(_counted, self))
            if type(self) is Recoverable:
                object.__setattr__(self, "__class__", optimizer)

    def _counted(self: Recoverable, gradients: Any) -> Any:
        one = self.rekindle_after(self.rekindle_one, gradients)
        begun = self.rekindle_begun + one
        self.rekindle_begun = begun
        return self.rekindle_update(self.rekindle_after(gradients, begun))

    Recoverable.__name__ = Recoverable.__qualname__ = optimizer.__name__
    return Recoverable
