"""Give a new process the variables of the script's loops that change from block to block.

The new process runs the script from its beginning, up to the batch of the other ranks. There the
variables take the values that the former process had at the same place. They are a part of the
state that a rank shares with no other, see own_state.py.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch

from rekindle.console import say
from rekindle.errors import SessionError
from rekindle.training.torch.data.all_gather import pack, unpack
from rekindle.training.torch.data.epoch_position import Place, Stage
from rekindle.training.torch.state.script_forms import (
    Learned,
    NoForm,
    forms_of,
    size_of,
)
from rekindle.training.torch.state.script_names import (
    ATOMS,
    MISSING,
    Names,
    reads_later,
    roots_of,
    stack_of,
    target_of,
)
from rekindle.training.torch.state.script_prints import Prints
from rekindle.training.torch.state.script_restore import Unpacker
from rekindle.training.torch.state.script_values import is_watched

LIMIT_BYTES = 16 << 20  # of all values
NOTICE_BYTES = 1 << 20
_LISTED = 5  # names in a line
_LONGEST_PATH = 100  # characters; instead of a longer one, a line has the variable's name


class Variables:
    """The variables of the loops that change.

    kept: objects that the Session keeps itself. ignore: objects that may be lost, or their names.
    tells: one line names the variables and what they cost. is_new: the process has come to no place
    in a loop yet.
    """

    def __init__(self, kept: Iterable[Any], ignore: Iterable[Any], *, tells: bool = False) -> None:
        kept, ignore = list(kept), list(ignore)
        self._modules = [each for each in kept if isinstance(each, torch.nn.Module)]
        self._left = {id(each) for each in (*kept, *ignore) if type(each) not in ATOMS}
        self._ignored = {each for each in ignore if isinstance(each, str)}
        modules = [each for each in (*kept, *ignore) if isinstance(each, torch.nn.Module)]
        self._printer = Prints({id(part) for each in modules for part in each.modules()})
        self._prints: dict[str, dict[str, Any]] = {}  # of each value, by its space
        self._origin = Learned(self._printer)  # at the begin of the first epoch
        self._learned = Learned(self._printer)  # at the first batch of this epoch
        self._bound: dict[str, set[str]] = {}  # the names that the script has set before the loop
        self._late: dict[str, set[str]] = {}  # names that only take() has set
        self._moving: dict[str, set[str]] = {}
        self._state: dict[str, Any] = {}
        self._opening = b""  # the values at the begin of the epoch
        self._long: dict[str, dict[str, Any]] = {}  # the same, with all of long containers
        self._lasting: dict[
            str, frozenset[str] | None
        ] = {}  # what an epoch may read of those before it
        self._looks = 0
        self._loop = "", ""  # the space and the name to which the loop over epochs gives its number
        self._epoch = -1
        self._tells = tells
        self._told = False
        self.is_new = True

    @property
    def place(self) -> Place | None:
        """The place that the values belong to; None: there are no values."""
        return Place(*self._state["place"]) if self._state else None

    @property
    def has_values(self) -> bool:
        """Whether there are values at the last place."""
        return bool(self._state and self._state["values"])

    @property
    def lasts(self) -> bool:
        """Whether a later epoch may read one of the values."""
        return bool(self._state and self._state["lasts"])

    def state_dict(self) -> dict[str, Any]:
        """Return the values at the last place."""
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the values of a former process, for take()."""
        self._state = dict(state)
        self._opening = state.get("opening", b"")

    def take(self, frame: FrameType) -> None:
        """Set the variables to the received values. frame: it asks for an epoch or a batch.

        Raises SessionError: the script has not made what the former process had.
        """
        opens = self._state["place"][2] == Stage.OPENING.value
        self._set(frame, self._state["values"], self._origin if opens else self._learned)

    def open(self, frame: FrameType, place: Place) -> None:
        """Set the variables to their values at the begin of the epoch, if this is its place.

        The code between this place and the first batch may read them. Raises SessionError, as
        take().
        """
        if self._opening and place.stage == Stage.OPENING.value:
            epoch, values = unpack(self._opening)
            if epoch == place.epoch:
                self._set(frame, values, self._origin)

    def _set(
        self, frame: FrameType, received: Mapping[str, Mapping[str, Any]], learned: Learned
    ) -> None:
        spaces, unpacker = dict(_spaces(frame, self._modules)), Unpacker(learned)
        for space, names in spaces.items():
            learned.learn(space, self._live(space, names))
        for space, values in received.items():
            if space not in spaces:
                raise SessionError(f"{', '.join(values)} of {space} do not exist in this process")
            names = spaces[space]
            live = names.read()
            new = {
                n: unpacker.value(form, live.get(n, MISSING), f"{space}:{n}")
                for n, form in values.items()
            }
            names.write({n: v for n, v in new.items() if live.get(n, MISSING) is not v})
            self._moving.setdefault(space, set()).update(values)
            self._late[space] = values.keys() - live.keys()

    def look(self, frame: FrameType, place: Place, *, outer: bool) -> None:
        """Find the variables that have changed since the last place, and keep their values.

        outer: an epoch begins, so functions that it calls begin again.
        Raises SessionError: one has a value that no other process could get.
        """
        self.is_new = False
        self._looks += 1
        self._epoch = place.epoch
        spaces = dict(_spaces(frame, self._modules))
        if outer:
            script = next(stack_of(frame))
            here = script, script.f_locals  # the second: of a module's own code
            at = next(s for s, names in spaces.items() if any(names.thing is e for e in here))
            self._loop = at, target_of(script) or ""
            for known in (self._prints, self._long, self._bound, self._moving):
                for space in known.keys() - spaces.keys():
                    del known[space]
            self._lasting = {space: _read_later(each) for space, each in spaces.items()}
        begins = place.batch == 0
        if begins and not outer:
            self._learned = Learned(self._printer)
        learned = self._origin if outer else self._learned
        live = {space: self._live(space, names) for space, names in spaces.items()}
        for space, names in live.items():
            learned.learn(space, names)
        moving = {s: self._look_at(s, names, begins=begins) for s, names in live.items()}
        values = self._forms(moving, learned)
        self._check_size(sum(size_of(each) for each in values.values()))
        values = {space: each for space, each in values.items() if each}
        lasting = {space: self._lasting[space] for space in self._lasting.keys() & values.keys()}
        lasts = any(n is None or n & values[space].keys() for space, n in lasting.items())
        if outer:
            self._opening = pack((place.epoch, values), "variables")
        opening = self._opening if place.stage != Stage.OPENING.value else b""
        self._state = {"place": list(place), "values": values, "lasts": lasts, "opening": opening}
        if values and self._tells:
            self._tells = False
            say(
                f"these variables change from block to block: {_first_of(values.values())}. If a "
                "process ends outside of a block, all ranks repeat the steps since the newest "
                "snapshot"
            )

    def prints(self, frame: FrameType) -> dict[str, dict[str, Any]]:
        """Return values by space and name that change with the variables."""
        spaces = _spaces(frame, self._modules)
        return {s: self._prints_of(self._live(s, names), whole=True) for s, names in spaces}

    def check_run(self, before: Mapping[str, Mapping[str, Any]], frame: FrameType) -> None:
        """Check after a function of session.run(). before: prints() from before it.

        Raises SessionError: the function has changed variables.
        """
        now = self.prints(frame)
        changed = []
        for space, names in before.items():
            new = {**names, **now.get(space, {})}
            changed += [n for n, old in names.items() if new[n] is not old and new[n] != old]
        if changed:
            raise SessionError(
                f"session.run(): the function changes {', '.join(changed)}, but a new process gets "
                "only its result: return the values, and set the variables after the call; or list "
                f"the names in ignore=[{changed[0]!r}] if they may be lost"
            )

    def _look_at(self, space: str, live: Mapping[str, Any], *, begins: bool) -> dict[str, Any]:
        """Return the variables of one space that change.

        begins: no batch of this epoch is finished, so a new process sets these names as well.
        """
        moving = self._moving.setdefault(space, set())
        is_first = space not in self._bound
        if is_first or begins:
            bound = self._bound.setdefault(space, set())
            bound |= live.keys() - self._late.get(space, set())
        watched = (False, True) if is_watched(self._looks) or is_first else (False,)
        for known, whole in zip((self._prints, self._long), watched, strict=False):
            now = self._prints_of(live, whole=whole)
            before, known[space] = known.get(space, now), now
            if now != before and not is_first:
                moving |= {n for n, p in now.items() if n not in before or before[n] != p}
        return {name: live[name] for name in moving & live.keys()}

    def _forms(
        self, values: Mapping[str, Mapping[str, Any]], learned: Learned
    ) -> dict[str, dict[str, Any]]:
        """Return the forms of the variables, without those that a new process does not have."""
        every = {f"{space}:{n}": v for space, names in values.items() for n, v in names.items()}
        forms = forms_of(every, learned)
        found: dict[str, dict[str, Any]] = {}
        for space, names in values.items():
            found[space] = {}
            for name in names:
                form = forms[f"{space}:{name}"]
                if not isinstance(form, NoForm):
                    found[space][name] = form
                elif name in self._bound.get(space, ()):
                    raise SessionError(_refusal(name, form))
        return found

    def _live(self, space: str, names: Names) -> dict[str, Any]:
        """Return the values of a space that the script may read later.

        The number of the epoch does not count: the loop over the epochs sets it in a new process.
        """
        read, values = _read_later(names), names.read()
        counts = values.keys() - self._ignored
        at, name = self._loop
        if at == space and type(values.get(name)) is int and values[name] == self._epoch:
            counts = counts - {name}
        counts = counts if read is None else counts & read
        return {name: values[name] for name in counts if id(values[name]) not in self._left}

    def _prints_of(self, live: Mapping[str, Any], *, whole: bool) -> dict[str, Any]:
        """Return a value for each variable that changes with its contents."""
        of = self._printer.of
        return {n: v if type(v) in ATOMS else of(v, whole=whole) for n, v in live.items()}

    def _check_size(self, size: int) -> None:
        if size <= NOTICE_BYTES:
            return
        names = ", ".join(sorted({name for each in self._moving.values() for name in each}))
        if size > LIMIT_BYTES:
            raise SessionError(
                f"{names} change from block to block and have {size >> 20} MiB, and a copy before "
                f"each block has at most {LIMIT_BYTES >> 20}: give them to the Session, "
                "extra={...}, or list their names in ignore=[...] if they may be lost"
            )
        if not self._told:
            self._told = True
            say(f"{size / 1e6:.0f} MB of variables are copied before each block: {names}")


