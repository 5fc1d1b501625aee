"""Properties of all source files: imports, names, and lengths."""

import ast
import enum
import graphlib
import importlib
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest
from repository import ROOT

MOST_FILES = 410
LONGEST_FILE = 450
SHORT_FILE = 60

# Modules with one importer and fewer than SHORT_FILE lines, and the reason for a separate file.
SHORT_FILES = {
    "rekindle.rank.json_values": "it needs no MindSpore, and the module that imports it does",
    "rekindle.training.msrun_worker": "it is a program, which starts for each worker of msrun",
}

# Folders of tests/unit without a folder of the package, and the reason.
OTHER_TESTS = {
    "examples": "it tests the scripts of examples/",
    "suite": "it tests the pytest plugins of tests/support/suite",
}

# These patterns do not match their own source.
HOME_FOLDER = re.compile(r"(?<![\w.$}~-])/(?:home|Users|root)/[\w.-]")
REGISTRY_HOST = re.compile(
    r"(?i)\b(?:"
    r"(?:files[.])?python[h]osted[.]org|(?:test[.])?py[p]i[.]org|download[.]pytorch[.]org"
    r"|registry[.](?:npmjs[.]org|yarnpkg[.]com)|deb[.]debian[.]org|conda[.]anaconda[.]org"
    r"|(?:static[.]|index[.])?crates[.]io|proxy[.]golang[.]org"
    r")\b"
)

# Libraries that only flows, commands, pods and stores in S3 need.
HEAVY = {"prefect", "kubernetes", "boto3", "matplotlib"}

# The modules that cannot be imported without MindSpore.
OF_MINDSPORE = {"rekindle.training.mindspore", "rekindle.training.node_check.mindspore_device"}

# This program imports each module of a package and prints the loaded modules. It lists the
# modules that it cannot import without MindSpore.
WALK = """
import importlib, json, pkgutil, sys

package = importlib.import_module(sys.argv[1])
seen, hidden = [package.__name__], []
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
        seen.append(module.name)
    except ModuleNotFoundError as error:
        if error.name != "mindspore":
            raise
        hidden.append(module.name)
print(json.dumps({"seen": seen, "hidden": hidden, "loaded": sorted(sys.modules)}))
"""


def repository_files() -> list[Path]:
    """Return the existing files that git tracks or would track."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z"]
    command += ["--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if listing.returncode:
        pytest.skip("this copy of the sources is no git checkout")
    paths = [ROOT / name for name in listing.stdout.decode().split("\0") if name]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def text_of(path: Path) -> str:
    """Return the text of a file, or an empty text for a binary file."""
    content = path.read_bytes()
    return "" if b"\0" in content else content.decode("utf-8", errors="replace")


def modules() -> dict[str, Path]:
    """Return all modules of the package by name; a package has its own name."""
    found = {}
    for path in sorted((ROOT / "rekindle").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(nodes: Iterable[ast.AST], known: dict[str, Path]) -> set[str]:
    """Return the modules of the package that these statements import."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in known else str(node.module) for name in names}
    return found & known.keys()


def test_no_modules_import_each_other() -> None:
    """The imports have no circle, including those in functions and those for types alone."""
    known = modules()
    graph = {
        name: imported(ast.walk(ast.parse(path.read_text())), known) - {name}
        for name, path in known.items()
    }
    assert list(graphlib.TopologicalSorter(graph).static_order())


def test_the_protocol_takes_only_records_of_other_folders() -> None:
    """All that `protocol` imports from `recovery` and `profiling` is a type of a value."""
    taken = {
        (node.module, alias.name)
        for path in (ROOT / "rekindle" / "protocol").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
        and package_of(str(node.module)) in ("recovery", "profiling")
        for alias in node.names
    }
    kinds = [getattr(importlib.import_module(str(module)), name) for module, name in taken]
    assert kinds
    assert all(issubclass(kind, msgspec.Struct | enum.Enum) for kind in kinds)


# Each framework has its own class with the same interface.
TWINS = {"Session"}


def test_no_two_shared_classes_have_one_name() -> None:
    """Each class that another package imports has a unique name."""
    known = modules()
    trees = {name: ast.parse(path.read_text()) for name, path in known.items()}
    defined = {
        (module, node.name)
        for module, tree in trees.items()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }
    shared = {
        (node.module, alias.name)
        for module, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
        if (node.module, alias.name) in defined and package_of(node.module) != package_of(module)
    }
    counts = Counter(name for _, name in shared)
    assert {name for name, count in counts.items() if count > 1} <= TWINS


def package_of(module: str) -> str:
    """Return the folder of the module's package; empty: the package itself."""
    return module.partition(".")[2].partition(".")[0]


