"""The user's own file: it overrides the shipped tables, and each error names its line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from repository import ROOT

from rekindle.errors import UsageError
from rekindle.recovery.faults.fault import Exit, FaultKind
from rekindle.recovery.faults.tables.document import read
from rekindle.recovery.faults.tables.escalation import Change
from rekindle.recovery.faults.tables.tables import Tables
from rekindle.recovery.faults.tables.verdict import Blame, Urgency

FILE = """\
# Our own.
[[ascend]]
codes = ["0x80c98008", "80C98000"]  # known to pass here
level = "NotHandleFault"
says = "seen on every start, and harmless"

[[ascend]]
codes = ["8A000000-8A00000F"]
level = "SeparateNPU"
kind = "link"

[[xid]]
numbers = [79, 999]
level = "RESET_GPU"

[[text]]
patterns = ['Tokenizer server [^ ]{1,20} is gone', 'UCE ERROR']
kind = "transient"
counts = false
says = "our tokenizer server"
examples = ['Tokenizer server t1 is gone']

[[kernel]]
patterns = ['myraid: array degraded']
kind = "storage"
urgency = "later"
at_fault = "node"
says = "the array lost a disk"

[[exit]]
codes = [77, 137]
signals = ["SIGUSR1"]
kind = "transient"
says = "asks to be started again"

[[node_condition]]
conditions = ["MyGpuCheck"]
status = ["False", "Unknown"]
kind = "device"
at_fault = "node"
says = "our check failed"

[[pod_reason]]
reasons = ["OOMKilled"]
kind = "host-out-of-memory"
says = "killed for memory"

[[frequency]]
codes = ["80E01801"]
window_s = 60
times = 1
level = "PreSeparateNPU"

[[duration]]
codes = ["80C98000"]
after_s = 5
clear_after_s = 0
level = "RestartNPU"
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    return tmp_path / "own.toml"


def test_user_file_goes_before_the_shipped_tables(own: Path) -> None:
    """The user's entries extend or replace the shipped entries. All other entries stay."""
    own.write_text(FILE)
    tables = Tables.load(own)
    assert tables.ascend("80C98008").urgency is Urgency.NONE
    assert "harmless" in tables.ascend("80C98008").explanation
    assert tables.ascend("8a00000a").kind is FaultKind.LINK
    assert not tables.ascend("8A000010").listed
    assert tables.xid(79).at_fault is Blame.DEVICE
    assert tables.xid(999).listed
    assert tables.text("RuntimeError: Tokenizer server t9 is gone").kind is FaultKind.TRANSIENT
    assert not tables.text("UCE ERROR").counts
    assert tables.kernel_line("myraid: array degraded").kind is FaultKind.STORAGE
    assert tables.exit(Exit(code=137)).kind is FaultKind.TRANSIENT
    assert tables.exit(Exit(signal=10)).kind is FaultKind.TRANSIENT
    assert tables.node_condition("MyGpuCheck", "Unknown").at_fault is Blame.NODE
    assert not tables.pod_reason("OOMKilled").user_caused
    assert tables.escalated([Change("80E01801", 1)], 1)[0].level == "PreSeparateNPU"
    assert tables.escalated([Change("80C98000", 1)], 7)[0].level == "RestartNPU"
    shipped = Tables.load()
    assert tables.ascend("80E18402") == shipped.ascend("80E18402")
    assert shipped.ascend("80C98008").level == "RestartRequest"


