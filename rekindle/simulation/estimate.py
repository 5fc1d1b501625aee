"""Means with intervals over many runs, and the closed formulas beside them. Pure."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from rekindle.recovery.policy.interval import best_interval
from rekindle.recovery.policy.policy import Policy, Strategy
from rekindle.simulation.costs import Costs
from rekindle.simulation.job import Setting
from rekindle.simulation.mix import Mix
from rekindle.simulation.outcome import Loss, Outcome, World
from rekindle.simulation.progress import Cadence
from rekindle.simulation.replay import replay
from rekindle.simulation.trace import DAY_S, Strike, draw


def goodput(*, rate: float, interval: float, stall: float, downtime: float) -> float:
    """Return the share of time in which training makes progress that lasts.

    rate: faults per second, each of which costs `downtime` and what was done since the last of the
    checkpoints, that are written every `interval` of training and halt it for `stall`. Exact for
    faults with exponential gaps that strike in stall and downtime as well: in such a world a piece
    of work of length L takes exp(rate * downtime) * (exp(rate * L) - 1) / rate on average.
    With a step as the interval and no stall: recovery that loses the broken step alone.
    """
    if rate == 0:
        return interval / (interval + stall)
    lasting = rate * interval * math.exp(-rate * downtime)
    try:
        return lasting / math.expm1(rate * (interval + stall))
    except OverflowError:
        return 0.0  # no checkpoint is ever reached


def young(rate: float, stall: float) -> float:
    """Return the interval by Young (1974): good where faults are rare."""
    return math.sqrt(2 * stall / rate) if rate else math.inf


def daly(rate: float, stall: float) -> float:
    """Return the interval by Daly (2006), first order; where that does not hold, the mean gap."""
    if rate == 0:
        return math.inf
    return young(rate, stall) - stall if stall * rate < 2 else 1 / rate


def student(freedom: int) -> float:
    """Return the 97.5 % point of Student's t distribution (Abramowitz and Stegun 26.7.5).

    Within 0.3 % from 4 degrees of freedom on.
    """
    z = 1.959963984540054
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + ((third / freedom + second) / freedom + first) / freedom


# Where fewer faults went back to a checkpoint, as many are assumed: with none seen, 3 are the upper
# end of a 95 % interval (the rule of three). But never more than all faults of the mix.
FEWEST = 3
_QUANTILE = 0.99


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be simulated. checkpoint_s: None: the best interval for each policy."""

    world: World
    mix: Mix
    costs: Costs
    days: float
    runs: int
    seed: int
    checkpoint_s: float | None = None

    def traces(self) -> list[list[Strike]]:
        """Draw the faults of every run: the same ones for every policy."""
        world = self.world
        return [
            draw(
                self.mix,
                nodes=world.nodes,
                per_node=world.per_node,
                seconds=self.days * DAY_S,
                seed=(self.seed, run),
            )
            for run in range(self.runs)
        ]


class MeanInterval(msgspec.Struct, frozen=True):
    """A mean and the ends of its 95 % confidence interval, by Student's t over the runs."""

    mean: float
    low: float
    high: float


