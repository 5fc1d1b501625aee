"""The parts of the machine: their dependencies, the order of phases, and the message handlers."""

from __future__ import annotations

import ast
import collections.abc
import inspect
import typing
from pathlib import Path

import pytest
from jobs.driver import Driver

from rekindle.coordinator.machine import job_state, machine
from rekindle.coordinator.machine.job_state import NEXT, JobState, Phase
from rekindle.protocol import agent as p


def parts() -> dict[str, type]:
    """Return the parts in the order in which the machine builds them."""
    built = Driver().machine
    assigned = [
        target.attr
        for node in ast.walk(ast.parse(inspect.getsource(machine)))
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        for target in node.targets
        if isinstance(target, ast.Attribute) and not target.attr.startswith("_")
    ]
    return {name: type(getattr(built, name)) for name in assigned}


def hints_of(part: type) -> dict[str, object]:
    """Return the types of a constructor's arguments."""
    hints = typing.get_type_hints(part.__init__)
    return {name: kind for name, kind in hints.items() if name != "return"}


def has_callable(kind: object) -> bool:
    """Return whether a type is a callable, or contains one, as `Callable | None`."""
    origin = typing.get_origin(kind)
    return collections.abc.Callable in (kind, origin) or any(
        map(has_callable, typing.get_args(kind))
    )


@pytest.mark.parametrize(
    ("kind", "is_one"),
    [
        (collections.abc.Callable[[int], None], True),
        (typing.Callable[[int], None] | None, True),
        (list[collections.abc.Callable[[], None]], True),
        (dict[str, int], False),
        (JobState, False),
    ],
)
def test_the_check_recognises_a_callable(kind: object, is_one: bool) -> None:
    """The check of constructors sees callables in all spellings."""
    assert has_callable(kind) is is_one


def test_a_part_takes_only_parts_before_it() -> None:
    """A constructor takes the job's state, earlier parts, and the two calls that lead upward."""
    found = parts()
    assert next(iter(found)) == "job"
    assert len(found) > 10
    upward = {"report": job_state.Report, "proceed": job_state.Proceed}
    for place, (name, part) in enumerate(found.items()):
        before = [*found.values()][:place]
        for argument, kind in hints_of(part).items() if part is not JobState else ():
            if kind in found.values():
                assert kind in before, f"{name} takes {argument}, which is built later"
            elif argument in upward:
                assert kind == upward[argument]
            else:
                assert not has_callable(kind), f"{name} takes {argument}"


def test_no_part_inherits() -> None:
    """Each part is a class without a base class."""
    assert all(part.__bases__ == (object,) for part in parts().values())


def test_each_message_has_a_handler() -> None:
    """Each message of an agent has a handler, except the messages that any agent may send."""
    handled = set(Driver().machine._handlers)
    assert handled == set(typing.get_args(p.FromAgent)) - set(machine.OF_ANY_AGENT)


def test_the_machine_makes_no_message_of_an_agent() -> None:
    """A message of an agent in the machine always comes from an agent."""
    from_agent = {kind.__name__ for kind in typing.get_args(p.FromAgent)}
    files = sorted(Path(machine.__file__).parent.glob("*.py"))
    made = [
        f"{file.name}:{node.lineno}"
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
        and (getattr(node.func, "attr", "") or getattr(node.func, "id", "")) in from_agent
    ]
    assert len(files) > 15
    assert not made


def test_a_message_that_is_not_about_checkpoints() -> None:
    """The handler of messages about checkpoints refuses other messages."""
    with pytest.raises(AssertionError, match="Heartbeat is no message about checkpoints"):
        Driver().machine.endings.on_store_news(0, p.Heartbeat(finished={}, total=0), 0.0)


@pytest.mark.parametrize("phase", Phase)
def test_phases_that_follow(phase: Phase) -> None:
    """The job enters only the phases that the table allows."""
    for other in Phase:
        job = Driver().machine.job
        job.phase = phase
        if other in NEXT[phase]:
            job.enter(other)
            assert job.phase is other
        else:
            with pytest.raises(AssertionError, match=f"{phase.value} is not followed by"):
                job.enter(other)
