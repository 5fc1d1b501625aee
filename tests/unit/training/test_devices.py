"""The NPU adapter's calls match the signatures in the source of the released torch-npu."""

from __future__ import annotations

import ast
import sys
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rekindle.recovery.faults.fault import FaultKind
from rekindle.training.devices import Damage, NpuDevice

# Where each function is defined, and the module that offers it.
FUNCTIONS = {
    "npu.stop_device": ("npu/_recovery.py", "npu/__init__.py"),
    "npu.restart_device": ("npu/_recovery.py", "npu/__init__.py"),
    "npu.check_uce_in_memory": ("npu/utils.py", "npu/__init__.py"),
    "npu.synchronize": ("npu/utils.py", "npu/__init__.py"),
    "npu.empty_cache": ("npu/memory.py", "npu/__init__.py"),
    "npu._recovery.update_npu_tensor_to_safe": ("npu/_recovery.py", "npu/_recovery.py"),
    "distributed.reinit_process_group": (
        "distributed/distributed_c10d.py",
        "distributed/__init__.py",
    ),
}
PARAMETER = torch.zeros(3)


@pytest.fixture(scope="module")
def source() -> Callable[[str], str]:
    """Read a file of torch-npu's wheel."""
    (wheel,) = Path(sys.prefix, "wheels").glob("torch_npu-*.whl")  # `make tools` puts it there

    def read(path: str) -> str:
        with zipfile.ZipFile(wheel) as archive:
            return archive.read(f"torch_npu/{path}").decode()

    return read


class TorchNpu:
    """A simulated torch_npu with the released signatures, whose functions record their calls."""

    def __init__(self, source: Callable[[str], str], *, stop: int = 0, uce: int = 0) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        answers = {"npu.stop_device": stop, "npu.check_uce_in_memory": uce}
        for name, (path, _) in FUNCTIONS.items():
            *place, last = name.split(".")
            module: Any = self
            for part in place:
                if not hasattr(module, part):
                    setattr(module, part, types.SimpleNamespace())
                module = getattr(module, part)
            note = self._note(name, answers.get(name))
            setattr(module, last, with_signature_of(source(path), last, note))

    def _note(self, name: str, answer: Any) -> Callable[..., Any]:
        def note(arguments: dict[str, Any]) -> Any:
            self.calls.append((name, tuple(arguments.values())))
            return answer

        return note


