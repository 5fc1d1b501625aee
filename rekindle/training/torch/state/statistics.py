"""Find the running statistics of a rank's own batches, and make them equal on all ranks.

BatchNorm in training mode changes its statistics in each forward pass. DDP sends the ones of rank 0
to all ranks before the next forward pass, so the others are lost. Here all ranks get them before
the update: then they belong to the state that all ranks share, and any rank can give them to a new
process. docs/decisions/031-state-of-one-rank.md has the rules, also for other scripts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel

from rekindle.errors import SessionError
from rekindle.training.torch import private
from rekindle.training.torch.state.transfer import wire_device

STATISTICS = "running statistics of BatchNorm"
REMEDY = (
    "or let all ranks have the same ones: Session(ddp=True) without broadcast_buffers=False, or "
    "SyncBatchNorm. If a rank may take those of another one, give ignore=[model]"
)
_ALIGNED = 8  # bytes


@dataclass(frozen=True, slots=True)
class Found:
    """The modules with running statistics.

    shared: DDP sends those of rank 0. alone: each rank keeps its own ones.
    Modules with equal statistics on all ranks are in neither, such as SyncBatchNorm.
    """

    shared: tuple[nn.Module, ...] = ()
    alone: tuple[nn.Module, ...] = ()


def find(
    model: nn.Module,
    others: Iterable[Any],
    *,
    known: Iterable[Any],
    ddp: Mapping[str, Any] | None,
) -> Found:
    """Return the modules with running statistics in the model and in other objects.

    known: objects whose statistics the script itself has declared. ddp: the arguments of DDP; None:
    there is no wrapper.
    """
    left_out = {id(part) for each in known for part in _parts_of(each)}
    outer = [each for each in others if isinstance(each, nn.Module)]
    skipped = private.ignored_by_ddp(model) if ddp is not None else set()
    shared: list[nn.Module] = []
    alone: list[nn.Module] = []
    for path, part in model.named_modules():
        if id(part) in left_out or not _has_statistics(part):
            continue
        sends = ddp is not None and sends_buffers(ddp)
        names = {f"{path}.{name}" if path else name for name in private.buffers_of(part)}
        (alone if not sends or skipped & names else shared).append(part)
    own = {id(part) for part in model.modules()} | left_out
    apart = bool(alone)
    for each in outer:
        # An average follows the model; without training nothing changes.
        follows = isinstance(each, AveragedModel)
        for part in each.modules():
            wanted = apart or (part.training and not follows)
            if id(part) not in own and _has_statistics(part) and wanted:
                alone.append(part)
                own.add(id(part))
    return Found(tuple(shared), tuple(alone))


def sends_buffers(ddp: Mapping[str, Any]) -> bool:
    """Return whether DDP with these arguments sends the buffers of rank 0 before a forward pass."""
    given = (ddp.get("forward_sync_buffers"), ddp.get("broadcast_buffers"))
    return bool(next((each for each in given if each is not None), True))


def _parts_of(thing: Any) -> Iterable[nn.Module]:
    return thing.modules() if isinstance(thing, nn.Module) else ()


def _has_statistics(part: nn.Module) -> bool:
    """Return whether a module keeps statistics of its rank's own batches."""
    if not isinstance(part, private.NormBase) or part.running_mean is None:
        return False
    return not isinstance(part, nn.SyncBatchNorm) or part.process_group is not None


class OtherBuffers:
    """The saved buffers of a model without running statistics; all ranks should have the same ones.

    They have a state only for its digest. known: as in find().
    """

    def __init__(self, model: nn.Module, known: Iterable[Any] = ()) -> None:
        self._model = model
        self._left_out = {id(part) for each in known for part in _parts_of(each)}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the buffers by name."""
        found: dict[str, torch.Tensor] = {}
        saved = self._model.state_dict(keep_vars=True)
        for path, part in self._model.named_modules():
            if not isinstance(part, private.NormBase) and id(part) not in self._left_out:
                for name, buffer in private.buffers_of(part).items():
                    full = f"{path}.{name}" if path else name
                    if buffer is not None and full in saved:
                        found[full] = buffer
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing: the model's own state has the buffers."""


