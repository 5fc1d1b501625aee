"""The names of MindCluster's TaskD, for scripts that call it where it is not installed.

In a job of Rekindle the coordinator is the manager, the agent is the proxy, and the Session is the
worker. So these functions start nothing. As in TaskD they return whether
they accept their arguments, and print why they do not.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

from rekindle.console import say

_ROOT = "taskd"
_WHERE = "taskd of Rekindle"
_CAP_MB = 5000  # the default limit of all records, here and in TaskD
_begun: set[str] = set()  # "worker", "manager": accepted


def init_taskd_worker(
    rank_id: int, upper_limit_of_disk_in_mb: int = _CAP_MB, framework: str = "pt"
) -> bool:
    """Accept the number of this rank. The limit of the records is a setting of the job."""
    if str(rank_id) != (own := os.environ.get("RANK", str(rank_id))):
        return _refuse(f"init_taskd_worker got the rank {rank_id!r}, and this is rank {own}")
    if not isinstance(upper_limit_of_disk_in_mb, int) or upper_limit_of_disk_in_mb < 0:
        return _refuse(
            f"init_taskd_worker got the limit {upper_limit_of_disk_in_mb!r}; "
            "give a whole number of megabytes"
        )
    _begun.add("worker")
    if rank_id == 0 and upper_limit_of_disk_in_mb != _CAP_MB:
        say(
            f"the limit of {upper_limit_of_disk_in_mb} MB in init_taskd_worker has no effect; give "
            f"the job the variable REKINDLE_PROFILING_CAP_MB={upper_limit_of_disk_in_mb}"
        )
    return True


def start_taskd_worker() -> bool:
    """Return whether the worker was accepted. A Session records when profiling is switched on."""
    return "worker" in _begun or _refuse("call init_taskd_worker before start_taskd_worker")


def init_taskd_manager(config: Mapping[str, Any]) -> bool:
    """Accept the size of the job."""
    for key, name in (("node_nums", "GROUP_WORLD_SIZE"), ("proc_per_node", "LOCAL_WORLD_SIZE")):
        given, own = config.get(key), os.environ.get(name)
        if given is not None and own is not None and str(given) != own:
            return _refuse(f"init_taskd_manager got {key} {given!r}, and this job has {own}")
    _begun.add("manager")
    return True


def start_taskd_manager() -> bool:
    """Return whether the manager was accepted. The coordinator runs already."""
    return "manager" in _begun or _refuse("call init_taskd_manager before start_taskd_manager")


def _accept(*_: Any) -> bool:
    """Do nothing for a proxy: the agent of the node runs already."""
    return True


def _refuse(why: str) -> bool:
    say(why)
    return False


_WORKER = {"init_taskd_worker": init_taskd_worker, "start_taskd_worker": start_taskd_worker}
_MANAGER = {"init_taskd_manager": init_taskd_manager, "start_taskd_manager": start_taskd_manager}
_PROXY = {"init_taskd_proxy": _accept, "destroy_taskd_proxy": _accept}
_MODULES: dict[str, Mapping[str, Any]] = {
    "taskd.api": _WORKER | _MANAGER | _PROXY,
    "taskd.api.taskd_worker_api": _WORKER,
    "taskd.api.taskd_manager_api": _MANAGER,
    "taskd.api.taskd_proxy_api": _PROXY,
    "taskd.python.adaptor.patch": {},  # of torchrun, which does not run here
    "taskd.python.framework.common.type": {
        "CONFIG_UPSTREAMIP_KEY": "UpstreamIp",
        "LOCAL_HOST": "127.0.0.1",
    },
}


class _Names(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules. It is the last finder, so an installed TaskD stays."""

    def __init__(self, modules: Mapping[str, Mapping[str, Any]]) -> None:
        self._modules = modules
        parts = (name.split(".") for name in modules)
        self._known = {".".join(each[:at]) for each in parts for at in range(1, len(each) + 1)}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._known or not (name == _ROOT or _is_ours()):
            return None
        return importlib.machinery.ModuleSpec(name, self, origin=_WHERE, is_package=True)

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module).update(self._modules.get(module.__name__, {}))


def _is_ours() -> bool:
    """Return whether the imported package is this one: its modules never mix with TaskD's own."""
    package = sys.modules.get(_ROOT)
    return getattr(getattr(package, "__spec__", None), "origin", None) == _WHERE


def install(more: Mapping[str, Mapping[str, Any]] | None = None) -> None:
    """Let `import taskd` find these names. more: further modules, by name."""
    sys.meta_path.append(_Names(_MODULES | dict(more or {})))
