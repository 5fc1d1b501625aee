"""The pages of docs/: generated tables, code blocks, and command lines."""

from __future__ import annotations

import ast
import io
import json
import re
import sys
from pathlib import Path

import documented_blocks
import documented_commands
import msgspec
import pytest
import yaml
from docstrings import explained, to_rst
from outside_links import with_downloads
from reference_tables.markdown import check_names
from reference_tables.pages import FOLDER, PAGES
from repository import ROOT

from rekindle.blocks.job import TrainingJob
from rekindle.cli.local_options import MAX_RESTARTS
from rekindle.cli.main import command_parser
from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.policy.policy import Policy

PAGES_OF_SITE = ROOT / "docs"
ALL = sorted([ROOT / "README.md", *PAGES_OF_SITE.rglob("*.md"), *ROOT.glob("examples/**/*.md")])
MODULES = {
    "rekindle": "rekindle/__init__.py",
    "torch": "rekindle/training/torch/__init__.py",
    "mindspore": "rekindle/training/mindspore/__init__.py",
    "testing": "rekindle/testing/__init__.py",
}


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_as_the_source_has_it(name: str) -> None:
    """Each generated page is up to date; `make reference` writes it."""
    assert (FOLDER / name).read_text() == PAGES[name](), "run `make reference`"


def test_each_guarantee_names_tests_that_exist() -> None:
    """Each test that promises.md names exists."""
    text = (PAGES_OF_SITE / "reference" / "promises.md").read_text()
    named = re.findall(r"`((?:unit|integration)/[\w/]+\.py)(?:::(\w+))?", text)
    gone = [
        (file, name)
        for file, name in named
        if not (ROOT / "tests" / file).exists()
        or not re.search(rf"^(?:def )?{name}\b", (ROOT / "tests" / file).read_text(), re.MULTILINE)
    ]
    assert len(named) > 100
    assert gone == []


def test_a_name_without_a_row_is_refused() -> None:
    """The error names the file, the names without a row, and the rows without a name."""
    with pytest.raises(ValueError, match=r"files\.py: add rows for \['b'\], remove those of \['c"):
        check_names("files", ["a", "b"], ["a", "c"])


@pytest.mark.parametrize("page", MODULES)
def test_the_api_has_all_public_names(page: str) -> None:
    """Each page has all names of `__all__`; the test reads the source, without MindSpore."""
    tree = ast.parse((ROOT / MODULES[page]).read_text())
    public = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
    )
    text = (FOLDER / "api" / f"{page}.md").read_text()
    documented = re.findall(r"^\.\. auto\w+:: (\w+)(?!\.)\b", text, re.MULTILINE)
    assert sorted(documented) == sorted(public)


def test_the_index_lists_each_page() -> None:
    """docs/index.md links to each page of the site; README links to it and to pages that exist."""
    index = (PAGES_OF_SITE / "index.md").read_text()
    pages = {path.relative_to(PAGES_OF_SITE).as_posix() for path in PAGES_OF_SITE.rglob("*.md")}
    linked = set(re.findall(r"\]\(([\w./-]+\.md)\)", index))
    assert linked == pages - {"index.md"}
    of_readme = re.findall(r"\]\(([\w./-]+\.md)[)#]", (ROOT / "README.md").read_text())
    assert "docs/index.md" in of_readme
    assert [each for each in of_readme if not (ROOT / each).exists()] == []


def test_no_two_pages_have_one_name() -> None:
    """A link's text, such as `session.md`, names one page."""
    names = [path.name for path in PAGES_OF_SITE.rglob("*.md") if path.parent.name != "api"]
    assert sorted(names) == sorted(set(names))


