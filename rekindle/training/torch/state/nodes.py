"""The nodes of a skeleton, the parts of states without a node, and the interfaces of a skeleton."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

import torch

from rekindle.errors import SessionError

Node: TypeAlias = Any  # a JSON value


@dataclasses.dataclass(slots=True)
class LiveParts:
    """Parts of live states that no file contains: classes by name, functions by place.

    classes: Enums, named tuples, subclasses of Tensor. factories: the functions of defaultdicts.
    """

    classes: dict[str, type] = dataclasses.field(default_factory=dict)
    factories: dict[str, Any] = dataclasses.field(default_factory=dict)

    def note(self, kind: type) -> str:
        """Keep a class; return its name for the file."""
        name = f"{kind.__module__}:{kind.__qualname__}"
        self.classes[name] = kind
        return name

    def find(self, name: str, fits: Callable[[type], bool]) -> Any:
        """Return the class of this name. Raises SessionError: the process has no such class.

        fits: checks the kind of the class, because a file may name any class.
        """
        found: Any = self.classes.get(name)
        if found is None:
            module, _, path = name.partition(":")
            found = sys.modules.get(module)
            for part in path.split("."):
                found = vars(found).get(part) if hasattr(found, "__dict__") else None
        if not isinstance(found, type) or not fits(found):
            raise SessionError(
                f"the state has a value of class {name}, which this process has not loaded as "
                "such a class: define or import it before the Session, under the same name"
            )
        return found


class NodeWriter(Protocol):
    """Turns values into nodes. tensors: those that it has collected, by name."""

    tensors: dict[str, torch.Tensor]
    live: LiveParts

    def encode(self, value: Any, path: str) -> Node:
        """Return a value's node. Raises SessionError: a state cannot hold it; names its place."""

    def pairs(self, value: Mapping[Any, Any], path: str) -> list[Node]:
        """Return the nodes of a mapping's keys and values, in their order."""


class NodeReader(Protocol):
    """Turns nodes into values. live: None: the program is not the training script."""

    live: LiveParts | None

    def decode(self, node: Node) -> Any:
        """Return the value of a node."""
