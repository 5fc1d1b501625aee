"""The samples of each rank: all of them, each once, in the same order on every machine."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from repository import ROOT

from rekindle.errors import SessionError
from rekindle.training.sampler import StepSampler

WORD = 0xFFFFFFFFFFFFFFFF
GOLDEN = 0x9E3779B97F4A7C15

phases = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=6)


def bound(length: int, batch_size: int, rank: int = 0, world_size: int = 1, **options: int):
    sampler = StepSampler(length, batch_size, **options)
    sampler.bind(rank, world_size)
    return sampler


def at(sampler: StepSampler, position: int) -> StepSampler:
    sampler.load_state_dict({**sampler.state_dict(), "position": position})
    return sampler


def stream(length: int, count: int, **options: int) -> list[int]:
    """Return the first samples of the stream; a single rank draws them one at a time."""
    sampler, samples = bound(length, 1, **options), []
    for _ in range(count):
        samples += sampler.indices()
        sampler.advance()
    return samples


def mix(word: int) -> int:
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & WORD
    return word ^ word >> 31


def reference(length: int, seed: int, position: int) -> int:
    """Return the sample at a position: the definition of the order again, in plain integers."""
    epoch, value = divmod(position, length)
    key = mix((mix(seed + GOLDEN & WORD) + (epoch + 1) * GOLDEN) & WORD)
    bits = max(6, (length - 1).bit_length())
    low_bits, high_bits = (bits + 1) // 2, bits // 2
    while True:
        low, high = value & (1 << low_bits) - 1, value >> low_bits
        for step in range(0, 8, 2):
            high ^= mix(key + low + step * GOLDEN & WORD) & (1 << high_bits) - 1
            low ^= mix(key + high + (step + 1) * GOLDEN & WORD) & (1 << low_bits) - 1
        value = high << low_bits | low
        if value < length:
            return value


@pytest.mark.parametrize("length", range(1, 301))
def test_each_epoch_of_a_short_data_set_is_a_permutation(length: int) -> None:
    """Every epoch contains every sample exactly once, for each length from 1 to 300."""
    sampler = bound(length, length, seed=length)
    for _ in range(3):
        assert sorted(sampler.indices()) == list(range(length))
        sampler.advance()


@settings(max_examples=30, deadline=None)
@given(st.integers(301, 200_000), st.integers(0, WORD), st.integers(0, 1000))
def test_each_epoch_of_a_longer_data_set_is_a_permutation(
    length: int, seed: int, epoch: int
) -> None:
    """Every epoch contains every sample exactly once, for any length, seed and epoch."""
    sampler = at(bound(length, length, seed=seed), epoch * length)
    assert np.array_equal(np.sort(sampler.indices()), np.arange(length))


@settings(max_examples=50, deadline=None)
@given(st.integers(2**20, 2**40), st.integers(0, WORD))
def test_samples_of_a_huge_data_set_are_distinct_and_in_range(length: int, seed: int) -> None:
    """Lengths up to 2**40 use no memory and give distinct samples of the data set."""
    samples = at(bound(length, 10_000, seed=seed), length - 10_000).indices()
    assert len(set(samples)) == len(samples)
    assert all(0 <= sample < length for sample in samples)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 2**40), st.integers(0, WORD), st.integers(0, 2**50))
def test_the_order_is_the_written_contract(length: int, seed: int, position: int) -> None:
    """The vectorised order equals a plain-integer statement of it, across epochs as well."""
    expected = [reference(length, seed, position + i) for i in range(4)]
    assert at(bound(length, 4, seed=seed), position).indices() == expected


@pytest.mark.parametrize(
    ("length", "seed", "epoch", "expected"),
    [
        (10, 0, 0, [4, 0, 9, 7, 1, 8, 2, 3, 5, 6]),
        (10, 0, 1, [7, 0, 4, 1, 8, 6, 9, 3, 5, 2]),
        (1000, 42, 3, [347, 112, 474, 967, 134, 979, 900, 626, 716, 155]),
        (2**40, 2**64 - 1, 0, [202694809806, 100860994355, 679230787841, 608381561577,
                               583843743539, 400592660431, 137088337994, 400493716653,
                               802471254263, 337022516377]),
    ],
)  # fmt: skip
def test_the_order_never_changes(length: int, seed: int, epoch: int, expected: list[int]) -> None:
    """The order is constant, so a job from an older version continues with the same samples."""
    assert at(bound(length, 10, seed=seed), epoch * length).indices() == expected


def test_a_long_stream_never_changes() -> None:
    """One digest fixes the samples of a thousand steps over eight epochs."""
    sampler, digest = bound(12_345, 100, seed=7), hashlib.sha256()
    for _ in range(1000):
        digest.update(repr(sampler.indices()).encode())
        sampler.advance()
    assert digest.hexdigest().startswith("7dfa875ff112945599cfe2472c078b04fffc2cf918cdd526")


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 60), st.integers(1, 7), st.integers(0, 99), st.booleans(), phases)
def test_no_sample_is_lost_or_repeated_when_the_world_changes(
    length: int, batch: int, seed: int, shuffle: bool, worlds: list[tuple[int, int]]
) -> None:
    """In every sequence of worlds, the ranks together draw the stream of a single rank."""
    options = {"seed": seed, "shuffle": shuffle}
    state = StepSampler(length, batch, **options).state_dict()
    drawn: list[int] = []
    for world_size, steps in worlds:
        ranks = [bound(length, batch, rank, world_size, **options) for rank in range(world_size)]
        for sampler in ranks:
            sampler.load_state_dict(json.loads(json.dumps(state)))
        for _ in range(steps):
            for sampler in ranks:
                drawn += sampler.indices()
                sampler.advance()
        assert len({sampler.position for sampler in ranks}) == 1
        state = ranks[-1].state_dict()
    assert drawn == stream(length, len(drawn), **options)
    epochs = [drawn[i : i + length] for i in range(0, len(drawn), length)]
    assert all(sorted(epoch) == list(range(length)) for epoch in epochs if len(epoch) == length)
    assert all(len(set(epoch)) == len(epoch) for epoch in epochs)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 60),
    st.integers(1, 7),
    st.integers(1, 6),
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=6),
)
def test_with_shares_every_step_takes_what_the_full_world_takes(
    length: int, batch: int, full: int, worlds: list[tuple[int, int]]
) -> None:
    """In every sequence of worlds, the ranks do each share of the full world once per step."""
    state = StepSampler(length, batch).state_dict()
    whole = [bound(length, batch, rank, full) for rank in range(full)]
    for world_size, steps in ((min(world_size, full), steps) for world_size, steps in worlds):
        ranks = [StepSampler(length, batch) for _ in range(world_size)]
        for rank, sampler in enumerate(ranks):
            sampler.load_state_dict(json.loads(json.dumps(state)))
            sampler.bind(rank, world_size, full)
        for _ in range(steps):
            expected = [sampler.indices() for sampler in whole]
            for rank, sampler in enumerate(ranks):
                assert sampler.shares == full
                assert sampler.parts() == expected[rank::world_size]
                assert sampler.indices() == [i for part in sampler.parts() for i in part]
            for sampler in (*ranks, *whole):
                sampler.advance()
            assert {sampler.position for sampler in ranks} == {whole[0].position}
        state = ranks[-1].state_dict()


def test_a_state_that_is_loaded_keeps_the_shares() -> None:
    """If a rank loads a peer's position, it keeps its place and the shares of the full world."""
    sampler = StepSampler(100, 2)
    sampler.bind(1, 2, 4)
    assert at(sampler, 8).parts() == [stream(100, 16)[10:12], stream(100, 16)[14:16]]


