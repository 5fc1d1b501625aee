"""Keep the state from before a step, so that a step that breaks can begin again from it.

docs/decisions/028-state-of-a-step.md has the rules.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
import xxhash

from rekindle.console import say
from rekindle.training.torch import private
from rekindle.training.torch.state.capture import ExtraStates, Modes, as_bytes, have_same_bits
from rekindle.training.torch.state.in_place import Stateful, distribute, load_in_place
from rekindle.training.torch.state.nodes import LiveParts
from rekindle.training.torch.state.skeleton import Reader, Writer

SMALL_BYTES = 64 << 10  # such a copy takes microseconds
LIMIT_BYTES = 256 << 20  # of the large tensors that are copied before each step
NOTICE_BYTES = 16 << 20  # of copies; they then take milliseconds
NOTICE_VALUES = 1 << 20  # bytes of JSON; to write them takes milliseconds
_LESSONS = 8  # steps of a generation in which changes before the update are searched
_SAMPLE = 1 << 16  # elements that show whether a tensor has changed


class BeforeStep:
    """Keeps what a step can change before its update begins.

    named: the objects of the Session. leave: the names of those that only the Session changes.
    optimizer: the script's. ZeRO's has another one inside, which is in `named`. tells: whether this
    rank prints the cost.
    """

    def __init__(
        self,
        named: Mapping[str, Any],
        modes: Modes,
        *,
        leave: Iterable[str] = (),
        optimizer: torch.optim.Optimizer | None = None,
        tells: bool = False,
    ) -> None:
        things = {name: each for name, each in named.items() if name not in {*leave}}
        self._modes = modes
        self._modules = {n: e for n, e in things.items() if isinstance(e, torch.nn.Module)}
        self._optimizers = [e for e in things.values() if isinstance(e, torch.optim.Optimizer)]
        if optimizer is not None and optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
        self._scalers = [e for e in things.values() if isinstance(e, torch.amp.GradScaler)]
        own = (*self._modules.values(), *self._optimizers, *self._scalers, modes)
        self._budget = _Budget(tells=tells)
        self._tensors = _ModuleTensors(self._budget)
        self._objects = [
            _Object(name, each, self._budget)
            for name, each in things.items()
            if not any(each is other for other in own)
        ]
        extra_states = {name: ExtraStates(each) for name, each in self._modules.items()}
        self._objects += [_Object(n, e, self._budget) for n, e in extra_states.items() if e.parts]
        self._lists: list[tuple[torch.optim.Optimizer, list[dict[str, Any]]]] = []
        self._groups: list[_Values] = []
        self._scales: list[_Values] = []
        self._owned: list[torch.Tensor] = []  # parameters: their rule is that no update has begun
        self._versions: list[int] = []
        modes.look(self._modules)

    def look(self) -> None:
        """Begin a generation: find the tensors of all modules, and forget what was kept.

        The gradients of a broken step are gone, so a scaler must not know them as unscaled.
        """
        self._modes.look(self._modules)
        owned = [p for each in self._optimizers for g in each.param_groups for p in g["params"]]
        self._owned = [p for p in owned if not hasattr(p, "device_mesh")]
        self._groups = []  # keep() finds them
        self._scales = [_Values(vars(s), private.scale_of(s)) for s in self._scalers]
        self._versions = []
        self._budget.look()
        self._tensors.look(_places_of(self._modules, {id(p) for p in owned}))
        for each in self._objects:
            each.look()
        for scaler in self._scalers:
            private.forget_unscaled(scaler)

    def keep(self) -> None:
        """Keep the state. Raises SessionError: an object has a value that a state cannot hold.

        The step before has displaced this code and its data from all caches, so usual steps leave
        out what only the first ones need.
        """
        self._modes.keep()
        if sum(len(each.param_groups) for each in self._optimizers) != len(self._groups):
            self._groups = [_Values(g) for each in self._optimizers for g in each.param_groups]
            self._lists = [(each, [*each.param_groups]) for each in self._optimizers]
        for values in (*self._groups, *self._scales):
            values.keep()
        began = time.perf_counter()
        self._tensors.keep()
        for each in self._objects:
            each.keep()
        if self._budget.lessons > 0:
            self._versions = list(map(private.version_of, self._owned))
            self._budget.print_costs(began, sum(len(each.skeleton) for each in self._objects))

    def update_begins(self) -> None:
        """In the first steps, find the tensors that a step changes before its update."""
        if self._budget.lessons > 0:
            self._look_at_owned()
            for kept in (*self._tensors.kept(), *(k for o in self._objects for k in o.kept())):
                self._budget.learn(kept)
            self._budget.lessons -= 1

    def restore(self) -> bool:
        """Restore the kept state; False: something that has no copy has changed."""
        whole = [self._tensors.restore(), *(each.restore() for each in self._objects)]
        if self._budget.lessons:
            self._look_at_owned()
        for optimizer, groups in self._lists:
            optimizer.param_groups[:] = groups
        for values in (*self._groups, *self._scales):
            values.restore()
        self._modes.restore()
        return all(whole) and not self._budget.early

    def _look_at_owned(self) -> None:
        if self._versions != list(map(private.version_of, self._owned)):
            self._budget.early = True


@dataclass(slots=True)
class _Kept:
    """A tensor, and its copy or the signs of a change.

    uncounted: torch changes it without its version counter.
    """

    name: str
    tensor: torch.Tensor
    uncounted: bool = False
    copy: torch.Tensor | None = None
    version: int = 0
    address: int = 0
    sample: int | None = None

    def note(self) -> None:
        """Note the signs of a change."""
        self.version, self.address = private.version_of(self.tensor), self.tensor.data_ptr()

    def may_differ(self) -> bool:
        """Return whether the tensor may have changed since the last note."""
        # The replay of a CUDA graph changes buffers on a device, but not their counters.
        if self.uncounted or not (self.copy is None or self.tensor.is_cpu):
            return True
        return self.counts_change()

    def counts_change(self) -> bool:
        """Return whether torch has counted a change since the last note."""
        tensor = self.tensor
        return private.version_of(tensor) != self.version or tensor.data_ptr() != self.address

    def restore(self) -> bool:
        """Restore the values; False: they may have changed, and there is no copy."""
        if not self.may_differ():
            return True
        if self.copy is None or self.copy.shape != self.tensor.shape:
            return False
        with torch.no_grad():
            self.tensor.copy_(self.copy)
        self.note()
        return True


class _Budget:
    """Decides which large tensors have a copy, and prints the cost.

    A frozen model, a table, and an average that follows the update need none. The first steps show
    which tensors change before the update. Each of these has a copy in all later steps.
    changing: the names of these tensors. lessons: the number of steps in which they are searched.
    early: the script changes parameters before their update, so no broken step can be restored.
    """

    def __init__(self, *, tells: bool) -> None:
        self.lessons = 0
        self.early = False
        self.changing: set[str] = set()
        self._uncounted: set[str] = set()
        self._copied: dict[str, int] = {}  # bytes
        self._too_large: set[str] = set()
        self._tells = tells
        self._told: set[str] = set()

    def look(self) -> None:
        """Begin a generation."""
        self.lessons, self._copied = _LESSONS, {}

    def first(self, kept: _Kept, *, always: bool = False) -> _Kept:
        """Copy the tensor, or note the signs of a change. always: it may change at any time."""
        kept.note()
        name, size = kept.name, kept.tensor.nbytes
        # `tensor.data` changes a tensor without its counter.
        kept.uncounted = kept.uncounted or size <= SMALL_BYTES or name in self._uncounted
        if self._wants(name, size, always=always):
            kept.copy = kept.tensor.detach().clone()
        if self.lessons == _LESSONS and not kept.uncounted:
            kept.sample = _sample_of(kept.tensor)
        return kept

    def is_late(self, kept: _Kept) -> bool:
        """Return whether the tensor has no copy, but needs one now."""
        return kept.copy is None and kept.name in self.changing - self._too_large

    def learn(self, kept: _Kept) -> None:
        """Find out whether a large tensor has changed since the step began."""
        if kept.sample is not None and not kept.counts_change():
            if _sample_of(kept.tensor) != kept.sample:
                kept.uncounted = True
                self._uncounted.add(kept.name)
        if kept.copy is None and kept.may_differ():
            self.changing.add(kept.name)
        kept.sample = None

    def print_costs(self, began: float, values: int) -> None:
        """Print the cost of copies, and the names of tensors without one; each line once.

        began: the start of the copies, by time.perf_counter. values: bytes of all other values.
        """
        if not self._tells:
            return
        ms = (time.perf_counter() - began) * 1000
        copied = sum(self._copied.values())
        if copied > NOTICE_BYTES:
            names = ", ".join(sorted(self._copied))
            text = f"{copied / 1e6:.0f} MB that a step may change are copied before each step"
            self._say("copies", f"{text}, in {ms:.1f} ms: {names}")
        if values > NOTICE_VALUES:
            text = f"{values / 1e6:.0f} MB of values of `extra` are written before each step"
            self._say("values", f"{text}, in {ms:.0f} ms; keep them in tensors")
        then = "if a fault breaks a step, all ranks may return to the newest snapshot"
        for name in sorted(self._too_large):
            why = f"is too large for a copy before each step ({LIMIT_BYTES >> 20} MiB in all)"
            text = f"{name} changes within a step and {why}: {then}"
            self._say(name, f"{text}. Change it after optimizer.step()")
        if self.early:
            self._say("early", f"the script changes parameters before optimizer.step(): {then}")

    def _wants(self, name: str, size: int, *, always: bool) -> bool:
        if size <= SMALL_BYTES or name in self._copied:
            return True
        if not always and name not in self.changing:
            return False
        if sum(self._copied.values()) + size > LIMIT_BYTES:
            self._too_large.add(name)
            return False
        self._copied[name] = size
        return True

    def _say(self, what: str, text: str) -> None:
        if what not in self._told:
            self._told.add(what)
            say(text)


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor's place in a module, which may hold another one later. always: as _Budget.first."""

    name: str
    owner: dict[str, Any]
    key: str
    uncounted: bool = False
    always: bool = False


