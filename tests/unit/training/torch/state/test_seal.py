"""The seal of a snapshot, and the copy of a sealed snapshot into tensors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from states import sealed

from rekindle.errors import CorruptError
from rekindle.protocol import snapshot_buffer as seal
from rekindle.training.torch.state import snapshot as verified
from rekindle.training.torch.state.snapshot import copy_verified

BLOCK = 64


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seal, "BLOCK_BYTES", BLOCK)
        patch.setattr(verified, "BLOCK_BYTES", BLOCK)
        yield


@given(st.binary(max_size=5 * BLOCK), st.lists(st.integers(1, 3 * BLOCK)))
def test_the_seal_of_what_arrives(content: bytes, cuts: list[int]) -> None:
    """The seal of data that arrives in pieces is the seal of the whole data."""
    sealer, rest = seal.arriving(), memoryview(content)
    for cut in [*cuts, len(content)]:
        sealer.add(rest[:cut])
        rest = rest[cut:]
    assert seal.seal_of(sealer.digests()) == seal.seal(memoryview(content))


def test_contents_that_differ_in_length_alone() -> None:
    contents = [bytes(size) for size in (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK)]
    assert len({seal.seal(memoryview(content)) for content in contents}) == len(contents)


def targets() -> list[torch.Tensor]:
    """Return tensors of different kinds.

    They are longer or shorter than a block, empty, scalar, not contiguous, boolean and complex.
    """
    return [
        torch.zeros(37, dtype=torch.float64),
        torch.zeros((3, 5), dtype=torch.bfloat16),
        torch.zeros((0, 4)),
        torch.zeros((), dtype=torch.int64),
        torch.zeros((6, 7), dtype=torch.float32).t(),
        torch.zeros(90, dtype=torch.bool),
        torch.nn.Parameter(torch.zeros(5, dtype=torch.complex64)),
    ]


def test_tensors_wherever_blocks_end() -> None:
    """The copy fills each tensor with its bytes, at every distance from the ends of blocks."""
    for gap in range(0, BLOCK + 8, 8):
        filled = targets()
        generator = torch.Generator().manual_seed(gap)
        wanted = [torch.rand(t.shape, generator=generator).to(t.dtype).contiguous() for t in filled]
        content, begins = bytes(gap), []
        for tensor in wanted:
            content += bytes(-len(content) % 16)
            begins.append(len(content))
            content += tensor.view(-1).view(torch.uint8).numpy().tobytes()
        buffer = sealed(content)
        copy_verified(buffer, zip(filled, begins, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(filled, wanted, strict=True))
        del filled, wanted
        buffer.close()


@pytest.mark.parametrize("byte", range(0, 4 * BLOCK + 5, 7))
def test_a_flipped_byte_wherever_it_is(byte: int) -> None:
    """The copy finds a flipped byte anywhere in the file, also outside of the tensors."""
    buffer = sealed(bytes(4 * BLOCK + 5))
    buffer.file[byte] ^= 1
    with pytest.raises(CorruptError, match="checksum"):
        copy_verified(buffer, [(torch.zeros(BLOCK, dtype=torch.uint8), BLOCK // 2)])
    buffer.close()
