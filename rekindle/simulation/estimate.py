"""Compute means with intervals over many runs, and the closed formulas. Pure."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from rekindle.recovery.policy.interval import best_interval
from rekindle.recovery.policy.policy import Policy, Strategy
from rekindle.simulation.costs import Costs
from rekindle.simulation.fault_mix import Mix
from rekindle.simulation.job import Setting
from rekindle.simulation.outcome import Loss, Outcome, World
from rekindle.simulation.progress import Cadence
from rekindle.simulation.replay import replay
from rekindle.simulation.trace import DAY_S, Strike, draw

# If fewer faults loaded a checkpoint, the estimate assumes this number of them. If none occurred, 3
# is the upper end of a 95 % interval (the rule of three). The estimate never assumes more faults
# than the whole mix has.
FEWEST = 3
_QUANTILE = 0.99


def goodput(*, rate: float, interval: float, stall: float, downtime: float) -> float:
    """Return the share of time in which training makes progress that lasts.

    rate: faults per second. Each fault costs `downtime` and the work since the last checkpoint. The
    job writes a checkpoint after each `interval` of training, and the write halts training for
    `stall`.

    The formula is exact if the gaps between faults are exponential and faults also occur during
    stall and downtime. Work of length L then takes exp(rate * downtime) * (exp(rate * L) - 1) /
    rate on average. With one step as the interval and no stall, the formula describes recovery that
    loses only the interrupted step.
    """
    if rate == 0:
        return interval / (interval + stall)
    lasting = rate * interval * math.exp(-rate * downtime)
    try:
        return lasting / math.expm1(rate * (interval + stall))
    except OverflowError:
        return 0.0  # training never reaches a checkpoint


def young(rate: float, stall: float) -> float:
    """Return the interval by Young (1974), which is accurate if faults are rare."""
    return math.sqrt(2 * stall / rate) if rate else math.inf


def daly(rate: float, stall: float) -> float:
    """Return the interval by Daly (2006), first order, or the mean gap if that does not hold."""
    if rate == 0:
        return math.inf
    return young(rate, stall) - stall if stall * rate < 2 else 1 / rate


def student(freedom: int) -> float:
    """Return the 97.5 % point of Student's t distribution (Abramowitz and Stegun 26.7.5).

    The error is below 0.3 % for 4 or more degrees of freedom.
    """
    z = 1.959963984540054
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + ((third / freedom + second) / freedom + first) / freedom


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """Describe a simulation.

    `checkpoint_s` None selects the best interval for each policy.
    """

    world: World
    mix: Mix
    costs: Costs
    days: float
    runs: int
    seed: int
    checkpoint_s: float | None = None

    def traces(self) -> list[list[Strike]]:
        """Draw the faults of every run. All policies get the same faults."""
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
    """Hold a mean and the ends of its 95 % confidence interval, by Student's t over the runs."""

    mean: float
    low: float
    high: float


class Estimate(msgspec.Struct, frozen=True):
    """Hold the results of all runs of one policy.

    `checkpoint_s` is the checkpoint interval of the runs. `rate` is the number of all faults of the
    mix per second.
    """

    outcomes: tuple[Outcome, ...]
    checkpoint_s: float
    stall_s: float
    rate: float

    @property
    def goodput(self) -> MeanInterval:
        """Return the share of time that was worth undisturbed training."""
        found = interval([outcome.goodput for outcome in self.outcomes])
        return MeanInterval(found.mean, max(found.low, 0.0), min(found.high, 1.0))

    @property
    def incidents(self) -> dict[Strategy, float]:
        """Return the mean number of incidents of a run, by their heaviest strategy."""
        return self._by_strategy([outcome.incidents for outcome in self.outcomes])

    @property
    def decisions(self) -> dict[Strategy, float]:
        """Return the mean number of decisions of a run, by strategy."""
        return self._by_strategy([outcome.decisions for outcome in self.outcomes])

    @property
    def spares(self) -> int:
        """Return the spares with which 99 of 100 faults that remove nodes do not cause a wait."""
        return _quantile([many for outcome in self.outcomes for many in outcome.needed])

    @property
    def spares_alone(self) -> int:
        """Return the same number without faults that remove all nodes of a switch."""
        return _quantile([many for outcome in self.outcomes for many in outcome.alone])

    @property
    def to_store(self) -> int:
        """Return the number of faults in all runs after which training loaded a checkpoint."""
        return sum(outcome.to_store for outcome in self.outcomes)

    @property
    def store_rate(self) -> float:
        """Return these faults per second; if the runs had hardly any, assume FEWEST."""
        return max(self.to_store, min(FEWEST, self.rate * self.seconds)) / self.seconds

    @property
    def seconds(self) -> float:
        """Return the simulated time of all runs together."""
        return sum(outcome.seconds for outcome in self.outcomes)

    @property
    def best_interval(self) -> float:
        """Return the checkpoint interval with the lowest cost, in seconds."""
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

    The policy determines which faults load a checkpoint. If the question does not give an interval,
    a quarter of the runs measures the number of these faults. Those runs use the interval that
    would be best if every fault loaded a checkpoint.
    """
    if question.checkpoint_s is not None:
        return _judge(question, policy, traces, question.checkpoint_s)
    rate, stall = question.mix.rate(question.world.devices), question.costs.job.checkpoint_stall_s
    some = traces[: math.ceil(len(traces) / 4)]
    first = _judge(question, policy, some, best_interval(rate, stall))
    return _judge(question, policy, traces, first.best_interval)


def difference(one: Estimate, other: Estimate) -> MeanInterval:
    """Return the mean difference of goodput, `other` minus `one`, over pairs of the same trace."""
    pairs = zip(one.outcomes, other.outcomes, strict=True)
    return interval([new.goodput - old.goodput for old, new in pairs])


def interval(values: Sequence[float]) -> MeanInterval:
    """Return the mean of at least two values, with its interval."""
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
    """Round to a number of whole steps, at least one."""
    return max(round(seconds / step), 1) * step


def _quantile(values: Sequence[int]) -> int:
    """Return the smallest value that 99 of 100 values do not exceed."""
    if not values:
        return 0
    return sorted(values)[math.ceil(_QUANTILE * len(values)) - 1]