def with_signature_of(text: str, name: str, note: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with the signature in the source, whose body is `note(arguments)`."""
    tree = ast.parse(text)
    (found,) = (n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name)
    found.body = ast.parse("return note(locals())").body
    found.decorator_list, found.returns = [], None
    for argument in (*found.args.args, *found.args.kwonlyargs):
        argument.annotation = None
    scope = {"note": note}
    exec(compile(ast.Module([found], []), name, "exec"), scope)
    return scope[name]


@pytest.fixture
def install(
    monkeypatch: pytest.MonkeyPatch, source: Callable[[str], str]
) -> Callable[..., TorchNpu]:
    """Return a function that lets `import torch_npu` find a simulated module."""

    def pretend(**answers: int) -> TorchNpu:
        module = TorchNpu(source, **answers)
        monkeypatch.setitem(sys.modules, "torch_npu", module)
        return module

    return pretend


def device() -> NpuDevice:
    # This torch has no NPU support, so it cannot create such a device.
    return NpuDevice(types.SimpleNamespace(type="npu", index=3))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_function_is_offered_where_it_is_called(
    name: str, source: Callable[[str], str]
) -> None:
    """The module from which Rekindle calls the function exports it by that name."""
    _, module = FUNCTIONS[name]
    names = set()
    for node in ast.parse(source(module)).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names |= set(ast.literal_eval(node.value))
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef):
            names.add(node.name)
    assert name.rpartition(".")[2] in names


def test_a_peer_of_a_broken_rank_is_stopped_and_restarted(install: Any) -> None:
    """If a peer broke, the adapter stops and restarts this device without a check of its memory."""
    npu = install()
    ours = device()
    ours.stop()
    assert ours.repair(FaultKind.LINK, lambda: [PARAMETER]) is Damage.NONE
    assert npu.calls == [
        ("npu.stop_device", (3,)),
        ("npu.empty_cache", ()),
        ("npu.restart_device", (3, False, False)),
        ("distributed.reinit_process_group", (None, False)),
    ]
    assert (
        ours.repair(FaultKind.LINK, lambda: [PARAMETER]) is Damage.NONE
    )  # nothing has stopped it since
    assert len(npu.calls) == 4


def test_a_rank_that_waits_gives_memory_back(install: Any) -> None:
    """A waiting rank frees cached memory; an error of the device in this call has no effect."""
    npu = install()
    device().free()
    assert npu.calls == [("npu.empty_cache", ())]

    def broken() -> None:
        raise RuntimeError("UCE ERROR")

    npu.npu.empty_cache = broken
    device().free()


def test_waiting_is_for_this_device(install: Any) -> None:
    """The adapter waits for the model's device, even if another device is the current one."""
    npu = install()
    device().wait()
    assert npu.calls == [("npu.synchronize", (3,))]


@pytest.mark.parametrize(("answer", "damage"), [(0, Damage.NONE), (2, Damage.NONE)])
def test_an_error_in_temporary_memory_costs_the_step_alone(
    answer: int, damage: Damage, install: Any
) -> None:
    npu = install(uce=answer)
    ours = device()
    ours.stop()
    assert ours.repair(FaultKind.DEVICE_MEMORY, lambda: [PARAMETER]) is damage
    assert [name for name, _ in npu.calls][1] == "npu.check_uce_in_memory"
    assert [name for name, _ in npu.calls][-1] == "distributed.reinit_process_group"


def test_an_error_in_lasting_memory_costs_the_state(install: Any) -> None:
    """An error in lasting memory costs the state: the adapter marks its tensors as safe.

    Then the rank can write them again.
    """
    npu = install(uce=3)
    ours = device()
    ours.stop()
    assert ours.repair(FaultKind.DEVICE_MEMORY, lambda: [PARAMETER]) is Damage.STATE
    assert npu.calls[-1] == ("npu._recovery.update_npu_tensor_to_safe", (PARAMETER,))


@pytest.mark.parametrize("answers", [{"stop": 1}, {"uce": 1}])
def test_a_device_that_cannot_be_repaired(answers: dict[str, int], install: Any) -> None:
    """A device is unusable if it does not stop, or if torch-npu does not manage the memory."""
    npu = install(**answers)
    ours = device()
    ours.stop()
    assert ours.repair(FaultKind.DEVICE_MEMORY, lambda: [PARAMETER]) is Damage.DEVICE
    assert "npu.restart_device" not in dict(npu.calls)


def test_the_clock_is_that_of_an_event(install: Any, source: Callable[[str], str]) -> None:
    """The clock uses an Event, because the device's errors have the same time.

    The methods of Event have the released parameters.
    """
    (event,) = (
        node
        for node in ast.parse(source("npu/streams.py")).body
        if isinstance(node, ast.ClassDef) and node.name == "Event"
    )
    methods = {node.name: node.args for node in event.body if isinstance(node, ast.FunctionDef)}
    assert "enable_timing" in {
        a.arg for a in (*methods["__new__"].args, *methods["__new__"].kwonlyargs)
    }
    assert len(methods["record"].args) - len(methods["record"].defaults) == 1  # self
    assert [a.arg for a in methods["recorded_time"].args] == ["self"]
    assert [a.arg for a in methods["query"].args] == ["self"]
    assert [a.arg for a in methods["elapsed_time"].args][:1] == ["self"]
    assert len(methods["elapsed_time"].args) == 2
    assert (
        "Event" in source("npu/__init__.py").partition("from .streams import")[2].partition("\n")[0]
    )

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = 17

        def recorded_time(self) -> int:
            return self.at

    install().npu.Event = Event
    assert device().clock_us() == 17