def test_blocks_computed_ahead_do_not_show() -> None:
    """The sampler computes many steps at once, and gives the same samples as for single steps."""
    sampler = bound(1000, 16, rank=2, world_size=3, seed=5)
    for step in range(700):
        fresh = at(bound(1000, 16, rank=2, world_size=3, seed=5), step * 48)
        assert sampler.indices() == fresh.indices()
        sampler.advance()
    several = bound(1000, 16, seed=5)
    several.bind(1, 2, 5)
    samples = stream(1000, 700 * 80, seed=5)
    for begin in range(0, 700 * 80, 80):
        assert several.parts() == [samples[begin + 16 :][:16], samples[begin + 48 :][:16]]
        several.advance()


def test_asking_changes_nothing() -> None:
    """indices() changes no position, and a caller may change its result without an effect."""
    sampler = bound(100, 8)
    first = sampler.indices()
    kept = list(first)
    first.clear()
    assert sampler.indices() == kept
    assert sampler.position == 0


def test_the_epoch_follows_the_position() -> None:
    """The epoch is that in which the next step begins, also when a batch straddles two."""
    sampler, epochs = bound(10, 4), []
    for _ in range(6):
        epochs.append(sampler.epoch)
        sampler.advance()
    assert epochs == [0, 0, 0, 1, 1, 2]


def test_without_shuffling_the_order_is_the_data_sets_own() -> None:
    """With shuffle=False, each epoch has the data set's samples in their own order."""
    assert stream(3, 7, shuffle=False) == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.process
