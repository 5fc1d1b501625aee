"""Find the `rekindle` command lines of Markdown pages, and parse them with the real parser.

A page can have placeholders: words in capitals, [optional parts], alternatives such as
`status|stop`, and `...`. A placeholder counts as a value of the correct type.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator

from rekindle.cli.main import command_parser

_FENCE = re.compile(r"^(```+|~~~+)(\w*)[^\n]*\n(.*?)^\1", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:^|\n\n)((?:(?: {4}|\t)[^\n]*\n|\n)+)")
# `rekindle agent: ...` is the start of a message.
_INLINE = re.compile(r"(?<!`)`rekindle (?!(?:fork )?[\w-]+:)([^`]+)`")
# Variables can precede the command, as in a shell.
_COMMAND = re.compile(
    r"^\s*(\$ )?(?:\w+=(?:\$\([^)]*\)|\S*)\s+)*rekindle (?![\w-]+:)([a-z][^\n]*)", re.MULTILINE
)
_SHELLS = ("", "bash", "console", "sh", "shell", "text")
_ENDS = re.compile(r"\s(?:#|\||>|2>|&&|&|;)(?:\s|$).*|[;&]$")
_NOT_THERE = {"...", "options", "arguments", "args"}
_INCOMPLETE = "the following arguments are required"
_NO_VALUE = ": expected one argument"


def commands_of(page: str) -> Iterator[str]:
    """Yield the commands in the code blocks of a page, without the word `rekindle`."""
    blocks = [text for _, language, text in _FENCE.findall(page) if language in _SHELLS]
    blocks += _INDENTED.findall(_FENCE.sub("\n", page))
    for block in blocks:
        found = _COMMAND.findall(block.replace("\\\n", " "))
        prompts = any(prompt for prompt, _ in found)  # then other lines are output
        yield from (text for prompt, text in found if prompt or not prompts)


def named_in(page: str) -> Iterator[str]:
    """Yield the commands in the sentences of a page. They can lack required arguments."""
    for text in _INLINE.findall(_FENCE.sub("\n", page)):
        yield text.replace("\n", " ")


def check(command: str, *, partly: bool = False) -> None:
    """Parse a command. With `partly`, it can lack required arguments.

    Raises ValueError: the command is wrong.
    """
    words = shlex.split(_ENDS.sub("", command))
    words = [word.strip("[]") if word[:1] == "[" or word[-1:] == "]" else word for word in words]
    words = [word for word in words if word not in _NOT_THERE]
    for verb in words[0].split("|"):
        try:
            _parser(optional=False).parse_args([verb, *words[1:]])
        except SystemExit:
            continue  # from --version or --help; a parser error is a ValueError
        except ValueError as error:
            if not partly:
                raise
            if _INCOMPLETE in str(error):  # the second parse finds other errors
                _parser(optional=True).parse_args([verb, *words[1:]])
            elif words[-1] not in str(error) or not str(error).endswith(_NO_VALUE):
                raise


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise ValueError(f"{self.prog}: {message}")


def _parser(*, optional: bool) -> argparse.ArgumentParser:
    parser = command_parser()
    _adapt(parser, optional)
    return parser


def _adapt(parser: argparse.ArgumentParser, optional: bool) -> None:
    parser.__class__ = _Parser
    parser.allow_abbrev = False
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            action.required = action.required and not optional
            for each in action.choices.values():
                _adapt(each, optional)
            continue
        if action.choices or action.type in (int, float):
            action.type = _typed(action)
        if optional:
            action.required = False
            if not action.option_strings and action.nargs is None:
                action.nargs = "?"


def _typed(action: argparse.Action):  # type: ignore[no-untyped-def]
    kind, choices = action.type or str, list(action.choices or ())

    def read(text: str) -> object:
        if text.isupper() and choices:
            return choices[0]
        if choices and "|" in text and set(text.split("|")) <= set(choices):
            return choices[0]
        return 1 if text.isupper() else kind(text)  # type: ignore[operator]

    return read