class _ModuleTensors:
    """Keeps the buffers of modules, and the parameters that no optimizer has."""

    def __init__(self, budget: _Budget) -> None:
        self._budget = budget
        self._places: list[Place] = []
        self._kept: dict[int, _Kept] = {}  # by the number of the place

    def look(self, places: Iterable[Place]) -> None:
        """Begin a generation with these places."""
        self._places, self._kept = list(places), {}

    def kept(self) -> Iterable[_Kept]:
        """Return what is kept."""
        return self._kept.values()

    def keep(self) -> None:
        """Keep all values."""
        changed: list[_Kept] = []
        for index, place in enumerate(self._places):
            tensor, kept = place.owner.get(place.key), self._kept.get(index)
            if tensor is None:
                self._kept.pop(index, None)
            elif kept is None or kept.tensor is not tensor or self._budget.is_late(kept):
                fresh = _Kept(place.name, tensor, place.uncounted)
                self._kept[index] = self._budget.first(fresh, always=place.always)
            elif kept.copy is None:
                kept.note()
            elif kept.may_differ():
                kept.note()
                changed.append(kept)
        if changed:
            with torch.no_grad():  # one call: for small tensors, calls take longer than the bytes
                copies = [k.copy for k in changed if k.copy is not None]
                private.copy_all(copies, [k.tensor for k in changed])

    def restore(self) -> bool:
        """Restore the values and the tensors; False: one without a copy has changed."""
        whole = True
        for index, kept in self._kept.items():
            place = self._places[index]
            place.owner[place.key] = kept.tensor
            if not kept.restore():
                self._budget.changing.add(kept.name)
                whole = False
        return whole


