"""Buffers as they were when the step began, for a step that is done again.

BatchNorm and its like write their buffers in the forward pass, long before the optimizer writes the
parameters; a broken step must leave no trace in them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.modules.batchnorm import _NormBase


class BufferGuard:
    """Keeps a copy of those buffers of a module that change.

    Constant buffers (masks, tables) are copied once: their version counters never move. Those of
    the normalisations are copied each time: torch's kernels write them without counting.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._buffers: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._uncounted: set[int] = set()  # ids of buffers whose versions do not tell

    def keep(self) -> None:
        """Keep the buffers as they are now."""
        buffers = list(self._module.buffers())
        if [id(buffer) for buffer in buffers] != [id(buffer) for buffer in self._buffers]:
            self._take(buffers)
        with torch.no_grad():
            for buffer, copy in self._changed():
                copy.copy_(buffer)
        self._versions = [buffer._version for buffer in buffers]

    def restore(self) -> None:
        """Put back what was kept."""
        with torch.no_grad():
            for buffer, copy in self._changed():
                buffer.copy_(copy)
        self._versions = [buffer._version for buffer in self._buffers]

    def _take(self, buffers: list[torch.Tensor]) -> None:
        self._buffers = buffers
        self._copies = [buffer.detach().clone() for buffer in buffers]
        self._versions = [buffer._version for buffer in buffers]
        norms = (m for m in self._module.modules() if isinstance(m, _NormBase))
        self._uncounted = {id(b) for norm in norms for b in norm.buffers(recurse=False)}

    def _changed(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for buffer, copy, version in zip(self._buffers, self._copies, self._versions, strict=True):
            if buffer._version != version or id(buffer) in self._uncounted:
                yield buffer, copy
