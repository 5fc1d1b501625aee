"""A repeated step begins with the same buffers as the first time."""

import torch

from rekindle.training.torch.faults.repairs import BufferGuard


def state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of the module's state."""
    return {name: value.clone() for name, value in module.state_dict().items()}


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    """Return whether two states are equal to the bit."""
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_broken_step_leaves_no_trace_in_batch_norm() -> None:
    """After each broken step, the guard restores the statistics and counters of batch norm.

    They then come from finished steps only.
    """
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
    guard = BufferGuard(module)
    guard.look()
    for _ in range(3):
        guard.keep()
        module(torch.randn(16, 4))  # a step that is finished
        before = state(module)
        guard.keep()
        for _ in range(2):
            module(torch.randn(16, 4))  # a step that breaks
            assert not same(state(module), before)
            guard.restore()
            assert same(state(module), before)


def test_a_buffer_that_was_replaced_is_followed() -> None:
    """If a module replaces its buffer with a new tensor, the guard restores the values there."""
    module = torch.nn.Module()
    module.register_buffer("seen", torch.zeros(2))
    guard = BufferGuard(module)
    guard.look()
    guard.keep()
    module.seen = torch.ones(2)
    guard.keep()
    module.seen.add_(5)
    module.seen = torch.full((2,), 9.0)
    guard.restore()
    assert module.seen.tolist() == [1.0, 1.0]


class OnDevice(torch.Tensor):
    """A tensor that reports that it is on a device."""

    is_cpu = False


def test_a_buffer_on_a_device_is_kept_without_a_look_at_its_counter() -> None:
    """The guard copies a buffer on a device at each step, without a look at its version counter.

    The replay of a CUDA graph changes buffers, but not the counter.
    """
    module = torch.nn.Module()
    module.register_buffer("seen", torch.zeros(2).as_subclass(OnDevice))
    guard = BufferGuard(module)
    guard.look()
    guard.keep()
    for step in (1.0, 2.0):
        uncounted = module.seen.data  # the same memory with a counter of its own
        uncounted += 1
        guard.keep()
        uncounted += 7
        guard.restore()
        assert module.seen.tolist() == [step, step]
