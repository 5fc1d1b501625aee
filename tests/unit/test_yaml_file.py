"""The values of a YAML file, and the one-line error for a mistake."""

from __future__ import annotations

import contextlib
import datetime as dt
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rekindle.errors import UsageError
from rekindle.yaml_file import Document

UTC = dt.timezone.utc
# Values of YAML 1.1 as PyYAML reads it. Most of them differ in YAML 1.2.
SCALARS = [
    (True, "yes Yes YES on On ON true True TRUE"),
    (False, "no No NO off Off OFF false False FALSE"),
    (None, "~ null Null NULL"),
    (8, "010 0b1000 0x8 +8 !!int '8'"),
    (-15, "-0xf -017 -15"),
    (1000, "1_000"),
    (5400, "1:30:00"),
    (11420, "3:10:20"),
    (90.5, "1:30.5"),
    (1000.0, "1.0e+3 1.e+3 1_000."),
    (0.25, "0.25 .25 25.0e-2"),
    (float("inf"), ".inf +.inf .INF"),
    (dt.date(2024, 1, 2), "2024-01-02"),
    (dt.datetime(2024, 1, 2, 3, 4, 5, tzinfo=UTC), "2024-01-02T03:04:05Z 2024-1-2t3:04:05Z"),
]
TEXTS = "y n Y N 1e3 1E3 1.0e3 12e03 08 0o10 190:20:60 -.5 yES nULL 2024-1-2 1,000 0xg 1e a:b"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "own.yaml"


def read(path: Path, text: str) -> Any:
    path.write_text(text)
    return Document(path, "file").value


def same(a: Any, b: Any) -> bool:
    return repr(a) == repr(b)


@pytest.mark.parametrize(("value", "spellings"), SCALARS)
def test_scalars(path: Path, value: Any, spellings: str) -> None:
    """Each spelling has the value and the type of YAML 1.1."""
    for spelling in spellings.replace("!!int ", "!!int_").split():
        plain = spelling.replace("!!int_", "!!int ")
        assert same(read(path, f"k: {plain}"), {"k": value}), spelling


@pytest.mark.parametrize("text", TEXTS.split())
def test_texts(path: Path, text: str) -> None:
    """Document reads these as text; YAML 1.2 or another reader has numbers or Booleans."""
    assert read(path, f"k: {text}") == {"k": text}


def test_merge_keys_and_anchors(path: Path) -> None:
    """The keys of a mapping override merged keys; earlier merged mappings override later ones."""
    text = (
        "a: &a {k: 1, l: 1}\nb: &b {k: 2, m: 2}\nc: {<<: [*a, *b], m: 3}\n"
        "x: {y: &y {<<: *a, k: 2}}\nz: {<<: *y}\nlist: [*a, *a]\n"
    )
    found = read(path, text)
    assert found == yaml.safe_load(text)
    assert found["c"] == {"k": 1, "l": 1, "m": 3}
    assert found["z"] == {"k": 2, "l": 1}


PIECES = st.sampled_from([*"0123456789abcdefynotrul.:-+_ eE~xTZ", "'", '"', "\n  "])


@given(st.lists(PIECES, max_size=24).map("".join))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
def test_any_scalar(path: Path, text: str) -> None:
    """Document and PyYAML read the same value, or both refuse the text."""
    try:
        expected = yaml.safe_load(f"k: {text}")
    except (yaml.YAMLError, ValueError):
        with pytest.raises(UsageError):
            read(path, f"k: {text}")
        return
    assert same(read(path, f"k: {text}"), expected)


BOMB = "a: &a [x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGES = "a: &a {}\n" + "".join(
    f"{name}: &{name} {{<<: [{', '.join([f'*{before}'] * 9)}]}}\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"a: 1\nb: {c: 1,\n  c: 2}", ":3: b: c occurs twice; keep one"),
        (b"a: {<<: {b: 1}, <<: {b: 2}}", ":1: a: << occurs twice; keep one"),
        (b"a: 1\nb: !own 3", ":2: b: the type !own is unknown here; leave it out"),
        (
            b"a:\n- !!python/name:os.system x",
            ":2: a.0: the type !!python/name:os.system is unknown",
        ),
        (b"a: !!binary eA==", ":1: a: the type !!binary is unknown here"),
        (b"a: !!bool maybe", ":1: a: 'maybe' cannot be read as a value"),
        (b"a: !!timestamp x", ":1: a: 'x' cannot be read as a value"),
        (b"a: 1\n---\nb: 2", ":2: is not YAML: but found another document"),
        (b"a:\n\tb: 1", ":2: is not YAML: found character '\\t' that cannot start any token"),
        (b"a: 1\nb: caf\xe9", ":2: not UTF-8; save the file in UTF-8"),
        (b"a: 1\nb: x\x00", ":2: is not YAML: character 0x00 is not allowed"),
        (b"a: *b", ":1: is not YAML: found undefined alias 'b'"),
        (b"a: {<<: 3}", ":1: a: give a mapping to merge, or a list of them"),
        (b"a: &a {b: *a}", ": is nested too deeply, or an alias contains itself"),
        (b"#" * (1 << 20) + b"#", ": larger than 1 MiB; give the path of a file"),
        (BOMB.encode(), "has more than 100000 values, with aliases expanded; use fewer"),
        (MERGES.encode(), "has more than 100000 values, with aliases expanded; use fewer"),
    ],
)
def test_what_cannot_be_meant(path: Path, content: bytes, expected: str) -> None:
    """The error is one line with the file, the line, and the key if there is a key."""
    path.write_bytes(content)
    with pytest.raises(UsageError) as error:
        Document(path, "file")
    text = str(error.value)
    assert text.startswith(str(path))
    assert expected in text
    assert "\n" not in text
    assert len(text) < 300


@given(st.text(max_size=80) | st.binary(max_size=80))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_file_is_read_or_refused(path: Path, content: str | bytes) -> None:
    """For any content, Document returns a value or raises UsageError."""
    raw = content if isinstance(content, bytes) else content.encode(errors="surrogatepass")
    path.write_bytes(raw)
    with contextlib.suppress(UsageError):
        Document(path, "file")


def test_lines(path: Path) -> None:
    """An error has the line of its place, of the nearest parent, or of the named outermost key."""
    path.write_text("job:\n  name: a\nname: b\nlist:\n- x\n-\n  name: c\nmore: {<<: {name: d}}\n")
    document = Document(path, "file")

    def line(*place: str | int, about: str = "") -> str:
        return str(document.error("x", place, about)).removeprefix(str(path))

    assert line("list", 1, "name") == ":7: x"
    assert line("list", 1, "other") == ":7: x"
    assert line("job", about="the name is wrong") == ":2: x"
    assert line(about="the name is wrong") == ":3: x"
    assert line("more", "name") == ":8: x"
    assert line("none") == ": x"
