"""Let the block of a `with` statement begin again.

Python allows a trace function to set `frame.f_lineno`: debuggers jump with it. A trace function
sees the next event of the frame, jumps, and gives tracing back to its former user.
"""

from __future__ import annotations

import ast
import dis
import linecache
import sys
import warnings
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from rekindle.errors import SessionError

_STATEMENT = (
    "there is no statement after `with session.step():` in its function, so the block could not "
    "begin again after a fault: put a statement after the block, such as `return loss`, and do "
    "not return inside the block"
)
_FIRST = (
    "the block of `with session.step():` could not begin again after a fault: make session.step() "
    "the first item of its `with` statement, and put no other `with` statement directly around it"
)
_ENTER = ("setup_with", "before_with")  # instructions that enter an item


class Repeat:
    """The `with` statement in which the script's code is, or was last.

    frame: its frame.
    """

    def __init__(self) -> None:
        self.frame: FrameType | None = None
        self._line = 0
        self._checked: set[tuple[CodeType, int]] = set()  # statements, by their lines

    def enter(self, frame: FrameType) -> bool:
        """Enter the statement of this frame, in its `__enter__`; True: for the first time.

        Raises SessionError: the block could not begin again, because of other items or statements.
        """
        self.frame, self._line = frame, frame.f_lineno
        if (frame.f_code, self._line) in self._checked:
            return False
        _check_place(frame)
        return True

    def check(self) -> None:
        """Check that the block could begin again. Call it in `__exit__`, after the first success.

        The next event of the frame then raises a SessionError if there is no line after the block.
        """
        frame = self._frame()
        site = frame.f_code, self._line

        def done(_: FrameType) -> None:
            self._checked.add(site)

        _at_next_line(frame, done, jumps=False)

    def again(self, before: Callable[[], None]) -> None:
        """Begin the block again. Call it in `__exit__`, which then returns True.

        before: is called before the jump, inside of the trace function; it may set variables.
        """
        frame, line = self._frame(), self._line

        def jump(here: FrameType) -> None:
            before()
            with warnings.catch_warnings():
                # Python 3.12 and later set variables without a value to None, with a warning.
                warnings.simplefilter("ignore", RuntimeWarning)
                try:
                    here.f_lineno = line  # type: ignore[misc]  # typeshed: it is read-only
                except ValueError as error:
                    raise SessionError(f"{_FIRST} ({error})") from error

        _at_next_line(frame, jump, jumps=True)

    def leave(self) -> None:
        """Forget the frame, which holds the variables of the script."""
        self.frame = None

    def _frame(self) -> FrameType:
        assert self.frame is not None
        return self.frame


def _at_next_line(frame: FrameType, do: Callable[[FrameType], None], *, jumps: bool) -> None:
    """Call a function at the next line of the frame, inside of a trace function.

    jumps: this line does not run. The frame raises SessionError if it ends before.
    """
    former, own = sys.gettrace(), frame.f_trace

    def trace(here: FrameType, event: str, argument: Any) -> Any:
        if event == "call":  # of a generator that continues
            return trace
        try:
            if event == "return":
                raise SessionError(_STATEMENT)
            if event == "line":
                do(here)
        finally:
            here.f_trace = own
            sys.settrace(former)
        return own(here, event, argument) if own is not None and not jumps else own

    frame.f_trace = trace
    sys.settrace(lambda *_: None)  # an event needs a function of the thread; it traces nothing


def _check_place(frame: FrameType) -> None:
    """Check the place of the `with` statement that the frame enters.

    Raises SessionError: other items are before this one, or another `with` statement ends with this
    one. At the next line, Python would still be inside of the items, or outside of the statement.
    """
    line, code = frame.f_lineno, frame.f_code
    lines = {start: number for start, _, number in code.co_lines()}
    here = None
    for each in dis.get_instructions(code):
        here = lines.get(each.offset, here)
        if each.opname.lower() in _ENTER and here == line and each.offset < frame.f_lasti:
            raise SessionError(_FIRST)
    source = "".join(linecache.getlines(code.co_filename, frame.f_globals))
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # the file has changed, or has no source
        return
    _check_statements(tree.body, line, ends=False)


def _check_statements(body: list[ast.stmt], line: int, *, ends: bool) -> None:
    """Check the statement with this line. ends: another statement ends after the last of `body`."""
    for number, each in enumerate(body):
        if not each.lineno <= line <= (each.end_lineno or each.lineno):
            continue
        last = number == len(body) - 1 and ends
        if isinstance(each, ast.With):
            spans = [(i.context_expr.lineno, i.context_expr.end_lineno) for i in each.items]
            inside = [first <= line <= (end or first) for first, end in spans]
            if any(inside) and (last or not inside[0]):
                raise SessionError(_FIRST)
        left = isinstance(each, ast.With | ast.ExceptHandler)
        stays = isinstance(each, ast.For | ast.While | ast.FunctionDef | ast.ClassDef)
        finishes = bool(getattr(each, "finalbody", []) or getattr(each, "orelse", []))
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(each, field, [])
            deeper = not stays and (left or (last and not (field == "body" and finishes)))
            if field in ("handlers", "cases"):
                for one in inner:
                    _check_statements(one.body, line, ends=field == "handlers" or last)
            else:
                _check_statements(inner, line, ends=deeper)
