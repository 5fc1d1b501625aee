"""Every option of the command line, from its parsers."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

from reference_tables.markdown import code, codes, page, sentence, table
from rekindle.cli.main import command_parser

# The metavar of a number is its unit.
UNITS = {
    "CHECKPOINTS": "checkpoints",
    "DAYS": "days",
    "DEVICE": "device number on the node",
    "DEVICES": "devices",
    "FACTOR": "times",
    "HOURS": "hours",
    "INCIDENT": "incident number",
    "NODE": "node rank",
    "NODES": "nodes",
    "PORT": "TCP port",
    "RANK": "rank",
    "RANKS": "ranks",
    "RESTARTS": "restarts",
    "RUNS": "runs",
    "SECONDS": "seconds",
    "SEED": "",
    "STEP": "steps",
    "STEPS": "steps",
}
_DEFAULT = re.compile(r"[;,]? ?\(?\bdefault: ([^;)]*)\)?")
IGNORED = "accepted for compatibility with torchrun, without effect"


def parsers(
    parser: argparse.ArgumentParser, name: str = "rekindle"
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield each command that does something, with its parser."""
    nested = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not nested:
        yield name, parser
    for action in nested:
        for word, each in action.choices.items():
            yield from parsers(each, f"{name} {word}")


def commands() -> str:
    """Return the page of all commands and options."""
    parts = [
        "Each command prints its options with `--help`. An option of `rekindle run` may have "
        "dashes or underscores (`--max-restarts`, `--max_restarts`). "
        "[Exit statuses](exit-statuses.md) are on a page of their own.",
        "The column Unit has the unit of a number. A default of *none* means that the option has "
        "no value without it.",
    ]
    for name, parser in parsers(command_parser()):
        parts += [f"## {name}", sentence(parser.description or "")]
        parts += [f"```text\n{_usage(parser)}\n```"]
        rows = [_row(action) for action in _shown(parser)]
        if rows:
            heads = ("Argument or option", "Type", "Unit", "Default", "Meaning")
            parts += [table(heads, rows)]
        ignored = _groups(parser, IGNORED)
        if ignored:
            options = codes(each.option_strings[0] for each in ignored)
            parts += [f"Options of torchrun that the command accepts and ignores: {options}."]
    return page("Commands and options", *parts)


def _usage(parser: argparse.ArgumentParser) -> str:
    words = [parser.prog]
    words += ["[options]"] if any(each.option_strings for each in _shown(parser)) else []
    for action in parser._actions:
        if action.required and action.option_strings:
            words.append(f"{action.option_strings[0]} {_value(action)}")
    words += [
        {
            "?": f"[{_value(a)}]",
            "*": f"[{_value(a)} ...]",
            argparse.REMAINDER: "[ARGUMENT ...]",
        }.get(a.nargs, _value(a))
        for a in parser._actions
        if not a.option_strings
    ]
    return " ".join(words)


def _groups(parser: argparse.ArgumentParser, title: str) -> list[argparse.Action]:
    return [
        action
        for group in parser._action_groups
        if group.title == title
        for action in group._group_actions
    ]


def _shown(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    hidden = _groups(parser, IGNORED)
    return [
        each
        for each in parser._actions
        if each not in hidden and not isinstance(each, argparse._HelpAction)
    ]


def _row(action: argparse.Action) -> tuple[str, ...]:
    text = action.help or ""
    found = _DEFAULT.search(text)
    meaning = _DEFAULT.sub("", text).strip() if found else text
    return (_name(action), _type(action), unit(action), _default(action, found), sentence(meaning))


def _name(action: argparse.Action) -> str:
    if not action.option_strings:
        return code(_value(action))
    # The spelling with underscores is left out; the page has a sentence about it.
    dashed = [each for each in action.option_strings if "_" not in each]
    return codes(dashed)


def _value(action: argparse.Action) -> str:
    if action.metavar:
        return str(action.metavar)
    if action.choices:
        return "|".join(map(str, action.choices))
    return action.dest.upper()


def _type(action: argparse.Action) -> str:
    if action.nargs == 0:
        return "flag"
    if action.choices:
        return "one of " + codes(action.choices)
    kind = {int: "integer", float: "number"}.get(action.type, "text")
    several = isinstance(action, argparse._AppendAction) or action.nargs in ("*", "...")
    value = f" {code(_value(action))}" if action.option_strings else ""
    return f"{kind}{value}{', several' if several else ''}"


def unit(action: argparse.Action) -> str:
    """Return the unit of a number. Raises ValueError: its metavar is no unit."""
    if action.type not in (int, float):
        return UNITS[str(action.metavar)] if action.metavar in ("STEPS", "NODES", "RANKS") else ""
    if str(action.metavar) not in UNITS:
        names = "/".join(action.option_strings) or action.dest
        raise ValueError(
            f"{names}: its metavar is {action.metavar}, and no unit of {sorted(UNITS)}"
        )
    return UNITS[str(action.metavar)]


def _default(action: argparse.Action, said: re.Match[str] | None) -> str:
    if action.required and action.option_strings:
        return "required"
    if not action.option_strings and action.nargs not in ("?", "*", argparse.REMAINDER):
        return "required"
    if said:
        text = said[1].strip()
        return code(text) if text == str(action.default) else text
    if action.nargs == 0:
        return "off"
    if action.default in (None, "", [], argparse.SUPPRESS):
        return "none"
    return code(action.default)