class Estimate(msgspec.Struct, frozen=True):
    """What the runs of one policy came to. checkpoint_s: the interval that they had.

    rate: all faults of the mix per second.
    """

    outcomes: tuple[Outcome, ...]
    checkpoint_s: float
    stall_s: float
    rate: float

    @property
    def goodput(self) -> MeanInterval:
        """The share of time that was worth undisturbed training."""
        found = interval([outcome.goodput for outcome in self.outcomes])
        return MeanInterval(found.mean, max(found.low, 0.0), min(found.high, 1.0))

    @property
    def incidents(self) -> dict[Strategy, float]:
        """Incidents of a run by their heaviest strategy, on average."""
        return self._by_strategy([outcome.incidents for outcome in self.outcomes])

    @property
    def decisions(self) -> dict[Strategy, float]:
        """Decisions of a run, on average."""
        return self._by_strategy([outcome.decisions for outcome in self.outcomes])

    @property
    def spares(self) -> int:
        """Spares with which 99 of 100 faults that take nodes need not wait for one."""
        return _quantile([many for outcome in self.outcomes for many in outcome.needed])

    @property
    def spares_alone(self) -> int:
        """The same as if no fault took the nodes of a whole switch."""
        return _quantile([many for outcome in self.outcomes for many in outcome.alone])

    @property
    def to_store(self) -> int:
        """How many faults in all runs went back to a checkpoint."""
        return sum(outcome.to_store for outcome in self.outcomes)

    @property
    def store_rate(self) -> float:
        """Such faults per second; some are assumed where hardly any were seen."""
        return max(self.to_store, min(FEWEST, self.rate * self.seconds)) / self.seconds

    @property
    def seconds(self) -> float:
        """How long all runs were together."""
        return sum(outcome.seconds for outcome in self.outcomes)

    @property
    def best_interval(self) -> float:
        """The checkpoint interval that costs least, in seconds."""
        return best_interval(self.store_rate, self.stall_s)

    def lost(self, loss: Loss) -> float:
        """Return the share of time lost to one cause."""
        return self.mean(lambda outcome: outcome.lost[loss] / outcome.seconds)

    def _by_strategy(self, counts: list[Counter[Strategy]]) -> dict[Strategy, float]:
        total = sum(counts, start=Counter[Strategy]())
        return {each: total[each] / len(counts) for each in Strategy if total[each]}

    def mean(self, of: Callable[[Outcome], float]) -> float:
        """Return the mean over the runs."""
        return statistics.fmean(of(outcome) for outcome in self.outcomes)


def judge(question: Scenario, policy: Policy, traces: Sequence[Sequence[Strike]]) -> Estimate:
    """Run a policy through all traces.

    Which faults go back to a checkpoint is the policy's doing. So where no interval is given, some
    runs with the interval that would be best if all did find out how many they are.
    """
    if question.checkpoint_s is not None:
        return _judge(question, policy, traces, question.checkpoint_s)
    rate, stall = question.mix.rate(question.world.devices), question.costs.job.checkpoint_stall_s
    some = traces[: math.ceil(len(traces) / 4)]
    first = _judge(question, policy, some, best_interval(rate, stall))
    return _judge(question, policy, traces, first.best_interval)


def difference(one: Estimate, other: Estimate) -> MeanInterval:
    """Return by how much the goodput of `other` is higher, trace by trace."""
    pairs = zip(one.outcomes, other.outcomes, strict=True)
    return interval([new.goodput - old.goodput for old, new in pairs])


def interval(values: Sequence[float]) -> MeanInterval:
    """Return the mean of two values or more with its interval."""
    mean = statistics.fmean(values)
    error = statistics.stdev(values) / math.sqrt(len(values))
    width = student(len(values) - 1) * error
    return MeanInterval(mean, mean - width, mean + width)


def _judge(
    question: Scenario, policy: Policy, traces: Sequence[Sequence[Strike]], checkpoint_s: float
) -> Estimate:
    job, seconds = question.costs.job, question.days * DAY_S
    cadence = Cadence(
        step=job.step_s,
        checkpoint=_in_steps(min(checkpoint_s, seconds), job.step_s),
        stall=job.checkpoint_stall_s,
        snapshot=_in_steps(job.snapshot_every_s, job.step_s) if job.snapshot_every_s else 0.0,
        overhead=job.overhead,
    )
    setting = Setting(policy, question.world, question.costs, cadence)
    outcomes = tuple(replay(setting, trace, seconds) for trace in traces)
    rate = question.mix.rate(question.world.devices)
    return Estimate(outcomes, cadence.checkpoint, cadence.stall, rate)


def _in_steps(seconds: float, step: float) -> float:
    """Round to whole steps, one at least."""
    return max(round(seconds / step), 1) * step


def _quantile(values: Sequence[int]) -> int:
    """Return the least number that 99 of 100 values do not exceed."""
    if not values:
        return 0
    return sorted(values)[math.ceil(_QUANTILE * len(values)) - 1]
