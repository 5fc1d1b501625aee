"""The installed torch has the private names that Rekindle uses."""

from __future__ import annotations

import ast
import re

import pytest
import torch
import torch.distributed as dist
from repository import ROOT
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import _utils

from rekindle.training.torch import private

FOLDER = ROOT / "rekindle" / "training" / "torch"
ELSEWHERE = ("private.py", "fsdp.py")


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


def test_no_other_module_uses_private_names() -> None:
    """Only `private.py` and `fsdp.py` use private names of torch, which tests check."""
    known = re.compile(r"(dist|c10d|nn|torch)\.(\w+\.)*_[a-z]\w*")
    wrong = []
    for path in FOLDER.rglob("*.py"):
        if path.name in ELSEWHERE:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            imported = isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch")
            if imported and any(each.name.startswith("_") for each in node.names):
                wrong.append(f"{path.name}:{node.lineno}")
            if isinstance(node, ast.Attribute) and known.fullmatch(ast.unparse(node)):
                wrong.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
    assert wrong == []
