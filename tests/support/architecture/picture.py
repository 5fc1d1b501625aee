"""The picture of the folders of rekindle/ in docs/architecture.md, from their imports.

`PYTHONPATH=tests/support python -m architecture.picture` writes it into the page.

A box is a folder and names the processes that load modules of the folder. An arrow is an import. A
path of arrows includes the direct import. The contract in pyproject.toml gives the order of the
boxes. The picture leaves out the files at the root of the package (errors, names, ...).
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from repository import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PACKAGE = ROOT / "rekindle"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN = "<!-- written by architecture.picture: begin -->\n"
END = "<!-- written by architecture.picture: end -->\n"

# The modules with which each process starts, or that it loads by a name in a string. A package
# stands for all its modules.
PROCESSES = {
    "flow run": ("rekindle.flows",),
    "command": ("rekindle.cli",),
    "user's test": ("rekindle.testing",),
    "Prefect server": ("rekindle.blocks.saved",),
    "coordinator": ("rekindle.coordinator",),
    "agent": ("rekindle.agent.process",),
    "fork server": (
        "rekindle.agent.fork_server_process",
        "rekindle.training.torch",
        "rekindle.training.mindspore",
    ),
    "rank": ("rekindle.rank.program", "rekindle.training"),
}
_OUTSIDE = {"flow run", "command", "user's test", "Prefect server"}  # not processes of a job
_GROUPS = {
    "outside": "outside of the job",
    "coordinator": "coordinator",
    "node": "agent, fork server and ranks of a node",
    "shared": "inside and outside of the job",
}

Graph = Mapping[str, frozenset[str]]


def modules() -> dict[str, Path]:
    """Return the file of each module of the package."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported_by(path: Path, known: Mapping[str, Path]) -> frozenset[str]:
    """Return the modules of the package that a file imports, also within its functions."""
    found = set()
    for node in _executed(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in known else str(node.module) for name in names}
    return frozenset(found & known.keys())


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes below this one, except those that only a type checker reads."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        yield child
        yield from _executed(child)


def folder_of(module: str) -> str:
    """Return the folder of rekindle/ that contains a module; for a file at the root, its name."""
    return module.partition(".")[2].partition(".")[0]


def reachable(graph: Graph, start: str) -> frozenset[str]:
    """Return all nodes that paths from `start` reach, and `start`."""
    found, left = {start}, [start]
    while left:
        new = graph[left.pop()] - found
        found |= new
        left += new
    return frozenset(found)


def without_detours(graph: Graph) -> Graph:
    """Return the graph without the arrows that a longer path implies."""
    return {
        start: frozenset(
            end for end in ends if not any(end in reachable(graph, other) for other in ends - {end})
        )
        for start, ends in graph.items()
    }


def layers_of_folders() -> list[list[str]]:
    """Return the folders of each layer of the import contract, the highest layer first."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (layers,) = (each["layers"] for each in contracts["contracts"] if each["id"] == "layers")
    names = [[name.strip() for name in layer.split("|")] for layer in layers]
    return [[name for name in layer if (PACKAGE / name).is_dir()] for layer in names]


def folders_in_order() -> list[str]:
    """Return the folders of the package in the order of the import contract, highest first."""
    return [folder for layer in layers_of_folders() for folder in layer]


@cache
def graph_of_modules() -> Graph:
    """Return what each module of the package imports."""
    known = modules()
    return {name: imported_by(path, known) for name, path in known.items()}


def graph_of_folders() -> Graph:
    """Return which folders each folder imports from."""
    folders = folders_in_order()
    found: dict[str, set[str]] = {folder: set() for folder in folders}
    for module, imports in graph_of_modules().items():
        if folder_of(module) in found:
            found[folder_of(module)] |= {folder_of(each) for each in imports}
    return {folder: frozenset(ends & found.keys() - {folder}) for folder, ends in found.items()}


def processes_of() -> dict[str, list[str]]:
    """Return for each folder the processes that load a module of it."""
    found: dict[str, list[str]] = {folder: [] for folder in folders_in_order()}
    graph = graph_of_modules()
    for process, names in PROCESSES.items():
        starts = (m for m in graph for name in names if f"{m}.".startswith(f"{name}."))
        loaded = {module for start in starts for module in reachable(graph, start)}
        for folder in {folder_of(module) for module in loaded} & found.keys():
            found[folder].append(process)
    return found


def _group_of(processes: list[str]) -> str:
    job = set(processes) - _OUTSIDE
    if not job:
        return "outside"
    if job == {"coordinator"}:
        return "coordinator"
    return "node" if "coordinator" not in job else "shared"


def drawn() -> str:
    """Return the picture, in Mermaid."""
    processes = processes_of()
    lines = ["```mermaid", "flowchart TB"]
    for group, title in _GROUPS.items():
        lines.append(f'  subgraph of_{group}["{title}"]')
        for folder, loaded_by in processes.items():
            if _group_of(loaded_by) == group:
                which = ", ".join(loaded_by) if group in ("outside", "node") else ""
                lines.append(f'    {folder}["{folder}{f"<br/>in: {which}" if which else ""}"]')
        lines.append("  end")
    for folder, ends in without_detours(graph_of_folders()).items():
        lines += [f"  {folder} --> {end}" for end in processes if end in ends]
    return "\n".join([*lines, "```", ""])


def with_picture(page: str) -> str:
    """Return the page with the picture between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise SystemExit(f"{PAGE} lacks the line {BEGIN.strip()} or {END.strip()} after it")
    return f"{before}{BEGIN}{drawn()}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_picture(PAGE.read_text()))