class Rows:
    """Tensors as rows of bytes, one for each device: a row is copied and sent in one call."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        places: dict[torch.device, list[int]] = {}
        for number, tensor in enumerate(tensors):
            places.setdefault(tensor.device, []).append(number)
        self.rows: list[torch.Tensor] = []
        self._groups: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        for device, numbers in places.items():
            self._add(device, [self._tensors[number] for number in numbers])

    def _add(self, device: torch.device, tensors: list[torch.Tensor]) -> None:
        sizes = [-(-tensor.nbytes // _ALIGNED) * _ALIGNED for tensor in tensors]
        row = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
        of_dtype: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for tensor, part in zip(tensors, row.split(sizes), strict=True):
            views, live = of_dtype.setdefault(tensor.dtype, ([], []))
            views.append(part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape))
            live.append(tensor)
        self.rows.append(row)
        self._groups += of_dtype.values()  # one type each, for which torch has a fast path

    def are_of(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether these are the rows of exactly these tensors."""
        ours = self._tensors
        return len(ours) == len(tensors) and all(map(_is, ours, tensors))

    def read(self) -> None:
        """Copy the tensors into the rows."""
        for views, live in self._groups:
            private.copy_all(views, live)

    def write(self) -> None:
        """Copy the rows into the tensors."""
        with torch.no_grad():
            for views, live in self._groups:
                private.copy_all(live, views)


def _is(one: object, other: object) -> bool:
    return one is other


class Statistics:
    """The running statistics of some modules, as one object with a state.

    optional: a state of a script that shared them lacks it. The model's state has those of a rank.
    """

    optional = True

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules
        self._rows = Rows(())

    def tensors(self) -> list[torch.Tensor]:
        """Return the live tensors."""
        found = (each for part in self.modules for each in private.buffers_of(part).values())
        return [each for each in found if each is not None]

    def rows(self) -> Rows:
        """Return the rows of the live tensors."""
        tensors = self.tensors()
        if not self._rows.are_of(tensors):
            self._rows = Rows(tensors)
        return self._rows

    def state_dict(self) -> dict[str, Any]:
        """Return the statistics, as rows of bytes."""
        found = self.rows()
        found.read()
        return {"rows": [row.cpu() for row in found.rows]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the statistics."""
        found = self.rows()
        for row, value in zip(found.rows, state["rows"], strict=True):
            row.copy_(value)
        found.write()


class SharedStatistics:
    """The statistics that all ranks take from rank 0 before each update of a step.

    A step without an update, such as one that a GradScaler skips, has the exchange at its end.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._statistics = Statistics(modules)
        self._versions: list[int] | None = None  # at the last exchange of this step

    def begin_step(self) -> None:
        """Begin a step."""
        self._versions = None

    def share(self) -> None:
        """Take the statistics of rank 0; a collective.

        Raises RuntimeError, as collectives do: a rank is lost.
        """
        if not self._statistics.modules:
            return
        rows, sends = self._statistics.rows(), dist.get_rank() == 0
        if sends:
            rows.read()
        for row in rows.rows:
            wire = row.to(wire_device())
            dist.broadcast(wire, src=0)
            if not sends and wire is not row:
                row.copy_(wire)
        if not sends:
            rows.write()
        self._versions = self._counted()

    def end_step(self) -> None:
        """End a step: all ranks have the statistics of rank 0.

        Raises SessionError: they have changed after the update began; RuntimeError as share().
        """
        if self._versions is None:
            self.share()
        elif self._versions != self._counted():
            raise SessionError(
                "a forward pass after optimizer.step() has changed the running statistics of "
                "BatchNorm in this step, so the ranks do not share them. Do it before "
                "optimizer.step() or in eval mode; or declare the modules: Session(per_rank="
                '{"statistics": nn.ModuleList([...])})'
            )

    def _counted(self) -> list[int]:
        return list(map(private.version_of, self._statistics.tensors()))