class _Object:
    """Keeps the state of an object that only its state_dict() shows."""

    def __init__(self, name: str, thing: Stateful, budget: _Budget) -> None:
        self._name, self._thing, self._budget = name, thing, budget
        self._node: Any = None
        self._kept: dict[str, _Kept] = {}
        self._parts = LiveParts()  # the classes of the values in the node
        self.skeleton = b""

    def look(self) -> None:
        """Begin a generation."""
        self._kept, self.skeleton = {}, b""

    def kept(self) -> Iterable[_Kept]:
        """Return the tensors that are kept."""
        return self._kept.values()

    def keep(self) -> None:
        """Keep the state."""
        self._node, tensors, self._parts = self._read()
        before = self._kept
        if not self.skeleton and tensors:  # are they the object's own, or does each call make them?
            before = {n: _Kept(n, t) for n, t in self._read()[1].items()}
        self._kept = {n: self._keep(n, each, before.get(n)) for n, each in tensors.items()}
        self.skeleton = msgspec.json.encode(self._node)

    def restore(self) -> bool:
        """Restore the state; False: a tensor without a copy has changed."""
        node, tensors, _ = self._read()
        whole = True
        for name, kept in self._kept.items():
            if kept.copy is None and (tensors.get(name) is not kept.tensor or kept.may_differ()):
                self._budget.changing.add(kept.name)
                whole = False
        same = msgspec.json.encode(node) == self.skeleton and all(
            kept.copy is None or have_same_bits(kept.copy, tensors[name])
            for name, kept in self._kept.items()
        )
        if whole and not same:
            values = {n: k.tensor if k.copy is None else k.copy for n, k in self._kept.items()}
            state = Reader(values, self._parts).decode(self._node)
            load_in_place(self._thing, distribute(state, self._thing.state_dict(), self._name))
        self.look()  # the object may hold the copies now
        return whole

    def _read(self) -> tuple[Any, dict[str, torch.Tensor], LiveParts]:
        writer = Writer()
        return writer.encode(self._thing.state_dict(), self._name), writer.own, writer.live

    def _keep(self, name: str, tensor: torch.Tensor, before: _Kept | None) -> _Kept:
        lasting = before is not None and before.tensor is tensor
        if before is None or not lasting or self._budget.is_late(before) or not self.skeleton:
            # A tensor that each call makes may show memory without a counter.
            kept = _Kept(name, tensor, uncounted=not lasting)
            return self._budget.first(kept, always=not lasting)
        if before.copy is not None and before.may_differ():
            with torch.no_grad():
                before.copy.copy_(tensor)
        before.note()
        return before


