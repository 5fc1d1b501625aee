"""Make the values of a script's variables again from their forms, in a new process."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from typing import Any

from rekindle.errors import SessionError
from rekindle.training.torch.state.plain_objects import filled
from rekindle.training.torch.state.script_forms import (
    DEFAULTDICT,
    FACTORIES,
    SEQUENCES,
    Fresh,
    Held,
    Hole,
    Learned,
    Made,
    Moved,
    Numbers,
    Same,
    Shared,
    class_of,
    name_of,
)
from rekindle.training.torch.state.script_names import MISSING, Names


class Unpacker:
    """Makes the values of the forms of one state. learned: the objects of this process."""

    def __init__(self, learned: Learned) -> None:
        self._learned = learned
        self._shared: dict[int, Any] = {}

    def value(self, packed: Any, live: Any, path: str) -> Any:
        """Return the value of a form, if possible in the live value of this process.

        Raises SessionError: the script has not made an object that the former process had.
        """
        match packed:
            case Hole():
                if live is MISSING:
                    raise _not_made(path)
                return live
            case Same() | Shared() | Fresh() | Moved():
                return self._object(packed, live, path)
            case Made():
                return self._made(packed, live, path)
            case Numbers(values):
                return _sequence([], live, values.tolist())
            case Held(kind, elements):
                return self._held(kind, elements, live, path)
            case dict():
                return self._mapping(packed, live, path)
            case list() | tuple() | deque():
                had = list(live) if isinstance(live, SEQUENCES) else []
                had += [MISSING] * (len(packed) - len(had))
                items = [
                    self.value(each, old, f"{path}.{i}")
                    for i, (each, old) in enumerate(zip(packed, had, strict=False))
                ]
                return _sequence(packed, live, items)
        return packed if live is MISSING else filled(live, packed)

    def _object(self, packed: Same | Shared | Fresh | Moved, live: Any, path: str) -> Any:
        """Return an object that is not, or not only, the one at this path in this process."""
        match packed:
            case Same(number):
                return self._shared[number]
            case Shared(number, form):
                return self._shared.setdefault(number, self.value(form, live, path))
            case Fresh(form):
                return self.value(form, MISSING, path)
            case Moved(place, form):
                if place not in self._learned.objects:
                    raise _not_made(place)
                return self.value(form, self._learned.objects[place], place)

    def _mapping(self, packed: Any, live: Any, path: str) -> Any:
        was = live if isinstance(live, dict) else {}
        new = {k: self.value(v, was.get(k, MISSING), f"{path}.{k}") for k, v in packed.items()}
        if not isinstance(live, dict):
            return type(packed)(new)
        live.clear()
        live.update(new) if isinstance(live, OrderedDict) else dict.update(live, new)
        return live

    def _held(self, kind: str, elements: Any, live: Any, path: str) -> Any:
        if kind.startswith(DEFAULTDICT):
            if not isinstance(live, defaultdict):
                live = defaultdict(FACTORIES[int(kind.removeprefix(DEFAULTDICT))])
        elif live is MISSING or name_of(live) != kind:
            raise _not_made(path, kind)
        return self.value(elements, live, path)

    def _made(self, packed: Made, live: Any, path: str) -> Any:
        if live is MISSING or name_of(live) != packed.kind:
            kind = class_of(packed.kind)
            if kind is None:
                raise _not_made(path, packed.kind)
            live = object.__new__(kind)
        names = Names(live)
        now = names.read()
        values = packed.names.items()
        new = {n: self.value(v, now.get(n, MISSING), f"{path}.{n}") for n, v in values}
        names.write(new, drops=[name for name in now if name not in new])
        return live


def _not_made(path: str, kind: str = "") -> SessionError:
    what = f", a {kind.partition(':')[2]}," if kind else ""
    return SessionError(f"the script has not made {path.rpartition(':')[2]}{what} in this process")


def _sequence(packed: Any, live: Any, items: list[Any]) -> Any:
    """Return the sequence with these elements, if possible the live one of this process."""
    if isinstance(live, list) and isinstance(packed, list):
        live[:] = items
        return live
    if isinstance(packed, list | deque) and isinstance(live, deque):
        live.clear()
        live.extend(items)
        return live
    if isinstance(packed, deque):
        return deque(items, packed.maxlen)
    return type(packed)(*items) if hasattr(packed, "_fields") else type(packed)(items)