@pytest.mark.process
def test_imports_follow_the_contracts() -> None:
    """No import breaks a contract of pyproject.toml."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--no-logo"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("package", "banned"),
    [
        ("rekindle.job", HEAVY | {"torch"}),
        ("rekindle.protocol", HEAVY | {"torch"}),
        ("rekindle.coordinator", HEAVY | {"torch"}),
        ("rekindle.agent", HEAVY | {"torch"}),
        ("rekindle.rank", HEAVY | {"torch"}),
        ("rekindle.training", HEAVY),
    ],
)
@pytest.mark.process
def test_parts_inside_the_job_import_nothing_heavy(package: str, banned: set[str]) -> None:
    """The import of all modules of the package does not load a banned library."""
    command = [sys.executable, "-I", "-c", WALK, package]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    assert package in report["seen"]
    assert not banned & set(report["loaded"])
    assert set(report["hidden"]) <= OF_MINDSPORE


@pytest.mark.parametrize("name", ["flows", "tasks", "recovery", "blocks"])
def test_top_level_folder_is_a_link_into_the_package(name: str) -> None:
    """Each of these folders at the root is a relative link to the folder of the package."""
    link = ROOT / name
    assert link.is_symlink()
    assert not link.readlink().is_absolute()
    assert link.resolve() == ROOT / "rekindle" / name
    assert (link / "__init__.py").is_file()


def test_folders_of_unit_tests_are_folders_of_the_package() -> None:
    """Each folder with unit tests has the path of a folder of the package, or a reason."""

    def folders(root: Path) -> set[str]:
        return {path.parent.relative_to(root).as_posix() for path in root.rglob("*.py")}

    assert folders(ROOT / "tests" / "unit") - folders(ROOT / "rekindle") == OTHER_TESTS.keys()


@pytest.mark.parametrize("pattern", [HOME_FOLDER, REGISTRY_HOST], ids=["home", "registry"])
@pytest.mark.process
def test_no_file_names_a_place_of_one_machine(pattern: re.Pattern[str]) -> None:
    """No text file names a home folder or the host of a package registry."""
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in repository_files()
        for number, line in enumerate(text_of(path).splitlines(), start=1)
        if pattern.search(line)
    ]
    assert not found, "\n".join(found)


@pytest.mark.process
def test_no_file_names_the_folder_of_this_checkout() -> None:
    """No text file names the absolute path of the repository on this machine."""
    if len(ROOT.parts) < 3:
        pytest.skip("a folder directly below / may share its name with a path that is meant")
    found = [path.relative_to(ROOT) for path in repository_files() if str(ROOT) in text_of(path)]
    assert not found


def test_the_package_has_few_modules() -> None:
    """The package has at most MOST_FILES modules, so that a reader can keep an overview."""
    assert len(modules()) <= MOST_FILES


@pytest.mark.process
def test_no_module_is_too_long() -> None:
    """Each module of the package has at most LONGEST_FILE lines."""
    modules = [
        p for p in repository_files() if p.suffix == ".py" and ROOT / "rekindle" in p.parents
    ]
    assert modules
    too_long = {
        str(path.relative_to(ROOT)): lines
        for path in modules
        if (lines := len(text_of(path).splitlines())) > LONGEST_FILE
    }
    assert not too_long


def evaluated(value: ast.AST) -> set[str]:
    """Return the names that an import of the module reads. The body of a lambda runs later."""
    if isinstance(value, ast.Lambda):
        return evaluated(value.args)
    own = {value.id} if isinstance(value, ast.Name) else set()
    return own.union(*map(evaluated, ast.iter_child_nodes(value)))


def late_constants(tree: ast.Module) -> list[int]:
    """Return the lines of assignments that could stand above the first function or class."""
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    known = {node.name for node in tree.body if isinstance(node, definitions)}
    begun, late = False, []
    for node in tree.body:
        begun = begun or isinstance(node, definitions)
        if not begun or not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        if node.value is None or not evaluated(node.value) & known:
            late.append(node.lineno)
        else:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            known |= set().union(*map(evaluated, targets))
    return late


@pytest.mark.parametrize(
    ("below", "is_late"),
    [
        ("LIMIT_S = 5.0", True),
        ("FIRST, LAST = 1, 2", True),
        ("held: Part | None = None", True),
        ("later = lambda: work()", True),
        ("TABLE = {1: work}", False),
        ("Any = Part | int", False),
        ("PARTS = (Part(),)\nFIRST = PARTS[0]", False),
    ],
)
def test_the_check_recognises_a_late_constant(below: str, is_late: bool) -> None:
    """A value that needs a function or class of its module may stand below it."""
    source = f"def work(): ...\nclass Part: ...\n{below}"
    assert bool(late_constants(ast.parse(source))) is is_late


def test_constants_stand_at_the_top() -> None:
    """A constant stands above the first function or class, unless its value needs one of them."""
    late = {name: late_constants(ast.parse(path.read_text())) for name, path in modules().items()}
    assert not {name: lines for name, lines in late.items() if lines}


def test_a_short_file_with_one_importer_has_a_reason() -> None:
    """A short file with one importer has a reason in SHORT_FILES (decision 19)."""
    known = modules()
    counts = Counter(
        other
        for name, path in known.items()
        for other in imported(ast.walk(ast.parse(path.read_text())), known) - {name}
    )
    short = {
        name
        for name, path in known.items()
        if path.name != "__init__.py" and len(path.read_text().splitlines()) < SHORT_FILE
    }
    assert {name for name in short if counts[name] == 1} == SHORT_FILES.keys()
