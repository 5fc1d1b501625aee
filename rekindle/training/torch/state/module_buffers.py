"""Buffers as they were when the step began, for a step that is done again.

BatchNorm and its like write their buffers in the forward pass, long before the optimizer writes the
parameters; a broken step must leave no trace in them.
"""

from __future__ import annotations

import torch
from torch.nn.modules.batchnorm import _NormBase


class BufferGuard:
    """Keeps a copy of those buffers of a module that change.

    Constant buffers (masks, tables) are copied once: their version counters never move. Those of
    the normalisations are copied each time: torch's kernels write them without counting.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._places: list[tuple[dict[str, torch.Tensor | None], str, bool]] = []
        self._kept: list[_Kept] = []

    def look(self) -> None:
        """Find the module's buffers; once per generation, for it walks through all its parts."""
        self._places = [
            (part._buffers, name, isinstance(part, _NormBase))
            for part in self._module.modules()
            for name in part._buffers
        ]
        self._kept = [_Kept(None, None, 0) for _ in self._places]

    def keep(self) -> None:
        """Keep the buffers as they are now."""
        for index, (place, name, uncounted) in enumerate(self._places):
            buffer, kept = place[name], self._kept[index]
            if buffer is None:
                continue
            if buffer is not kept.buffer:
                self._kept[index] = _Kept(buffer, buffer.detach().clone(), buffer._version)
            elif uncounted or buffer._version != kept.version:
                with torch.no_grad():
                    kept.copy_from(buffer)

    def restore(self) -> None:
        """Put back what was kept."""
        for (place, name, uncounted), kept in zip(self._places, self._kept, strict=True):
            if kept.buffer is None:
                continue
            place[name] = kept.buffer
            if uncounted or kept.buffer._version != kept.version:
                with torch.no_grad():
                    kept.copy_back()


class _Kept:
    """A buffer, a copy of what it held, and its version counter at that time."""

    def __init__(
        self, buffer: torch.Tensor | None, copy: torch.Tensor | None, version: int
    ) -> None:
        self.buffer, self._copy, self.version = buffer, copy, version

    def copy_from(self, buffer: torch.Tensor) -> None:
        assert self._copy is not None
        self._copy.copy_(buffer)
        self.version = buffer._version

    def copy_back(self) -> None:
        assert self.buffer is not None
        assert self._copy is not None
        self.buffer.copy_(self._copy)
        self.version = self.buffer._version