class _Values:
    """The values of a mapping: an optimizer's group, or a scaler's attributes.

    names: of the values to keep; default: all.
    """

    def __init__(self, live: dict[str, Any], names: Iterable[str] | None = None) -> None:
        self._live = live
        self._names = None if names is None else [*names]
        self._kept: dict[str, Any] = {}
        self._inside: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(self) -> None:
        """Keep the values."""
        live, names = self._live, self._names
        self._kept = live.copy() if names is None else {name: live[name] for name in names}
        if names is not None or isinstance(live.get("lr"), torch.Tensor):
            tensors = [v for v in self._kept.values() if isinstance(v, torch.Tensor)]
            self._inside = [(tensor, tensor.detach().clone()) for tensor in tensors]

    def restore(self) -> None:
        """Restore the values in place."""
        self._live.update(self._kept)
        with torch.no_grad():
            for tensor, copy in self._inside:
                tensor.copy_(copy)


def _places_of(modules: Mapping[str, torch.nn.Module], owned: set[int]) -> Iterator[Place]:
    """Yield all buffers, including those that are not saved, and the parameters without optimizer.

    Distributed parameters are left out: FSDP itself changes them within a step.
    """
    for name, module in modules.items():
        for path, part in module.named_modules():
            inside = f"{name}.{path}" if path else name
            buffers, parameters = private.buffers_of(part), private.parameters_of(part)
            counts = not isinstance(part, private.NormBase)
            for key in buffers:
                always = name == "model"
                yield Place(f"{inside}.{key}", buffers, key, uncounted=not counts, always=always)
            for key, parameter in parameters.items():
                mine = parameter is None or id(parameter) in owned
                if not mine and not hasattr(parameter, "device_mesh"):
                    yield Place(f"{inside}.{key}", parameters, key)


def _sample_of(tensor: torch.Tensor) -> int:
    """Return a number that almost surely changes with the values of a tensor."""
    row = tensor.detach().reshape(-1)
    some = row[:: max(1, row.numel() // _SAMPLE)].cpu()
    return xxhash.xxh3_64_intdigest(as_bytes(some).numpy().data)
