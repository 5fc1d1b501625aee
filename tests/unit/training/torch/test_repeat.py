"""A block of a `with` statement begins again after a fault: its line, and the variables."""

from __future__ import annotations

import contextlib
import sys
import textwrap
from collections import Counter, deque
from collections.abc import Callable, Iterator
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

from rekindle.errors import SessionError
from rekindle.training.torch.repeat import Repeat
from rekindle.training.torch.state.script_names import SMALL_BYTES
from rekindle.training.torch.state.script_values import Blocks as Values

pytestmark = pytest.mark.usefixtures("only_this_module")

BLOCKS = 6


class FaultError(Exception):
    """A fault of the first try of each odd block."""


class Blocks:
    """A Session's blocks without a Session. tries: the blocks that began, in order."""

    def __init__(self) -> None:
        self.tries: list[int] = []
        self._repeat = Repeat()
        self._values = Values([self])
        self._first = False

    def __enter__(self) -> Blocks:
        frame = sys._getframe(1)
        self._first = self._repeat.enter(frame)
        self._values.keep(frame)
        return self

    def work(self, number: int) -> None:
        """Do the work of a block, or break."""
        self.tries.append(number)
        if number % 2 and self.tries.count(number) < 3:
            raise FaultError

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if isinstance(error, FaultError):
            self._repeat.again(self._values.restore)
            return True
        if error is None:
            self._values.check()
            if self._first:
                self._repeat.check()
        return False


@pytest.fixture
def blocks() -> Iterator[Blocks]:
    """Return blocks whose odd ones break twice."""
    former = sys.gettrace()
    yield Blocks()
    assert sys.gettrace() is former


EXPECTED = [0, 1, 1, 1, 2, 3, 3, 3, 4, 5, 5, 5]


def _plain(blocks: Blocks, log: list[Any]) -> None:
    for number in range(BLOCKS):
        log.append(("before", number))
        with blocks:
            blocks.work(number)
        log.append(("after", number))


def _two_items(blocks: Blocks, log: list[Any]) -> None:
    for number in range(BLOCKS):
        log.append(("before", number))
        with blocks, contextlib.nullcontext():
            blocks.work(number)
        log.append(("after", number))


def _nested(blocks: Blocks, log: list[Any]) -> None:
    for number in range(BLOCKS):
        try:
            with contextlib.nullcontext():
                log.append(("before", number))
                with blocks:
                    blocks.work(number)
                log.append(("inside", number))
        finally:
            log.remove(("inside", number))
            log.append(("after", number))


def _function(blocks: Blocks, log: list[Any]) -> None:
    def train(number: int) -> int:
        log.append(("before", number))
        with blocks:
            blocks.work(number)
        return number

    for number in range(BLOCKS):
        log.append(("after", train(number)))


def _generator(blocks: Blocks, log: list[Any]) -> None:
    def numbers() -> Iterator[int]:
        for number in range(BLOCKS):
            log.append(("before", number))
            with blocks:
                blocks.work(number)
            yield number

    log.extend(("after", number) for number in numbers())


def _last_in_loop(blocks: Blocks, log: list[Any]) -> None:
    number = -1
    while number < BLOCKS - 1:
        if number >= 0:
            log.append(("after", number))
        number += 1
        log.append(("before", number))
        with blocks:
            blocks.work(number)
            if number % 2 == 0:
                continue
    log.append(("after", number))


def _one_line(blocks: Blocks, log: list[Any]) -> None:
    for number in range(BLOCKS):
        log.append(("before", number))
        with blocks: blocks.work(number)  # noqa: E701  # fmt: skip
        log.append(("after", number))


@pytest.mark.parametrize(
    "loop",
    [_plain, _two_items, _nested, _function, _generator, _last_in_loop, _one_line],
    ids=lambda each: each.__name__,
)
def test_only_the_broken_block_begins_again(
    blocks: Blocks, loop: Callable[[Blocks, list[Any]], None]
) -> None:
    """Code before and after the block runs once, in the order of the loop."""
    log: list[Any] = []
    loop(blocks, log)
    assert blocks.tries == EXPECTED
    once = [(when, number) for number in range(BLOCKS) for when in ("before", "after")]
    # The list is a variable of this frame's caller, and no block changes it.
    assert log == once


