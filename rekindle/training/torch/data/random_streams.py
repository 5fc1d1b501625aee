"""Give each step its own random streams, as a pure function of (seed, rank, step).

So a rank's random numbers are known even when its process and its node are lost. Its replacement
draws the same numbers in step n as the lost rank, and a repeated step draws the same numbers again.
"""

from __future__ import annotations

import ctypes
import functools
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import torch

_MASK = (1 << 64) - 1
_WORDS = 2500  # bytes of the state of an MT19937 in memory: 624 words and a place

# Every step seeds, and the step before has displaced this code from all caches. So the amount of
# code decides the time. The functions random.seed and numpy.random.seed double the time of the
# generators' own functions, so this module seeds the generators directly.
_python = random._inst
_seed_python = super(random.Random, _python).seed
_numpy = numpy.random.mtrand._rand
_seed_numpy = _numpy.seed

# The generators of the process, which functions such as random.random() use.
GLOBAL: Mapping[str, Any] = {"torch": torch.default_generator, "random": _python, "numpy": _numpy}


def stream_seed(seed: int, rank: int, step: int) -> int:
    """Mix the three numbers to 64 bits, with splitmix64's finalizer after each number."""
    return _mix(_rank_seed(seed, rank), step)


@functools.lru_cache
def _rank_seed(seed: int, rank: int) -> int:
    return _mix(_mix(0, seed), rank)


def _mix(word: int, part: int) -> int:
    word = (word ^ (part & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _MASK
    return word ^ (word >> 31)


def begin_step(seed: int, rank: int, step: int) -> None:
    """Seed torch (all devices), random and numpy for one step."""
    mixed = stream_seed(seed, rank, step)
    torch.default_generator.manual_seed(mixed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(mixed)
    # torch-npu sets `torch.npu`. Without it, getattr(torch, "npu") takes longer than seeding torch.
    npu = vars(torch).get("npu")
    if npu is not None and npu.is_initialized():
        npu.manual_seed(mixed)
    _seed_python(mixed)
    _python.gauss_next = None  # type: ignore[attr-defined]  # typeshed omits it
    try:
        _seed_numpy(mixed & 0xFFFFFFFF)
    except TypeError:  # the script chose another bit generator: numpy.random.set_bit_generator
        numpy.random.seed(mixed & 0xFFFFFFFF)


def begin_batch(seed: int, number: int, own: Sequence[Any]) -> None:
    """Seed the generators of the process, and a data set's own ones, for one batch."""
    begin_step(seed, 0, number)
    for i, each in enumerate(own, 1):
        reseed(each, stream_seed(seed, i, number))


def state_of(generator: Any) -> Any:
    """Return the state of a generator of torch, NumPy or Python; see set_state()."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, numpy.random.RandomState):
        address = _words_of(generator)
        return generator.get_state(legacy=False) if address is None else _read(address)
    return generator.bit_generator.state


def set_state(generator: Any, state: Any) -> None:
    """Set a generator to a state of state_of()."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, numpy.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(state, tuple):
        _write(_words_of(generator), *state)
    else:
        generator.set_state(state)


def is_same(one: Any, other: Any) -> bool:
    """Return whether two states of state_of() are equal."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, numpy.ndarray):
        return numpy.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(v, other[k]) for k, v in one.items())
    return bool(one == other)


def reseed(generator: Any, seed: int) -> None:
    """Seed a generator with 64 bits."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, random.Random):
        generator.seed(seed)
    elif isinstance(generator, numpy.random.Generator):
        bits = generator.bit_generator
        bits.state = type(bits)(seed).state
    else:
        generator.set_state(numpy.random.RandomState(seed & 0xFFFFFFFF).get_state(legacy=False))


def _words_of(generator: Any) -> int | None:
    """Return the address of the words of NumPy's process-wide generator, if it is an MT19937."""
    bits = numpy.random.mtrand.get_bit_generator()
    if generator is not _numpy or not isinstance(bits, numpy.random.MT19937):
        return None
    address: int = bits.ctypes.state_address
    return address


def _read(address: int) -> tuple[bytes, float | None]:
    """Return the words, and the normal number in reserve.

    get_state() and set_state() take 50 us each, because they convert each word alone.
    """
    words = ctypes.string_at(address, _WORDS)
    reserve = _take_reserve(address, words)
    if reserve is not None:
        _put_reserve(reserve)
    return words, reserve


def _write(address: int | None, words: bytes, reserve: float | None) -> None:
    assert address is not None
    ctypes.memmove(address, words, _WORDS)
    _take_reserve(address, words)
    if reserve is not None:
        _put_reserve(reserve)


def _take_reserve(address: int, words: bytes) -> float | None:
    """Take the reserve: standard_normal() makes two numbers at a time, and keeps one."""
    number = _numpy.standard_normal()
    if ctypes.string_at(address, _WORDS) == words:
        return number
    _numpy.standard_normal()  # the reserve of the call above
    ctypes.memmove(address, words, _WORDS)
    return None


def _put_reserve(number: float) -> None:
    state = _numpy.get_state(legacy=False)
    _numpy.set_state({**state, "has_gauss": 1, "gauss": number})


def device_state() -> torch.Tensor | None:
    """Return the state of the generator of the present CUDA device; None: no CUDA is in use."""
    return torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None


def outer_states() -> tuple[Any, ...]:
    """Return the states of torch's CPU generator, `random` and `numpy.random`; see set_outer().

    It is for this process; EpochBatches.states() has a form for the state format.
    """
    return tuple(map(state_of, GLOBAL.values()))


def set_outer(states: tuple[Any, ...]) -> None:
    """Set these generators to states of outer_states()."""
    for generator, state in zip(GLOBAL.values(), states, strict=True):
        set_state(generator, state)