def rows_of(page: str, section: str) -> dict[str, list[str]]:
    """Return the tables of a section of a page: the cells of each row by its first name in code."""
    text = (PAGES_OF_SITE / page).read_text()
    part = text.split(f"\n{section}\n", 1)[1].split("\n## ", 1)[0]
    rows = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| `")]
    return {re.findall(r"`([^`]+)`", row[0])[0]: row for row in rows}


def test_the_pages_have_the_defaults_of_the_policy() -> None:
    """The defaults in recover/policy.md are those of `Policy`, which the reference also shows."""
    rows = rows_of("recover/policy.md", "## Settings")
    usual = msgspec.to_builtins(Policy())
    assert rows.keys() == usual.keys()
    shown = {name: row[2].replace(",", "") for name, row in rows.items()}
    for name, value in usual.items():
        if isinstance(value, bool):
            assert shown[name].startswith(str(value).lower()), name
        elif isinstance(value, (int, float)):
            assert re.match(rf"{value:g}(?!\d)", shown[name]) or shown[name] == f"{value:.0f}", name


@pytest.mark.parametrize(
    ("page", "section"),
    [
        ("faults.md", "## Kinds, detection and answer"),
        ("policy.md", "## Strategies for each kind of fault"),
    ],
)
def test_the_tables_of_faults_have_each_kind(page: str, section: str) -> None:
    """Each kind of fault has its detection and its answer."""
    text = (PAGES_OF_SITE / "recover" / page).read_text()
    part = text.split(f"\n{section}\n", 1)[1].split("\n#", 1)[0]
    cells = [line.split(" | ")[0] for line in part.splitlines() if line.startswith("| `")]
    assert {kind for each in cells for kind in re.findall(r"`([\w-]+)`", each)} == {
        kind.value for kind in FaultKind
    }


@pytest.mark.parametrize(
    ("page", "command"),
    [("operate/running.md", "run"), ("operate/simulate.md", "simulate")],
)
def test_the_pages_have_the_defaults_of_the_options(page: str, command: str) -> None:
    """An option's number in a table of a page is the number that the parser takes without it."""
    required = {"run": [], "simulate": ["--policy", "p", "--nodes", "1"]}[command]
    parsed = vars(command_parser().parse_args([command, *required]))
    parsed["max_restarts"] = MAX_RESTARTS
    rows = [
        re.match(r"\| `--([\w-]+)[^`]*`[^|]*\|[^|]*\| ([^|]*) \|", line)
        for line in (PAGES_OF_SITE / page).read_text().splitlines()
    ]
    found = {row[1].replace("-", "_"): row[2] for row in rows if row is not None}
    numbers = {
        name: value
        for name, value in parsed.items()
        if not found.get(name, "required").startswith("required")
        and isinstance(value, (int, float))
        and not isinstance(value, bool)
    }
    assert len(numbers) > 3
    for name, value in numbers.items():
        assert re.match(rf"{value:g}\b", found[name]), f"--{name}: {found[name]}"


def test_files_of_a_job_are_in_the_reference() -> None:
    """Each file of the job directory that a page names has a row in job-directory.md."""
    known = (FOLDER / "job-directory.md").read_text()
    for path in ALL:
        for name in re.findall(r"`jobs/JOB/([\w.-]+)[`/]", path.read_text()):
            assert f"`{name}" in known, f"{path.name}: {name}"


def test_the_file_of_a_job_in_pods_is_valid(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job file of kubernetes.md is a job, and its command hands this job to the flow."""
    page = (PAGES_OF_SITE / "deploy" / "kubernetes.md").read_text()
    [text] = re.findall(r"^```yaml\n(# job\.yaml\n.*?)^```", page, re.DOTALL | re.MULTILINE)
    job = TrainingJob.model_validate(yaml.safe_load(text))
    [program] = re.findall(r'"\$\(python -c \'(.*?)\' < job\.yaml\)"', page)
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    exec(program)
    assert TrainingJob.model_validate(json.loads(capsys.readouterr().out)["job"]) == job


def test_python_blocks_compile() -> None:
    """The Python blocks of all pages, the README and the examples compile."""
    wrong = []
    for path in ALL:
        for block in re.findall(r"^```python\n(.*?)^```", path.read_text(), re.DOTALL | re.M):
            try:
                compile(block, str(path), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            except SyntaxError as error:
                wrong.append(f"{path.relative_to(ROOT)}: {error}")
    assert not wrong, "\n".join(wrong)


def test_each_complete_program_is_run() -> None:
    """Each complete program has a row that states its test, or the reason for no test.

    tests/integration/documentation runs the programs.
    """
    found = [each.page for each in documented_blocks.programs()]
    places = {(page, n) for page in found for n in range(found.count(page))}
    assert places == set(documented_blocks.HOW)


def test_command_lines_parse() -> None:
    """Each documented command and option exists; code blocks have all required arguments."""
    wrong, seen = [], 0
    for path in ALL:
        text = path.read_text()
        found = [(each, False) for each in documented_commands.commands_of(text)]
        found += [(each, True) for each in documented_commands.named_in(text)]
        for command, partly in found:
            seen += 1
            try:
                documented_commands.check(command, partly=partly)
            except ValueError as error:
                wrong.append(f"{path.relative_to(ROOT)}: rekindle {command}\n    {error}")
    assert not wrong, "\n".join(wrong)
    assert seen > 100  # fewer would mean that the search fails


PAGE = """
Run `rekindle status JOB`, or `rekindle run`. It prints `rekindle agent: why`.

    SECRET=$(cat secret) rekindle run --nnodes 2 \\
        --policy FILE train.py --lr 0.1   # a comment
    rekindle status|stop trial
    rekindle coordinator: a message

```console
$ rekindle checkpoints ls nightly
rekindle checkpoints is output here
```
"""


def test_commands_are_found_in_a_page() -> None:
    """The search finds commands in both forms of code blocks, continued lines, and sentences."""
    assert sorted(documented_commands.commands_of(PAGE)) == [
        "checkpoints ls nightly",
        "run --nnodes 2          --policy FILE train.py --lr 0.1   # a comment",
        "status|stop trial",
    ]
    assert list(documented_commands.named_in(PAGE)) == ["status JOB", "run"]


@pytest.mark.parametrize(
    ("command", "partly"),
    [
        ("run [options] train.py [arguments]", False),
        ("run --nnodes 2 train.py --anything 1 | tee log", False),
        ("status|stop trial", False),
        ("checkpoints verify STORE STEP", False),
        ("inject JOB --rank R --kind KIND", False),
        ("profile JOB on|off", False),
        ("inject --kind kill", True),
    ],
)
def test_a_command_that_exists_is_taken(command: str, partly: bool) -> None:
    """check() accepts placeholders, and text that a shell does not pass on."""
    documented_commands.check(command, partly=partly)


@pytest.mark.parametrize(
    ("command", "partly", "message"),
    [
        ("stats JOB", False, "invalid choice: 'stats'"),
        ("status JOB --jsn", False, "unrecognized arguments: --jsn"),
        ("run --max-restart 1 train.py", False, "unrecognized|required"),
        ("inject JOB --rank 1", False, "--kind"),
        ("inject JOB --rank 1 --kind kil", True, "invalid choice"),
    ],
)
def test_a_command_that_does_not_exist_is_refused(command: str, partly: bool, message: str) -> None:
    """check() refuses a wrong or shortened name, and a missing option."""
    with pytest.raises(ValueError, match=message):
        documented_commands.check(command, partly=partly)


def test_docstrings_become_restructured_text() -> None:
    """The conversion keeps sentences, explained names, raised errors, and code."""
    lines = [
        "Do it.",
        "",
        "    rekindle run",
        "",
        "It is done. one, two: numbers",
        "    of things; not more: two. other: a text.",
        "Raises Error: never.",
    ]
    docstring = "\n".join(lines)
    to_rst(None, "", "", None, None, lines)
    assert lines == [
        *("Do it.", ""),
        *("::", "", "    rekindle run", ""),
        *("It is done.", ""),
        "- `one`, `two`: numbers of things; not more: two.",
        "- `other`: a text.",
        *("", "Raises Error: never.", ""),
    ]
    numbers = "numbers of things; not more: two."
    assert explained(docstring) == {"one": numbers, "two": numbers, "other": "a text."}


def test_links_to_files_outside_of_the_pages_are_downloads(tmp_path: Path) -> None:
    """The text of a link to a folder stays without the link, and a broken link stays a link."""
    pages = tmp_path / "docs"
    pages.mkdir()
    (pages / "page.md").touch()
    (tmp_path / "script.py").touch()
    links = "[a](./page.md) [b](../script.py#L1) [`c`](../docs/../) [d](../none.md)"
    assert with_downloads(links, pages, pages) == (
        "[a](./page.md) {download}`b <../script.py>` `c` [d](../none.md)"
    )
