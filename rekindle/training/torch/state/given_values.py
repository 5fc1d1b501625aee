"""The values with which a script builds its Session, kept in each state and compared on a resume.

A resumed run keeps the hyperparameters of the state, and takes its own seed and world size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import torch

from rekindle.checkpoints.format import Header
from rekindle.errors import CorruptError
from rekindle.training.sampler import StepSampler

METADATA_VALUES = "given_values"  # in the header of a rank's file, since Rekindle compares them

_Groups = list[dict[str, Any]]


class GivenValues(msgspec.Struct, frozen=True):
    """The values of one script.

    ranks: the full world size. batch_size: samples of a rank in a step; None without a sampler.
    optimizers: the hyperparameters of each group as the script has built them, by name.
    """

    seed: int = 0
    ranks: int = 1
    batch_size: int | None = None
    optimizers: dict[str, _Groups] = {}

    def metadata(self) -> dict[str, str]:
        """Return the entry in the header of a file."""
        return {METADATA_VALUES: msgspec.json.encode(self).decode()}

    def in_force(self, former: GivenValues) -> GivenValues:
        """Return the values after a load: the hyperparameters are those of the state."""
        return msgspec.structs.replace(self, optimizers=former.optimizers)

    def differences(self, former: GivenValues) -> Iterator[str]:
        """Yield a sentence for each difference. former: the values of the state."""
        for name, groups in self.optimizers.items():
            for number, (now, then) in enumerate(
                zip(groups, former.optimizers.get(name, []), strict=False)
            ):
                changed = [key for key in now if key in then and now[key] != then[key]]
                if changed:
                    kept = ", ".join(f"{key}={then[key]}" for key in changed)
                    given = ", ".join(f"{key}={now[key]}" for key in changed)
                    yield (
                        f"{name}.param_groups[{number}] keeps the values of the state, which began "
                        f"with {kept}; the script gives {given}. To change them, set them in the "
                        "group after entering the Session"
                    )
        if self.seed != former.seed:
            yield (
                f"the seed is {self.seed}, and was {former.seed} before: later steps draw other "
                "random numbers than a run with one seed"
            )
        if (self.ranks, self.batch_size) != (former.ranks, former.batch_size):
            yield (
                f"the world has {_samples(self)}, and had {_samples(former)} before: later steps "
                "have other samples and random numbers than a run with one size"
            )


def _samples(values: GivenValues) -> str:
    ranks = f"{values.ranks} rank{'s' * (values.ranks != 1)}"
    return ranks if values.batch_size is None else f"{ranks} with {values.batch_size} samples each"


def values_of(
    named: Mapping[str, Any], sampler: StepSampler | None, *, seed: int, ranks: int
) -> GivenValues:
    """Return the values of a script. named: the objects that its Session keeps."""
    optimizers = {
        name: [
            {key: _plain(value) for key, value in group.items() if _is_plain(value)}
            for group in thing.param_groups
        ]
        for name, thing in named.items()
        if isinstance(thing, torch.optim.Optimizer)
    }
    size = None if sampler is None else sampler.batch_size
    return GivenValues(seed, ranks, size, optimizers)


def values_in(header: Header) -> GivenValues | None:
    """Return the values in the header of a file; None: an earlier version of Rekindle wrote it.

    Raises CorruptError: the entry is damaged.
    """
    text = header.metadata.get(METADATA_VALUES)
    try:
        return None if text is None else msgspec.json.decode(text, type=GivenValues)
    except (msgspec.MsgspecError, ValueError) as error:
        raise CorruptError(f"the file has invalid values of its script: {error}") from error


def _is_plain(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_meta
    many = isinstance(value, list | tuple) and all(isinstance(each, int | float) for each in value)
    return many or value is None or isinstance(value, int | float | str)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value
