"""Rekindle's mindio_ttp has MindIO's published interface, and imports find it."""

from __future__ import annotations

import ast
import enum
import inspect
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from mindio_names.published import (
    CONTROLLER,
    ENUMS,
    FRAMEWORK,
    FROM_ELSEWHERE,
    IMPORTED,
    MINDX,
    UTILS,
)
from repository import ROOT

from rekindle.training.mindio import enums, install

Parameter = tuple[str, object]  # its name and its default


def signatures(text: str) -> dict[str, list[Parameter]]:
    """Read the parameters of each function."""
    found = {}
    for each in ast.parse(text).body:
        assert isinstance(each, ast.FunctionDef)
        names = [argument.arg for argument in each.args.args]
        defaults = [ast.literal_eval(default) for default in each.args.defaults]
        required = [inspect.Parameter.empty] * (len(names) - len(defaults))
        found[each.name] = list(zip(names, [*required, *defaults], strict=True))
    return found


PUBLISHED = [
    pytest.param(module, name, parameters, id=f"{module}.{name}")
    for module, text in (
        ("framework_ttp", FRAMEWORK),
        ("controller_ttp", CONTROLLER + MINDX),
        ("utils", UTILS),
    )
    for name, parameters in signatures(text).items()
]


@pytest.fixture
def mindio_ttp() -> Iterator[types.ModuleType]:
    """Yield the installed package."""
    before = set(sys.modules)
    assert install()
    yield sys.modules["mindio_ttp"]
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "mindio_ttp":
            del sys.modules[name]


@pytest.mark.parametrize(("module", "name", "parameters"), PUBLISHED)
def test_each_function_takes_what_mindio_s_takes(
    mindio_ttp: types.ModuleType, module: str, name: str, parameters: list[Parameter]
) -> None:
    """Each function has MindIO's parameters in the same order, with the same names and defaults."""
    mine = inspect.signature(getattr(getattr(mindio_ttp, module), name))
    assert [(each.name, each.default) for each in mine.parameters.values()] == parameters
    kinds = {each.kind for each in mine.parameters.values()}
    assert kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD}


@pytest.mark.parametrize("name", ENUMS)
def test_each_enumeration_has_mindio_s_numbers(name: str) -> None:
    """Members count from 0 in their published order."""
    mine = getattr(enums, name)
    assert issubclass(mine, enum.Enum)
    assert {each.name: each.value for each in mine} == {
        member: number for number, member in enumerate(ENUMS[name])
    }


def test_the_package_offers_all_of_its_names(mindio_ttp: types.ModuleType) -> None:
    """framework_ttp has all of MindIO's names, also the ones that MindIO defines elsewhere."""
    offered = set(signatures(FRAMEWORK)) - {"get_device", "get_mindio_export_version"}
    offered |= set(list(signatures(CONTROLLER))[:3]) | set(FROM_ELSEWHERE)
    assert offered <= set(vars(mindio_ttp.framework_ttp))


def test_nothing_is_offered_that_mindio_has_not(mindio_ttp: types.ModuleType) -> None:
    """The package has only published functions, so that it does not pretend a newer MindIO."""
    known = signatures(FRAMEWORK + CONTROLLER + MINDX + UTILS)
    for module in ("framework_ttp", "controller_ttp", "utils"):
        offered = {name for name in vars(getattr(mindio_ttp, module)) if name.startswith("tft_")}
        assert offered <= set(known)


def run(code: str, *paths: Path) -> str:
    """Run the code in a new process with these paths, and return its output."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, *paths)))}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.process
def test_adaptors_find_what_they_import_and_no_framework_is_loaded() -> None:
    """All imports of MindSpeed-LLM's and MindSpore's adaptors work, and load no framework."""
    code = "from rekindle.training import mindio\nassert mindio.install()\n" + IMPORTED
    code += "import sys\nassert mindio.install()\n"
    code += "print({'torch', 'torch_npu', 'mindspore', 'numpy'} & set(sys.modules))"
    assert run(code) == "set()"


@pytest.mark.process
def test_mindio_itself_wins(tmp_path: Path) -> None:
    """If Python can import MindIO, Rekindle does not replace it, before its import or after."""
    (tmp_path / "mindio_ttp").mkdir()
    (tmp_path / "mindio_ttp" / "__init__.py").write_text("real = True\n")
    code = "from rekindle.training import mindio\nfirst = mindio.install()\nimport mindio_ttp\n"
    code += "print(first, mindio_ttp.real, mindio.install())"
    assert run(code, tmp_path) == "False True False"