MISTAKES = {
    # name: (file, line, words of the error)
    "unknown key": (
        '[[xid]]\nnumbers = [1]\nlevel = "IGNORE"\n\ncolour = 3',
        5, "unknown field `colour`; [[xid]] may have kind, urgency",
    ),
    "quoted key": ('[[xid]]\nnumbers = [1]\nlevel = "IGNORE"\n"a.b" = 3', 4, "unknown field `a.b`"),
    "key of another table": ('[[xid]]\ncodes = ["80C98002"]\nlevel = "IGNORE"', 2, "may have"),
    "missing key": ('\n[[xid]]\nlevel = "IGNORE"', 2, "missing required field `numbers`"),
    "unknown kind": (
        '[[exit]]\ncodes = [3]\nsays = "x"\nkind = "lunch"',
        4, "kind is 'lunch'; choose from process",
    ),
    "kind that looks like a place": (
        '[[exit]]\ncodes = [3]\nsays = "x"\nkind = "x - at `$.codes[7]`"',
        4, "kind is 'x - at `$.codes[7]`'; choose from process",
    ),
    "unknown urgency": (
        '[[exit]]\ncodes = [3]\nsays = "x"\nkind = "process"\nurgency = "urgent"', 5, "soon, now",
    ),
    "unknown level": ('[[ascend]]\ncodes = ["80C98002"]\nlevel = "Separate"', 3, "SeparateNPU"),
    "level of another source": ('[[xid]]\nnumbers = [1]\nlevel = "SeparateNPU"', 3, "RESET_GPU"),
    "unknown table": ('[[xid]]\nnumbers = [1]\nlevel = "IGNORE"\n[[xids]]', 4, "from ascend"),
    "levels are not the user's": ('[[level]]\nname = "x"', 1, "unknown table"),
    "code twice in an entry": (
        '[[ascend]]\nlevel = "RestartNPU"\ncodes = [\n  "80C98002",\n  # again\n  "0x80c98002",\n]',
        6, "'0x80c98002' is already in line 4",
    ),
    "code twice in a file": (
        '[[ascend]]\nlevel = "RestartNPU"\ncodes = ["80C98002"]\n'
        '[[ascend]]\nlevel = "RestartNPU"\ncodes = ["80C98001-80C98009"]',
        6, "already in line 3",
    ),
    "pattern twice": (
        '[[text]]\nkind = "link"\nsays = "x"\npatterns = ["a1", "a1"]',
        4, "'a1' is already in line 4",
    ),
    "malformed code": (
        '[[ascend]]\nlevel = "RestartNPU"\ncodes = [\n "80C98002",\n\n "80C9800G",\n]',
        6, "8 or 9 hex",
    ),
    "code as a number": (
        '[[ascend]]\nlevel = "RestartNPU"\ncodes = [81078603]',
        3, "codes: Expected `str`, got `int`",
    ),
    "range that ends before it begins": (
        '[[ascend]]\nlevel = "RestartNPU"\ncodes = ["80C98009-80C98002"]', 3, "not an Ascend code",
    ),
    "range without end": (
        '[[ascend]]\nlevel = "RestartNPU"\ncodes = ["00000000-FFFFFFFF"]', 3, "not an Ascend code",
    ),
    "no codes": (
        '[[ascend]]\nlevel = "RestartNPU"\ncodes = []',
        3, "codes is []: Expected `array` of length >= 1",
    ),
    "bad expression": (
        '[[text]]\nkind = "link"\nsays = "x"\npatterns = [\n "fine",\n "(", ]', 6, "invalid reg",
    ),
    "expression that finds all": (
        '[[text]]\nkind = "link"\nsays = "x"\npatterns = [".*"]', 4, "matches the empty text",
    ),
    "huge repetition": (
        '[[text]]\nkind = "link"\nsays = "x"\npatterns = ["a{99999999999}"]', 4, "invalid regular",
    ),
    "example that nothing finds": (
        '[[text]]\nkind = "link"\nsays = "x"\npatterns = ["a1"]\nexamples = [\n"a1",\n"b"]',
        7, "no pattern",
    ),
    "text for a list": (
        '[[ascend]]\nlevel = "RestartNPU"\ncodes = "80C98002"',
        3, "Expected `array`",
    ),
    "number for a text": ('[[ascend]]\nlevel = 4\ncodes = ["80C98002"]', 2, "Expected `str`"),
    "text for true": (
        '[[xid]]\nnumbers = [1]\nlevel = "IGNORE"\nreset_helps = "yes"', 4, "Expected `bool",
    ),
    "wrong type within a list": (
        '[[xid]]\nlevel = "IGNORE"\nnumbers = [\n1,\n"2"]',
        5, "Expected `int`",
    ),
    "xid below 1": (
        '[[xid]]\nlevel = "IGNORE"\nnumbers = [\n1,\n0]',
        5, "numbers has 0: Expected `int` >= 1; give at least one XID",
    ),
    "status above 255": ('[[exit]]\nkind = "process"\nsays = "x"\ncodes = [256]', 4, "0 to 255"),
    "unknown signal": (
        '[[exit]]\nkind = "process"\nsays = "x"\nsignals = ["KILL"]',
        4, "such as SIGTERM",
    ),
    "neither status nor signal": ('[[exit]]\nkind = "process"\nsays = "x"', 1, "give at least one"),
    "unknown status of a condition": (
        '[[node_condition]]\nconditions = ["A"]\nkind = "node"\nsays = "x"\nstatus = ["true"]',
        5, "True, False, Unknown",
    ),
    "user-caused, but the node is blamed": (
        '[[exit]]\ncodes = [3]\nkind = "user-code"\nsays = "x"\nat_fault = "node"',
        5, "at_fault: a fault that the user caused never isolates",
    ),
    "user code that no user caused": (
        '[[exit]]\ncodes = [3]\nkind = "user-code"\nsays = "x"\nuser_caused = false',
        5, "leave out user_caused",
    ),
    "eviction that counts": (
        '[[pod_reason]]\nreasons = ["A"]\nkind = "eviction"\nsays = "x"\ncounts = true',
        5, "never counts",
    ),
    "window too short": (
        '[[frequency]]\ncodes = ["80C98002"]\nlevel = "RestartNPU"\ntimes = 2\nwindow_s = 59',
        5, "window_s is 59: Expected `float` >= 60.0; give 60 to 864000 seconds",
    ),
    "window without end": (
        '[[frequency]]\ncodes = ["80C98002"]\nlevel = "RestartNPU"\ntimes = 2\nwindow_s = inf',
        5, "give 60 to 864000",
    ),
    "no number": (
        '[[frequency]]\ncodes = ["80C98002"]\nlevel = "RestartNPU"\ntimes = 2\nwindow_s = nan',
        5, "give 60 to 864000",
    ),
    "negative release": (
        '[[frequency]]\ncodes = ["80C98002"]\nlevel = "RestartNPU"\ntimes = 2\nwindow_s = 60\n'
        "release_s = -1",
        6, "release_s is -1: Expected `float` > 0.0; give more than 0, at most 1e9",
    ),
    "lasting too long": (
        '[[duration]]\ncodes = ["80C98002"]\nlevel = "RestartNPU"\nclear_after_s = 1\n'
        "after_s = 601",
        5, "give 0 to 600",
    ),
    "no TOML": ('[[xid]]\nnumbers = [1]\nlevel = IGNORE\n', 3, "invalid TOML"),
    "key twice": ('[[xid]]\nnumbers = [1]\n\nnumbers = [2]\n', 4, "invalid TOML"),
    "string without end": ('[[xid]]\nlevel = """\n\n', 2, "invalid TOML"),
    "array without end": ('[[xid]]\nnumbers = [1,\n2,\n', 3, "invalid TOML"),
    "too many digits": (f"[[xid]]\n\nnumbers = [{'9' * 5000}]\n", 3, "invalid TOML"),
    "outside of a table": ('# x\n\nnumbers = [1]\n[[xid]]', 3, "'numbers' is outside of an entry"),
    "table within a line": (
        'xid = [{ numbers = [1], level = "IGNORE" }]',
        1, "outside of an entry",
    ),
    "single brackets": ('\n[xid]\nnumbers = [1]', 2, "does not begin an entry; write [[table]]"),
    "table below a table": (
        '[[xid]]\nnumbers = [1]\nlevel = "IGNORE"\n[xid.more]\na = 1', 4, "does not begin an entry",
    ),
    "behind a string that looks like entries": (
        '[[exit]]\ncodes = [3]\nkind = "process"\nsays = """\n[[xid]]\ncodes = [9]\n'
        'kind = "lunch"\n"""\n# kind = "lunch"\n[[exit]]\ncodes = [4]\n# kind =\nkind = "lunch"\n'
        'says = "x"',
        13, "'lunch'",
    ),
    "behind an array that looks like entries": (
        '[[text]]\nsays = "x"\nkind = "link"\npatterns = [\n  """\n[xid]""",\n  "b",\n]\n'
        "[[xid]]\nnumbers = [\n  1,\n# 2,\n\n  -2,\n]\nlevel = 'IGNORE'",
        14, "numbers has -2: Expected `int` >= 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "line", "words"), MISTAKES.values(), ids=MISTAKES)
@pytest.mark.parametrize("ending", ["\n", "\r\n"], ids=["unix", "windows"])
def test_mistake_is_refused_with_its_line(
    own: Path, text: str, line: int, words: str, ending: str
) -> None:
    """The error names the file, the line and the mistake."""
    own.write_bytes(text.replace("\n", ending).encode())
    with pytest.raises(UsageError) as caught:
        Tables.load(own)
    assert str(caught.value).startswith(f"{own}:{line}: ")
    assert words in str(caught.value)


def test_file_that_is_missing(tmp_path: Path) -> None:
    """If the path does not exist or is a folder, the error states that it cannot be read."""
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(UsageError, match=rf"^{re.escape(str(path))}: cannot be read"):
            Tables.load(path)


def test_file_that_is_not_utf8(own: Path) -> None:
    """The error names the line of the first byte that is not UTF-8."""
    own.write_bytes(b"# fine\n\n# caf\xe9\n")
    with pytest.raises(UsageError, match=":3: not UTF-8"):
        Tables.load(own)


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing yet\n"])
def test_empty_file(own: Path, text: str) -> None:
    """A file without entries changes nothing."""
    own.write_text(text)
    assert Tables.load(own).ascend("80C98002") == Tables.load().ascend("80C98002")


FILLERS = st.lists(
    st.sampled_from(
        ["", "# [[xid]]", "#", "  ", "notes = '''\n[[xid]]\n'''", 'more = """\nbad = 1\n\n"""',
         "list = [\n[1],\n]"]
    ),
    unique_by=lambda filler: filler.split(" = ")[0] if " = " in filler else object(),
    max_size=5,
)  # fmt: skip


@given(st.lists(FILLERS, min_size=1, max_size=6), st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_lines_are_right_whatever_stands_between(
    own: Path, entries: list[list[str]], data: st.DataObject
) -> None:
    """Comments, blank lines, and long strings and arrays do not shift a line number."""
    lines: list[str] = []
    headers, keys, elements = [], [], []
    for fillers in entries:
        headers.append(len(lines) + 1)
        lines.append(data.draw(st.sampled_from(["[[xid]]", "  [[ xid ]]  # one"])))
        for filler in fillers:
            lines += filler.split("\n")
        keys.append(len(lines) + 1)
        lines += ["bad = [", "  1,", "  # 2", ""]
        elements.append(len(lines) + 1)
        lines += ["  3 ]"]
    own.write_text("\n".join(lines))
    found = read(own)
    assert [entry.line for entry in found] == headers
    assert [entry.line_of("bad") for entry in found] == keys
    assert [entry.line_of("bad", 1) for entry in found] == elements


PIECES = st.sampled_from(
    ["[[xid]]", "[[text]]", "[", "]", "numbers = ", "1", "level = ", '"IGNORE"', '"""', "'", "\n",
     "#", "patterns = ", "(", "kind = ", '"link"', "says", " ", "=", ",", "\\", "\x00", "ü", "{"]
)  # fmt: skip


@given(st.lists(PIECES, max_size=40).map("".join) | st.text(max_size=200) | st.binary(max_size=200))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_file_is_taken_or_refused(own: Path, content: str | bytes) -> None:
    """Any file is either used or refused with one of its line numbers."""
    raw = content if isinstance(content, bytes) else content.encode(errors="surrogatepass")
    own.write_bytes(raw)
    try:
        Tables.load(own)
    except UsageError as error:
        place = re.match(rf"{re.escape(str(own))}:(\d+): .", str(error))
        assert place
        assert 1 <= int(place[1]) <= raw.count(b"\n") + 1


def test_deep_nesting_is_refused(own: Path) -> None:
    """Brackets that are nested too deeply are an error of the file."""
    own.write_text("[[xid]]\n\nnumbers = " + "[" * 100_000)
    with pytest.raises(UsageError, match=":3: invalid "):
        Tables.load(own)


def test_example_of_the_documentation(own: Path) -> None:
    """The example file of the documentation is valid."""
    page = ROOT / "docs" / "recover" / "faults.md"
    own.write_text(page.read_text().split("```toml\n")[1].split("```")[0])
    assert Tables.load(own).exit(Exit(code=77)).kind is FaultKind.TRANSIENT
