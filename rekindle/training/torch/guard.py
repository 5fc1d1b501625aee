"""Skip the steps whose update would damage the model, on all ranks together.

The ranks decide when the update begins: they have all gradients, and nothing has changed yet. A
skipped step counts as finished. Its samples are used, and all other state is that from before it.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from rekindle.errors import RekindleError, SessionError
from rekindle.training.torch import private
from rekindle.training.torch.state.transfer import wire_device

_LEAST = 20  # values before the first one can be a spike
_OF_NORMAL = 1.4826  # standard deviations of a normal distribution in a median deviation
_FLAT = 1e-3  # of the median: smaller deviations are noise


class SkippedStepError(RekindleError):
    """Leaves the block of a step that all ranks skip. Only the Session handles it."""


class Guard:
    """Skips a step whose gradients are not finite, or whose loss is a spike, on all ranks.

    - `nan`: skip a step if a gradient, or the watched value, is not finite on any rank.
    - `spike`: skip a step if the watched value is more than this many standard deviations above the
      median of the last `window` steps. None: never. A usual number is 6 to 10.
    - `metric`: the watched value: a name of step.log(), which the script calls before
      optimizer.step(). The mean of all ranks counts. Only for `spike`.
    - `limit`: the most skipped steps among `window` successive steps. One more ends the job.

    Raises SessionError: a number is not positive.
    """

    optional = True  # a state from before the script had a guard lacks it

    def __init__(
        self,
        *,
        nan: bool = True,
        spike: float | None = None,
        metric: str = "loss",
        window: int = 100,
        limit: int = 3,
    ) -> None:
        for name, value in (("spike", spike), ("window", window), ("limit", limit)):
            if value is not None and not value > 0:
                raise SessionError(f"Guard: {name} is {value!r}; give a number above 0")
        self.reason = ""  # why the present step is skipped
        self._nan, self._spike, self._metric = nan, spike, metric
        self._window, self._limit = window, limit
        self._values: deque[float] = deque(maxlen=window)  # of the steps that were not skipped
        self._skipped: list[int] = []
        self._logged: Any = None  # the value of this step

    def begin_step(self) -> None:
        """Forget the values of the step before."""
        self.reason, self._logged = "", None

    def logged(self, metrics: Mapping[str, Any]) -> None:
        """Note the values that the script has logged in this step."""
        value = metrics.get(self._metric, self._logged)
        self._logged = value.detach() if isinstance(value, torch.Tensor) else value

    def check(self, optimizer: torch.optim.Optimizer, *, first: bool) -> None:
        """Decide with all ranks whether this update may begin.

        first: it is the first update of the step, so the step can still be skipped.
        Raises SkippedStepError: all ranks skip the step. Raises SessionError: it cannot be skipped,
        or the value is not known.
        """
        value = self._value()
        broken, value = _over_all_ranks(_has_broken_gradient(optimizer), value)
        self.reason = self._judged(broken=broken, value=value)
        if not self.reason:
            if self._spike is not None and first:
                self._values.append(value)
            return
        if first:
            raise SkippedStepError(self.reason)
        raise SessionError(
            f"guard: {self.reason}, and another optimizer has done its update in this step "
            "already: do one update in each step, so that it can be skipped"
        )

    def skips(self, error: BaseException | None) -> bool:
        """Return whether all ranks skip the step that ends with this error, or without one.

        The script may have caught the error that leaves its block.
        """
        return bool(self.reason) and (error is None or isinstance(error, SkippedStepError))

    def skip(self, step: int) -> None:
        """Count a skipped step. Raises SessionError: there are too many of them."""
        reason, self.reason = self.reason, ""
        self._skipped = [each for each in self._skipped if each > step - self._window] + [step]
        if len(self._skipped) > self._limit:
            raise SessionError(
                f"guard: step {step} is the skipped step number {len(self._skipped)} within "
                f"{self._window} steps, and the limit is {self._limit}: {reason}. Lower the "
                "learning rate, look at the data of these steps, or raise limit"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return what the next decisions depend on."""
        return {"values": [*self._values], "skipped": self._skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take another state."""
        self._values = deque(state["values"], maxlen=self._window)
        self._skipped = [*state["skipped"]]

    def _value(self) -> float:
        """Return this rank's watched value, or 0 if none is watched."""
        if self._spike is None:
            return 0.0
        if self._logged is None:
            raise SessionError(
                f"Guard(spike=...) watches {self._metric!r}: call step.log({self._metric}=...) in "
                "each step, before optimizer.step(), or give the name of another value in metric="
            )
        return float(self._logged)

    def _judged(self, *, broken: bool, value: float) -> str:
        """Return why the step is skipped, or an empty text."""
        if self._nan and broken:
            return "a gradient is not finite"
        if self._spike is None:
            return ""
        if not math.isfinite(value):
            return f"{self._metric} is not finite" if self._nan else ""
        if len(self._values) < min(_LEAST, self._window):
            return ""
        median = statistics.median(self._values)
        deviation = _OF_NORMAL * statistics.median(abs(each - median) for each in self._values)
        above = (value - median) / max(deviation, _FLAT * abs(median), 1e-12)
        if above <= self._spike:
            return ""
        return (
            f"{self._metric} is {value:.4g}, {above:.1f} standard deviations above {median:.4g}, "
            f"the median of {len(self._values)} steps"
        )


def _has_broken_gradient(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a gradient of these parameters is not finite on this rank.

    Raises SessionError: there is no gradient.
    """
    found = [p.grad for group in optimizer.param_groups for p in group["params"]]
    rows = [_elements(gradient) for gradient in found if gradient is not None]
    if not rows:
        raise SessionError(
            "guard: optimizer.step() began without gradients: a closure computes them later, so no "
            "step can be skipped. Call backward() before optimizer.step(), or leave guard out"
        )
    largest = torch.stack([each.float().cpu() for each in private.largest_of(rows)])
    return not bool(largest.isfinite().all())


def _elements(gradient: torch.Tensor) -> torch.Tensor:
    """Return this rank's elements of a gradient, which may be sparse or distributed."""
    local: torch.Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return local.coalesce().values() if local.is_sparse else local


def _over_all_ranks(broken: bool, value: float) -> tuple[bool, float]:
    """Return whether a gradient is broken on any rank, and the mean of the values of all ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return broken, value
    numbers = torch.tensor([float(broken), value], dtype=torch.float32, device=wire_device())
    dist.all_reduce(numbers)
    count, total = numbers.tolist()
    return count > 0, total / dist.get_world_size()
