"""Read the hops of a fault from a table in docs/architecture.md, and compare them with a trace."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from traced.fault import Call

# | 9 | 6, 8 | coordinator | `recovery/policy/plan.py:make_plan` | (`Formed`) | `FormGeneration` |
_ROW = re.compile(r"^\| (\d+) \|" + 5 * r" ([^|]*)\|", re.M)
_FUNCTION = re.compile(r"`([\w/]+\.py):([\w.]+)`")
_BEGINNING = 0.0


@dataclass(frozen=True)
class Hop:
    """One row of the table.

    `functions`: (file, name) in the order of their calls.
    `after`: numbers of earlier hops.
    `any_of`: True: one of the earlier hops must precede this hop; False: all of them must.
    `events`: names of the events that the process writes to the journal.
    `messages`: names of the messages that the process sends.
    """

    number: int
    after: tuple[int, ...]
    any_of: bool
    process: str
    functions: tuple[tuple[str, str], ...]
    events: tuple[str, ...] = ()
    messages: tuple[str, ...] = ()


def hops_of(page: str) -> list[Hop]:
    """Return the hops in the table of a page."""
    found = []
    for number, after, process, functions, text, message in _ROW.findall(page):
        hop = Hop(
            number=int(number),
            after=tuple(int(each) for each in re.findall(r"\d+", after)),
            any_of=" or " in after,
            process=process.strip(),
            functions=tuple(_FUNCTION.findall(functions)),
            events=tuple(re.findall(r"\(`(\w+)`\)", text)),
            messages=tuple(re.findall(r"`(\w+)`", message)),
        )
        found.append(hop)
    return found


def missing(
    hops: Iterable[Hop],
    calls: Iterable[Call],
    processes: Mapping[str, Iterable[int]],
    line_of: Callable[[str, str], frozenset[int]],
) -> list[str]:
    """Return the calls that a trace lacks.

    Each process of a hop must call the functions of the hop in this order. A process that took part
    in an earlier hop continues after its own part. After a hop of other processes it continues when
    all of them have done their parts.

    `line_of`: the lines where a function can begin in the trace.
    """
    in_order = sorted(calls, key=lambda call: call.at)
    ends: dict[int, dict[int, float]] = {}  # by hop and process: the time of the last function
    lacks = []
    for hop in hops:
        ends[hop.number] = {}
        for pid in processes[hop.process]:
            at = _begin(hop, pid, ends)
            for file, name in hop.functions:
                lines = line_of(file, name)
                same = (c for c in in_order if c.pid == pid and c.file == file and c.line in lines)
                call = next((each for each in same if each.at >= at), None)
                if call is None:
                    lacks.append(f"hop {hop.number}: {hop.process} {pid} calls no {file}:{name}")
                    break
                at = call.at
            ends[hop.number][pid] = at
    return lacks


def _begin(hop: Hop, pid: int, ends: Mapping[int, Mapping[int, float]]) -> float:
    """Return the time after which a process does its part of a hop."""
    choose = min if hop.any_of else max
    times = (
        ends[before].get(pid, choose(ends[before].values(), default=_BEGINNING))
        for before in hop.after
    )
    return choose(times, default=_BEGINNING)
