"""The table of tried scripts in docs/train/scripts.md. It follows from the table of their tests."""

from __future__ import annotations

from habits.table import HABITS, Outcome
from repository import ROOT

from reference_tables.markdown import code, table

PATH = "../train/scripts.md"  # from the folder of the reference pages
_BEGIN = "<!-- `make reference` writes this table from tests/support/habits/table.py. -->\n"
_END = "<!-- the end of the table -->"
_NAMES = {
    Outcome.EXACT: "exact",
    Outcome.REPEATS: "repeats steps",
    Outcome.REFUSED: "refused",
}


def scripts() -> str:
    """Return the page with its present text and a new table."""
    text = (ROOT / "docs" / "train" / "scripts.md").read_text()
    head, rest = text.split(_BEGIN)
    tail = rest.split(_END, 1)[1]
    rows = [
        (habit.row, _NAMES[habit.outcome], _advice(habit.do, habit.options), code(habit.name))
        for habit in HABITS
    ]
    heads = ("my script has", "class", "what to do", "script of the test")
    return f"{head}{_BEGIN}\n{table(heads, rows)}\n\n{_END}{tail}"


def _advice(do: str, options: tuple[str, ...]) -> str:
    given = f"tried with {code(' '.join(options))}" if options else ""
    return "; ".join(filter(None, (do, given))) or "nothing"
