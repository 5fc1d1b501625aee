"""Provide real text on every machine: the source of Python's standard library, as numbers.

The text is the same in all processes with the same Python, so each rank reads it on its own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

CHARACTERS = "\n" + "".join(chr(code) for code in range(ord(" "), ord("~") + 1))
UNKNOWN = len(CHARACTERS)  # tabs, and the bytes of characters outside ASCII
VOCABULARY = UNKNOWN + 1

VALIDATION_PART = 0.05

# A language model learns little from tables of numbers and generated text.
_LEFT_OUT = {"encodings", "pydoc_data", "test", "tests"}
_CLASS_OF_BYTE = bytes(
    CHARACTERS.index(chr(byte)) if chr(byte) in CHARACTERS else UNKNOWN for byte in range(256)
)


def load(limit: int) -> tuple[Tensor, Tensor]:
    """Return training and validation text of `limit` characters at most, as uint8 classes."""
    text = bytearray()
    for path in _sources():
        text += path.read_bytes()
        if len(text) >= limit:
            break
    if not text:
        raise FileNotFoundError(f"no Python sources in {_library()}")
    classes = torch.frombuffer(text[:limit].translate(_CLASS_OF_BYTE), dtype=torch.uint8)
    split = len(classes) - int(len(classes) * VALIDATION_PART)
    return classes[:split], classes[split:]


class Windows(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Samples of text: the characters of window i, and the character after each of them.

    Windows do not overlap, so an epoch predicts each character once.
    """

    def __init__(self, text: Tensor, block_size: int) -> None:
        self._text = text
        self._starts = torch.arange(0, len(text) - block_size, block_size)
        self._window = torch.arange(block_size + 1)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.batch([index])
        return inputs[0], targets[0]

    def batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets of some samples, one row each."""
        starts = self._starts[torch.tensor(indices)]
        rows = self._text[starts[:, None] + self._window].long()
        return rows[:, :-1], rows[:, 1:]


def _library() -> Path:
    return Path(os.__file__).resolve().parent


def _sources() -> Iterator[Path]:
    """Yield the sources of all public modules, always in the same order."""
    for name in sorted(sys.stdlib_module_names):
        if not name.startswith("_") and name not in _LEFT_OUT:
            package = sorted((_library() / name).rglob("*.py"))
            for path in chain([_library() / f"{name}.py"], package):
                if path.is_file() and _LEFT_OUT.isdisjoint(path.relative_to(_library()).parts):
                    yield path
