"""Generated pictures of digits in the files of MNIST."""

from __future__ import annotations

import random
import struct
from pathlib import Path

COUNT = 128
_SIDE = 28


def write(folder: Path) -> None:
    """Write pictures and labels as MNIST's training files."""
    folder.mkdir(parents=True)
    chance = random.Random(3)
    pictures = chance.randbytes(COUNT * _SIDE * _SIDE)
    head = struct.pack(">iiii", 2051, COUNT, _SIDE, _SIDE)
    (folder / "train-images-idx3-ubyte").write_bytes(head + pictures)
    labels = bytes(chance.randrange(10) for _ in range(COUNT))
    (folder / "train-labels-idx1-ubyte").write_bytes(struct.pack(">ii", 2049, COUNT) + labels)
