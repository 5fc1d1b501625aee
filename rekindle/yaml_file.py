"""Read a YAML file that a person writes: its value, and the line of each place in it.

The values are those of PyYAML's safe loader (YAML 1.1). This module refuses three things that
PyYAML accepts: a repeated key, a key that is not text, and aliases that stand for too many values.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from rekindle.errors import UsageError
from rekindle.user_file import Place, text_of

_MOST = 100_000  # values; an alias counts as all values that it stands for
_SHOWN = 40  # characters shown of a value that cannot be read
_TAG = "tag:yaml.org,2002:"
_MERGE = f"{_TAG}merge"
_SCALARS = [f"{_TAG}{name}" for name in ("null", "bool", "int", "float", "str", "timestamp")]


class Document:
    """The value of a file. kind: "job file", for messages. Raises UsageError: a wrong file."""

    def __init__(self, path: Path, kind: str) -> None:
        text = text_of(path, kind)
        self._path = path
        self._lines: dict[Place, int] = {}
        self._count = 0
        try:
            self._loader = yaml.SafeLoader(text)
            node = self._loader.get_single_node()
            self.value: Any = None if node is None else self._value(node, ())
        except yaml.reader.ReaderError as error:
            line = text.count("\n", 0, error.position) + 1
            problem = f"is not YAML: character {error.character:#04x} is not allowed"
            raise self._wrong(line, problem) from error
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            problem = f"is not YAML: {error.problem or error.context}"
            raise self._wrong(mark.line + 1 if mark else 0, problem) from error
        except RecursionError as error:
            raise self._wrong(0, "is nested too deeply, or an alias contains itself") from error

    def error(self, problem: object, place: Place = (), about: str = "") -> UsageError:
        """Make the error about a place, or about a key at it or below it that `about` names."""
        while place and place not in self._lines:
            place = place[:-1]
        named = [at for at in self._lines if at[: len(place)] == place and _names(about, at[-1])]
        # If `about` names several keys, the longest key counts; if a key has several places, the
        # outermost place counts.
        place = max(named, key=lambda at: (len(str(at[-1])), -len(at)), default=place)
        return self._wrong(self._lines.get(place, 0), str(problem))

    def _wrong(self, line: int, problem: str, place: Place = ()) -> UsageError:
        where = f"{self._path}:{line}" if line else str(self._path)
        key = f"{'.'.join(map(str, place))}: " if place else ""
        return UsageError(f"{where}: {key}{problem}")

    def _value(self, node: yaml.Node, place: Place) -> Any:
        line = node.start_mark.line + 1
        self._count += 1
        if self._count > _MOST:
            raise self._wrong(
                line, f"has more than {_MOST} values, with aliases expanded; use fewer", place
            )
        match node:
            case yaml.MappingNode(tag="tag:yaml.org,2002:map"):
                return self._mapping(node, place)
            case yaml.SequenceNode(tag="tag:yaml.org,2002:seq"):
                return [self._element(each, (*place, n)) for n, each in enumerate(node.value)]
            case yaml.ScalarNode() if node.tag in _SCALARS:
                try:
                    return self._loader.construct_object(node)
                except (ValueError, LookupError, AttributeError) as error:
                    # A number of too many digits, an invalid date, or `!!bool maybe`.
                    problem = f"{node.value[:_SHOWN]!r} cannot be read as a value: {error}"
                    raise self._wrong(line, problem, place) from error
        tag = node.tag.replace(_TAG, "!!")
        raise self._wrong(line, f"the type {tag} is unknown here; leave it out", place)

    def _element(self, node: yaml.Node, place: Place) -> Any:
        self._lines[place] = node.start_mark.line + 1
        return self._value(node, place)

    def _mapping(self, node: yaml.MappingNode, place: Place) -> dict[str, Any]:
        own = self._own(node, place)
        values: dict[str, Any] = {}
        if _MERGE in own:
            line, merged = own.pop(_MERGE)
            sources = merged.value if isinstance(merged, yaml.SequenceNode) else [merged]
            for source in reversed(sources):  # if two sources have a key, the first counts
                more = self._value(source, place)
                if not isinstance(more, dict):
                    raise self._wrong(line, "give a mapping to merge, or a list of them", place)
                values |= more
        for name, (line, value) in own.items():
            at = (*place, name)
            self._lines[at] = line
            values[name] = self._value(value, at)
        return values

    def _own(self, node: yaml.MappingNode, place: Place) -> dict[str, tuple[int, yaml.Node]]:
        """Return the nodes below a mapping's own keys, with the lines of the keys."""
        found: dict[str, tuple[int, yaml.Node]] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.tag not in (f"{_TAG}str", _MERGE):
                shown = repr(key.value) if isinstance(key, yaml.ScalarNode) else "a key"
                raise self._wrong(line, f"{shown} is not text; write it in quotes", place)
            name = _MERGE if key.tag == _MERGE else key.value
            if name in found:
                raise self._wrong(line, f"{key.value} occurs twice; keep one", place)
            found[name] = line, value
        return found


def _names(text: str, key: str | int) -> bool:
    pattern = rf"(?<![\w/-]){re.escape(str(key))}(?![\w/-])"
    return isinstance(key, str) and key in text and bool(re.search(pattern, text))
