"""The installed torch has the private names that Rekindle uses."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator, Set

import pytest
import torch
import torch.distributed as dist
from repository import ROOT
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import _utils
from torch.nn.parallel import DistributedDataParallel

from rekindle.training.torch import private

FOLDER = ROOT / "rekindle" / "training" / "torch"
ELSEWHERE = ("private.py", "fsdp.py")
# Modules whose private names are not of torch.
NO_TORCH = {"sys", "random", "numpy", "np"}
OF_NAMED_TUPLES = {"_replace", "_fields"}


@pytest.mark.parametrize(
    ("holder", "name"),
    [
        (c10d._world, "group_count"),
        (c10d._world, "pg_map"),
        (c10d, "_new_group_with_tag"),
        (dist.Backend, "_plugins"),
        (dist.ProcessGroup, "_get_backend"),
        (dist.ProcessGroup, "_device_types"),
        (_utils, "compute_local_shape_and_global_offset"),
        (torch._C._distributed_c10d, "_resolve_process_group"),
        (torch._C._distributed_c10d, "_register_comm_hook"),
        (torch, "_foreach_copy_"),
        (DeviceMesh, "_get_root_mesh"),
        (FSDPModule, "_get_fsdp_state"),
        (torch.Tensor, "_indices"),
        (torch.Tensor, "_values"),
        (torch.Tensor, "_version"),
        (torch, "_make_per_channel_quantized_tensor"),
        (torch, "_make_per_tensor_quantized_tensor"),
        (torch.UntypedStorage, "_cdata"),
        (ZeroRedundancyOptimizer, "_sync_param_groups"),
        (DistributedDataParallel, "_check_comm_hook"),
        (DistributedDataParallel, "_distributed_broadcast_coalesced"),
        (DistributedDataParallel, "_build_params_for_reducer"),
        (dist.Reducer, "_push_all_rebuilt_params"),
        (dist.Reducer, "_update_process_group"),
        (dist.Reducer, "_rebuild_buckets"),
        (dist.ProcessGroup, "_set_default_backend"),
        (dist.ProcessGroup, "_register_backend"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_name_is_there(holder: object, name: str) -> None:
    assert hasattr(holder, name)


def test_buffers_that_are_not_saved_are_among_a_modules_buffers() -> None:
    norm = nn.BatchNorm1d(2)
    norm.register_buffer("scratch", torch.zeros(1), persistent=False)
    assert {"running_mean", "scratch"} <= private.buffers_of(norm).keys()
    assert isinstance(norm, private.NormBase)


def test_the_fork_server_empties_the_caches_of_dynamo() -> None:
    """A rank then has nothing to free when it forms its first group."""
    rules = importlib.import_module("torch._dynamo").trace_rules
    rules.get_torch_obj_rule_map()
    private.before_fork()
    assert rules.get_torch_obj_rule_map.cache_info().currsize == 0


def own_names(tree: ast.Module) -> set[str]:
    """Return the names that the classes and functions of a module define."""
    own = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                own.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)):
                own.add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                own.add(name)
    return own


def private_names(
    tree: ast.Module, inherited: Set[str] = frozenset()
) -> Iterator[ast.Attribute | ast.ImportFrom]:
    """Return the uses of private names that neither the module nor Python defines.

    inherited: names that `self` may have from a base class of another module of Rekindle.
    """
    own, imported = own_names(tree), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imported |= {each.asname or each.name.partition(".")[0] for each in node.names}
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=names) if module.startswith("torch"):
                if any(each.name.startswith("_") for each in names):
                    yield node
            case ast.Attribute(attr=name) if name in OF_NAMED_TUPLES:
                pass
            case ast.Attribute(value=ast.Name("self"), attr=name) if name in inherited:
                pass
            case ast.Attribute(value=holder, attr=name) if re.match(r"_[a-z]", name):
                root = ast.unparse(holder).partition(".")[0]
                if root not in NO_TORCH and (name not in own or root in {*imported, "super()"}):
                    yield node


def test_no_other_module_uses_private_names() -> None:
    """Only `private.py` and `fsdp.py` use private names of torch, which tests check."""
    trees = {path: ast.parse(path.read_text()) for path in FOLDER.rglob("*.py")}
    inherited = set().union(*map(own_names, trees.values()))
    wrong = [
        f"{path.name}:{node.lineno}: {ast.unparse(node)}"
        for path, tree in trees.items()
        if path.name not in ELSEWHERE
        for node in private_names(tree, inherited)
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "line",
    [
        "from torch._C import _name",
        "dist.distributed_c10d._name",
        "self.reducer._name()",
        "self._name",
        "tensor.storage()._name",
        "super()._own()",
        "DistributedDataParallel._own(self)",
    ],
)
def test_a_private_name_is_found(line: str) -> None:
    """The search finds a private name of an import, a base class, and any other object."""
    start = (
        "from torch.nn.parallel import DistributedDataParallel\nimport torch.distributed as dist"
    )
    tree = ast.parse(f"{start}\nclass A:\n    def _own(self):\n        {line}\n")
    assert len(list(private_names(tree))) == 1


@pytest.mark.parametrize(
    "line", ["self._own()", "a._own()", "row._replace(a=1)", "sys._getframe()"]
)
def test_an_own_private_name_is_allowed(line: str) -> None:
    """The search allows names that the module defines, and those of Python."""
    tree = ast.parse(f"import sys\nclass A:\n    def _own(self):\n        {line}\n")
    assert list(private_names(tree)) == []