def _refusal(name: str, form: NoForm) -> str:
    path = form.path.rpartition(":")[2]
    path = path if len(path) <= _LONGEST_PATH else name
    return (
        f"{path} changes from block to block and {form.why}, so a process that replaces this "
        f"rank could not get it: give it to the Session, extra={{...}}, make it again at "
        f"the begin of each epoch, or list it in ignore=[{name!r}] if it may be lost"
    )


def _first_of(names: Iterable[Iterable[str]]) -> str:
    """Return the first names of some."""
    every = sorted(set(itertools.chain(*names)))
    more = f" and {len(every) - _LISTED} more" if len(every) > _LISTED else ""
    return ", ".join(every[:_LISTED]) + more


def _read_later(names: Names) -> frozenset[str] | None:
    """Return the names whose present values the running code may read; None: all."""
    if isinstance(names.thing, FrameType):
        return reads_later(names.thing)
    for frame in stack_of(sys._getframe()):
        if frame.f_locals is frame.f_globals is names.thing:
            return reads_later(frame)
    return None


def _spaces(frame: FrameType, modules: list[torch.nn.Module]) -> Iterator[tuple[str, Names]]:
    """Yield the names that a process finds again, by a text that is the same in each process."""
    depth = sum(1 for _ in stack_of(frame))
    for name, thing in roots_of(frame, modules):
        if isinstance(thing, FrameType):
            yield f"{thing.f_code.co_name}() {depth}", Names(thing)
            depth -= 1
        elif isinstance(thing, dict):
            yield thing.get("__name__", name), Names(thing)
        else:
            yield name, Names(thing)
