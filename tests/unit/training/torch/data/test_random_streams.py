"""The random numbers of a step depend on seed, rank and step, and on nothing before the step."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from rekindle.training.torch.data.random_streams import begin_step, outer_states, set_outer

# gauss() and normal() draw two numbers, and keep the second one for the next call.
GENERATORS: dict[str, Callable[[], float]] = {
    "torch": lambda: torch.rand(1).item(),
    "random": random.random,
    "random.gauss": lambda: random.gauss(0.0, 1.0),
    "numpy": np.random.rand,
    "numpy.normal": np.random.normal,
}
each_generator = pytest.mark.parametrize("name", GENERATORS)


@pytest.fixture(autouse=True)
def states() -> Iterator[None]:
    """Restore the generators for other tests."""
    python, numpy, own = random.getstate(), np.random.get_state(), torch.get_rng_state()
    bits = np.random.get_bit_generator()
    yield
    np.random.set_bit_generator(bits)
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(own)


def drawn(name: str, seed: int, rank: int, step: int) -> list[float]:
    """Begin a step, and draw an odd number of values: a generator may keep one for later."""
    begin_step(seed, rank, step)
    return [GENERATORS[name]() for _ in range(3)]


@each_generator
def test_a_repeated_step_draws_the_same(name: str) -> None:
    """A repeated step draws the same numbers, regardless of the numbers drawn before."""
    first = drawn(name, 11, 2, 5)
    assert drawn(name, 11, 2, 5) == first
    drawn(name, 11, 2, 6)
    assert drawn(name, 11, 2, 5) == first


@each_generator
def test_other_streams_draw_other_numbers(name: str) -> None:
    """Each seed, each rank and each step has its own stream."""
    places = [(11, 2, 5), (12, 2, 5), (11, 3, 5), (11, 2, 6), (11, 5, 2)]
    assert len({tuple(drawn(name, *place)) for place in places}) == len(places)


def test_another_bit_generator_of_numpy() -> None:
    """If a script chooses another bit generator for numpy's functions, each step seeds that one."""
    np.random.set_bit_generator(np.random.PCG64(3))
    first = drawn("numpy", 11, 2, 5)
    assert drawn("numpy", 11, 2, 5) == first
    assert drawn("numpy", 11, 2, 6) != first


@pytest.mark.parametrize("bits", [None, np.random.PCG64(3)], ids=["own", "another"])
@each_generator
def test_a_step_leaves_the_generators_of_the_script(name: str, bits: Any) -> None:
    """After a return to their states, the generators continue as if the step had drawn nothing."""
    for before in range(3):  # after an odd number of draws a generator has a number in reserve
        begin_step(11, 2, 5)
        if bits is not None:
            np.random.set_bit_generator(bits)
        for _ in range(before):
            GENERATORS[name]()
        states = outer_states()
        words = np.random.get_state(legacy=False)
        wanted = [GENERATORS[name]() for _ in range(3)]
        for after in range(2):
            begin_step(11, 2, 6)
            for _ in range(after):
                GENERATORS[name]()
            set_outer(states)
            assert repr(np.random.get_state(legacy=False)) == repr(words)
            assert [GENERATORS[name]() for _ in range(3)] == wanted