def test_a_block_at_the_top_of_a_module_begins_again(blocks: Blocks) -> None:
    """The variables of a module are global."""
    text = textwrap.dedent("""
        total = 0
        for number in range(6):
            with blocks:
                total += number
                blocks.work(number)
    """)
    space: dict[str, Any] = {"blocks": blocks, "__name__": "script"}
    exec(compile(text, "script.py", "exec"), space)
    assert blocks.tries == EXPECTED
    assert space["total"] == sum(range(BLOCKS))


def _ends_with_its_block(blocks: Blocks, number: int) -> None:
    with blocks:
        blocks.work(number)


def _returns_inside(blocks: Blocks, number: int) -> int:
    with blocks:
        blocks.work(number)
        return number


@pytest.mark.parametrize("function", [_ends_with_its_block, _returns_inside])
def test_a_function_without_a_line_after_its_block_is_refused(
    blocks: Blocks, function: Callable[[Blocks, int], object]
) -> None:
    """The first block shows it, without a fault."""
    with pytest.raises(SessionError, match="put a statement after the block"):
        function(blocks, 0)


def _not_first(blocks: Blocks) -> None:
    with contextlib.nullcontext(), blocks:
        blocks.work(0)


def _on_a_later_line(blocks: Blocks) -> None:
    with (
        contextlib.nullcontext() as _,
        blocks,
    ):
        blocks.work(0)


def _ends_another(blocks: Blocks) -> None:
    with contextlib.nullcontext():
        if blocks:
            with blocks:
                blocks.work(0)
    blocks.work(0)


@pytest.mark.parametrize("function", [_not_first, _on_a_later_line, _ends_another])
def test_a_block_inside_of_another_item_is_refused(
    blocks: Blocks, function: Callable[[Blocks], object]
) -> None:
    """At the next line Python would still be inside of the other item, or outside of it."""
    with pytest.raises(SessionError, match="first item of its `with` statement"):
        function(blocks)
    assert not blocks.tries


class Meter:
    """An object of a script, without methods for its state."""

    def __init__(self) -> None:
        self.total, self.seen = 0.0, []  # type: float, list[int]
        self.counts: Counter[int] = Counter()


def test_variables_and_their_contents_return(blocks: Blocks) -> None:
    """After all repetitions, sums, lists and objects have each block once."""
    total, seen, unbound = 0, [], None
    recent: deque[int] = deque(maxlen=3)
    meter, sums = Meter(), torch.zeros(2)
    by_name = {"meter": meter}
    nested = SimpleNamespace(value=torch.zeros(1))
    for number in range(BLOCKS):
        value = number
        with blocks:
            value = value + 100
            total += value
            seen.append(number)
            recent.append(number)
            meter.total += number
            meter.seen.append(number)
            meter.counts[number] += 1
            sums[0] += number
            by_name["last"] = meter
            nested.value = nested.value + number
            unbound = torch.ones(1, requires_grad=True) * 2
            blocks.work(number)
        assert value == number + 100
    numbers = list(range(BLOCKS))
    assert (total, seen, list(recent)) == (sum(numbers) + 100 * BLOCKS, numbers, numbers[-3:])
    assert (meter.total, meter.seen) == (sum(numbers), numbers)
    assert meter.counts == Counter(numbers)
    assert sums.tolist() == [sum(numbers), 0]
    assert nested.value.item() == sum(numbers)
    assert unbound is not None
    assert set(by_name) == {"meter", "last"}


def test_a_large_tensor_that_a_block_changes_in_place_is_refused(blocks: Blocks) -> None:
    """The text names the tensor."""

    def train(batch: dict[str, torch.Tensor]) -> None:
        for number in range(BLOCKS):
            with blocks:
                batch["inputs"].add_(1)
                blocks.work(number)

    with pytest.raises(SessionError, match=r"changes batch.inputs in place"):
        train({"inputs": torch.zeros(SMALL_BYTES)})


def test_a_former_trace_function_traces_on(blocks: Blocks) -> None:
    """A debugger sees the lines after the jump."""
    lines: list[int] = []

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code is _plain.__code__ and event == "line":
            lines.append(frame.f_lineno - frame.f_code.co_firstlineno)
        return trace

    former = sys.gettrace()
    sys.settrace(trace)
    try:
        _plain(blocks, [])
    finally:
        sys.settrace(former)
    assert blocks.tries == EXPECTED
    assert lines.count(5) == BLOCKS  # the line after the block
