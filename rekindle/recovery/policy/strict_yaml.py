"""YAML as a person writes it: every key is a text and stands once, and its line is known."""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

_SHOWN = 40  # characters of a value that cannot be read


class Refused(Exception):
    """What cannot be read; line: where, from 1; 0: nobody knows."""

    def __init__(self, text: str, line: int = 0) -> None:
        super().__init__(text)
        self.line = line


class Document:
    """What a text says. Raises Refused."""

    def __init__(self, text: str) -> None:
        loader = _Loader(text)
        try:
            self.value: Any = loader.get_single_data()
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            said = error.problem or error.context
            raise Refused(f"is no YAML: {said}", mark.line + 1 if mark else 0) from error
        except yaml.YAMLError as error:
            raise Refused(f"is no YAML: {error}") from error
        except RecursionError as error:
            raise Refused("is nested too deeply to be meant so") from error
        finally:
            loader.dispose()
        self._lines = loader.lines

    def line_of(self, message: str) -> int:
        """Return the line of the key that a message is about: the longest that it names; or 0."""
        named = [key for key in self._lines if _names(message, key)]
        return self._lines[max(named, key=len)] if named else 0


def _names(message: str, key: str) -> bool:
    return bool(re.search(rf"(?<![\w/-]){re.escape(key)}(?![\w/-])", message))


class _Loader(yaml.SafeLoader):
    """PyYAML takes the last of two equal keys, and lets errors of values through as they are."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lines: dict[str, int] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        own: set[str] = set()
        for key_node, _ in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            if key_node.tag != "tag:yaml.org,2002:str":
                said = getattr(key_node, "value", None)
                what = repr(said) if isinstance(said, str) else "what stands before the colon"
                raise Refused(f"{what} is no text, as a key has to be: write it in quotes", line)
            if key_node.value in own:
                raise Refused(f"{key_node.value} is given twice; keep one", line)
            own.add(key_node.value)
            self.lines.setdefault(key_node.value, line)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except ValueError as error:  # a number of many digits, a date that is none
            shown = str(node.value)[:_SHOWN]
            text = f"{shown!r} cannot be read as a value: {error}"
            raise Refused(text, node.start_mark.line + 1) from error
