"""Compute digests of the state that a rank shares with others, for their comparison.

Ranks with the same shard hold the same parameters, and the same tensors of the optimizer's state.
The coordinator compares the digests that the ranks show on their heartbeat pages.
"""

from __future__ import annotations

import ctypes
import functools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xxhash

from rekindle.errors import SessionError
from rekindle.protocol.heartbeat_page import HeartbeatPage, StateDigest
from rekindle.rank.progress import HeldState, RankPlace
from rekindle.states import StateId
from rekindle.training.torch.groups.script_groups import is_zero
from rekindle.training.torch.state.capture import as_bytes, capture
from rekindle.training.torch.state.in_place import Stateful

EVERY = 64  # steps
_KEPT = 16  # compared states whose tensors can still be named
_NAME_BYTES = 24 << 10  # of the groups' names; a message of a rank has at most 128 KiB
_ROW = 1 << 14  # words that have weights of their own
_CHUNK = 1 << 21  # words that a device multiplies at once, in memory of their own
_SETTINGS = "the optimizer's parameter groups"
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def is_compared(step: int) -> bool:
    """Return whether all ranks compare their states after this step."""
    return step % EVERY == 0 or (step < EVERY and step & (step - 1) == 0)


class ReplicaDigests:
    """The digests of one rank's state.

    number: ranks with this number share their parameters, and, without ZeRO, the optimizer's state.
    items: the names of other objects that all ranks should share.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        named: Mapping[str, Stateful],
        others: Iterable[str],
        place: RankPlace,
        page: HeartbeatPage,
    ) -> None:
        self._model = model
        self._zero = is_zero(optimizer)
        self._optimizer: Any = named["optimizer"]
        self._others = {name: named[name] for name in ("scheduler", *others) if name in named}
        self.items = (_SETTINGS, *self._others)
        self.number = 0 if self._zero else place.shard or 0
        self._page = page
        self._alone = True
        self._begins = False
        self._parameters: list[tuple[str, torch.Tensor]] = []
        self._kept: deque[tuple[StateId, dict[str, int]]] = deque(maxlen=_KEPT)

    def begin(self, place: RankPlace, world_size: int) -> None:
        """Begin a generation. A broken step may have replaced the model's parameters before."""
        self._alone = world_size == 1 or (not self._zero and place.shards >= world_size)
        self._begins = True
        found = {id(parameter): name for name, parameter in self._model.named_parameters()}
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                found.setdefault(id(parameter), f"parameter {len(found)} of the optimizer")
        own = {id(p): p for group in self._optimizer.param_groups for p in group["params"]}
        own |= {id(parameter): parameter for parameter in self._model.parameters()}
        self._parameters = [(name, own[number]) for number, name in found.items()]

    def compared(self) -> tuple[int, int] | None:
        """Return the newest compared step, and the newest equal one; None: the rank is alone."""
        return None if self._alone else self._page.compared

    def step_done(self, state: StateId, *, last: bool) -> None:
        """Show the digests of this state on the page if all ranks compare it.

        last: it is the last step of the run.
        """
        if self._alone or not (self._begins or last or is_compared(state.step)):
            return
        self._page.put_digest(self._digest(state))
        if self._begins or state.step <= EVERY:
            for item, value in enumerate(self._other_values(), start=1):
                self._page.put_digest(StateDigest(*state, item, value))
        self._begins = False

    def present(self, held: HeldState, *, compared: bool) -> tuple[StateDigest, ...]:
        """Return the digest of the held state; empty: it belongs to no number of steps.

        compared: return only a digest that is on the page already.
        """
        state = StateId(held.finished, held.generation)
        if self._alone or not held.whole or (compared and state not in dict(self._kept)):
            return ()
        return (self._digest(state),)

    def tensors(self, state: StateId | None) -> dict[str, int]:
        """Return the digests of the tensors of a compared state, in groups; empty: it is unknown.

        A group has a common prefix of the names.
        """
        return grouped(dict(self._kept).get(state, {})) if state is not None else {}

    def _digest(self, state: StateId) -> StateDigest:
        values = dict(self._kept).get(state)
        if values is None:
            values = digests_of(self._tensors())
            self._kept.append((state, values))
        return StateDigest(*state, 0, _combined(sorted(values.items())))

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._parameters:
            yield name, parameter
            if self._zero:
                continue
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    yield f"optimizer.{key}.{name}", value

    def _other_values(self) -> Iterator[int]:
        groups = self._optimizer.param_groups
        settings = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        yield _signed(xxhash.xxh3_64_intdigest(repr(settings).encode()))
        for name, thing in self._others.items():
            yield digest_of(name, thing)