def test_the_order_is_the_same_in_another_process() -> None:
    """The order does not depend on the process, for example on its hash seed."""
    code = (
        "from rekindle.training.sampler import StepSampler as S;"
        "s = S(12345, 500, seed=99); s.bind(1, 2); print(s.indices())"
    )
    here = bound(12345, 500, rank=1, world_size=2, seed=99).indices()
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
        there = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, check=True
        )
        assert json.loads(there.stdout) == here


def test_all_orders_of_a_short_data_set_are_equally_likely() -> None:
    """Over 20,000 epochs the 120 orders of five samples pass a chi-squared test."""
    epochs = 20_000
    sampler = bound(5, 5 * epochs, seed=1)
    orders = Counter(map(tuple, np.array(sampler.indices()).reshape(-1, 5).tolist()))
    expected = epochs / math.factorial(5)
    chi_squared = sum((count - expected) ** 2 / expected for count in orders.values())
    assert len(orders) == math.factorial(5)
    assert chi_squared < 119 + 4 * math.sqrt(2 * 119)


def test_places_and_samples_are_not_correlated() -> None:
    """A sample does not correlate with its place, its predecessor or its place in other epochs."""
    length = 20_000
    orders = [at(bound(length, length, seed=3), e * length).indices() for e in range(3)]
    orders += [bound(length, length, seed=4).indices(), list(range(length))]
    pairs = [*itertools.combinations(orders, 2), *((o[1:], o[:-1]) for o in orders[:4])]
    for one, other in pairs:
        assert abs(np.corrcoef(one, other)[0, 1]) < 4 / math.sqrt(length)
        assert sum(a == b for a, b in zip(one, other, strict=True)) < 8  # Poisson with mean 1


def test_a_batch_is_spread_over_the_data_set() -> None:
    """The samples are spread evenly over 16 parts of the data set, and over the index modulo 16."""
    length, draws = 2**16 + 3, 64 * 500
    samples = np.array(bound(length, draws, seed=8).indices())
    for parts in (samples * 16 // length, samples % 16):
        counts = np.bincount(parts, minlength=16)
        assert ((counts - draws / 16) ** 2 / (draws / 16)).sum() < 15 + 4 * math.sqrt(30)


@pytest.mark.process
def test_a_data_loader_yields_the_ranks_stream() -> None:
    """The sampler serves as batch_sampler, with workers that prefetch, and keeps its position."""
    data = pytest.importorskip("torch.utils.data")
    sampler = bound(50, 4, rank=1, world_size=2, seed=6)
    expected = [stream(50, 400, seed=6)[i : i + 4] for i in range(4, 400, 8)][:20]
    for workers in (0, 1):
        loader = data.DataLoader(range(50), batch_sampler=sampler, num_workers=workers)
        batches = [batch.tolist() for batch in itertools.islice(loader, 20)]
        assert batches == expected
    assert sampler.position == 0


def test_an_iterator_in_step_with_the_loop_follows_a_recovery() -> None:
    """Without prefetching, a repeated step gets exactly its own samples again."""
    sampler = bound(100, 5, world_size=2)
    batches = iter(sampler)
    for _ in range(3):
        assert next(batches) == sampler.indices()
        sampler.advance()
    next(batches)  # the step that fails
    sampler.bind(0, 1)
    for _ in range(3):
        assert next(batches) == sampler.indices()
        sampler.advance()
    at(sampler, 10)
    assert next(batches) == sampler.indices()


@pytest.mark.process
def test_an_iterator_yields_each_share_by_itself() -> None:
    """A rank with several shares gets one batch per share; a recovery begins with the first."""
    data = pytest.importorskip("torch.utils.data")
    sampler = bound(100, 5)
    sampler.bind(0, 2, 4)
    loader = iter(data.DataLoader(range(100), batch_sampler=sampler, num_workers=1))
    batches = iter(sampler)
    for _ in range(3):
        for part in sampler.parts():
            assert next(batches) == part
            assert next(loader).tolist() == part
        sampler.advance()
    next(batches)  # for the step that fails
    for place in ((1, 3, 4), (1, 4, 4)):
        sampler.bind(*place)
        for part in sampler.parts():
            assert next(batches) == part
        sampler.advance()


@pytest.mark.process
def test_batches_prefetched_before_a_recovery_are_refused() -> None:
    """After a recovery, the sampler refuses batches that a worker prefetched for another step."""
    data = pytest.importorskip("torch.utils.data")
    sampler = bound(100, 5, world_size=2)
    batches = iter(data.DataLoader(range(100), batch_sampler=sampler, num_workers=1))
    assert next(batches).tolist() == sampler.indices()
    sampler.bind(0, 2)
    with pytest.raises(SessionError, match="create a new iterator"):
        next(batches)