def digests_of(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
    """Return a digest of each tensor's elements, by name; of a DTensor this rank's piece.

    Tensors of other classes are left out: a state cannot contain them.
    """
    found: dict[str, int] = {}
    on_devices: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in named:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # of a DTensor
        if type(local) not in _PLAIN or local.layout is not torch.strided or local.is_meta:
            continue
        if local.is_cpu:
            found[name] = _of_memory(local)
        else:
            on_devices.setdefault(local.device, []).append((name, local))
    for tensors in on_devices.values():
        sums = torch.stack([sum_on_device(tensor) for _, tensor in tensors]).tolist()
        found |= {name: value for (name, _), value in zip(tensors, sums, strict=True)}
    return found


def _of_memory(tensor: torch.Tensor) -> int:
    """Return the digest of a tensor in memory of the CPU, without a copy if it is contiguous."""
    if tensor.is_complex():
        tensor = tensor.resolve_conj()
    if not tensor.is_contiguous() or tensor.is_neg():
        tensor = tensor.detach().resolve_neg().contiguous()
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return _signed(xxhash.xxh3_64_intdigest(memory))


def sum_on_device(tensor: torch.Tensor) -> torch.Tensor:
    """Return a sum of the tensor's 64-bit words with weights by position, modulo 2^64.

    The weights are odd, so one changed word always changes the sum. It stays on the device.
    """
    row = as_bytes(tensor)
    if row.data_ptr() % 8:
        row = row.clone()  # torch's views need aligned memory
    whole = row.numel() // 8 * 8
    words, rest = row[:whole].view(torch.int64), row[whole:].to(torch.int64)
    weights = _weights(tensor.device)
    total = (rest * weights[: rest.numel()]).sum()
    for number, chunk in enumerate(words.split(_CHUNK)):
        full = chunk.numel() // _ROW * _ROW
        rows = (chunk[:full].view(-1, _ROW) * weights).sum(1)
        last = (chunk[full:] * weights[: chunk.numel() - full]).sum()
        sums = torch.cat((rows, last.view(1)))
        total = total * 0x9E37_79B9 + (sums * weights[: sums.numel()]).sum() + number
    return total


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    numbers = np.random.Generator(np.random.PCG64(0)).integers(-(2**63), 2**63 - 1, _ROW)
    return (torch.from_numpy(numbers) | 1).to(device)


def digest_of(name: str, thing: Stateful) -> int:
    """Return a digest of an object's state; 0: a snapshot would refuse it as well."""
    try:
        state = capture({name: thing})
    except SessionError:
        return 0
    values = digests_of(state.tensors.items())
    return _combined([("", _signed(xxhash.xxh3_64_intdigest(state.skeleton))), *values.items()])


def grouped(tensors: Mapping[str, int]) -> dict[str, int]:
    """Return digests of groups of tensors: as many parts of the names as fit into a message."""
    depth = max((name.count(".") + 1 for name in tensors), default=0)
    for parts in range(depth, 0, -1):
        groups: dict[str, list[tuple[str, int]]] = {}
        for name, value in sorted(tensors.items()):
            groups.setdefault(".".join(name.split(".")[:parts]), []).append((name, value))
        if sum(len(name.encode()) + 16 for name in groups) <= _NAME_BYTES:
            return {name: _combined(own) for name, own in groups.items()}
    return {"all": _combined(sorted(tensors.items()))} if tensors else {}


def _combined(values: Sequence[tuple[str, int]]) -> int:
    names = "\n".join(name for name, _ in values)
    packed = np.array([value for _, value in values], np.int64)
    return _signed(xxhash.xxh3_64_intdigest(packed.tobytes() + names.encode()))


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
