"""The metrics of a job for Prometheus, on a listener of the coordinator's own.

GET /metrics returns them. The listener asks for no secret and accepts no order. The coordinator
opens it if REKINDLE_METRICS_LISTEN names a port. A request folds the events that are new since the
last one, so the ranks and the machine do nothing for it.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from rekindle import names
from rekindle.console import say
from rekindle.coordinator.machine.machine import Machine
from rekindle.coordinator.machine.roster import GONE, Status
from rekindle.errors import UsageError
from rekindle.recovery.journal import journal

PATH = "/metrics"
HIGHEST_PORT = 65535
KEPT_S = 1.0  # a request in this time gets the answer of the last one
IDLE_S = 75.0  # the limit of a connection without a request
_PORT = re.compile("[0-9]{1,5}")
# The parts of a recovery: the name, and the attributes of an incident between which it lies.
PARTS = (
    ("decision", "detected", "decided"),
    ("regroup", "decided", "regrouped"),
    ("restore", "regrouped", "restored"),
    ("first-step", "restored", "first_step"),
)


def address(text: str) -> tuple[str, int]:
    """Return the host and port of `PORT` or `HOST:PORT`; the host is loopback by default.

    Raises UsageError: the text is neither.
    """
    host, _, port = text.rpartition(":")
    if not _PORT.fullmatch(port) or int(port) > HIGHEST_PORT:
        raise UsageError(
            f"{names.ENV_METRICS_LISTEN} is {text!r}; give PORT or HOST:PORT, with a port of at "
            f"most {HIGHEST_PORT}"
        )
    return host.removeprefix("[").removesuffix("]") or names.LOOPBACK, int(port)


class JobMetrics(Collector):
    """Collect the metrics of a job. events: the coordinator's list, which grows."""

    def __init__(self, machine: Machine, events: Sequence[journal.Event]) -> None:
        self._machine = machine
        self._events = events
        self._seen = 0
        self._incidents = journal.IncidentFold()
        self._checkpoints: Counter[str] = Counter()
        self._newest_checkpoint = 0.0
        self._restarts = self._restart = 0  # of all attempts, and the newest of this attempt
        self._began = 0.0  # the start of the job
        self._training_since = 0.0  # 0: the ranks do not train
        self._trained_s = 0.0  # time in which the ranks did steps, also those that were lost
        self._first: int | None = None  # the step from which the job began; None: unknown
        self._finished = 0  # steps that the events tell
        self._at = 0.0  # of the newest event

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics at this moment."""
        for event in self._events[self._seen :]:
            self._add(event)
        self._seen = len(self._events)
        yield from self._progress()
        yield from self._recoveries()
        yield from self._writes()

    def _add(self, event: journal.Event) -> None:
        self._incidents.add(event)
        self._follow_time(event)
        match event:
            case journal.Checkpointed():
                self._checkpoints["written"] += 1
                self._newest_checkpoint = event.at
                self._finished = max(self._finished, event.step)
            case journal.CheckpointLeftOut():
                self._checkpoints["skipped"] += 1
            case journal.CheckpointFailed():
                self._checkpoints["failed"] += 1
            case journal.RanksStarted() if event.restart > self._restart:
                self._restarts += event.restart - self._restart
                self._restart = event.restart
            case journal.JobStarted():
                self._restart = 0
        self._at = event.at

    def _follow_time(self, event: journal.Event) -> None:
        """Follow when the ranks train."""
        match event:
            case journal.JobStarted():
                self._began = self._began or event.at
                self._pause(self._at)  # the end of the former attempt may not be in the journal
            case journal.FaultSeen(explained=False):
                self._pause(event.since or event.at)
            case journal.Formed():
                self._pause(event.at)
                self._finished = event.step
                if self._first is None and journal.OF_SCRIPT not in event.sources:
                    self._first = event.step
            case journal.FirstStep():
                self._training_since = self._training_since or event.at
                self._finished = event.step
            case journal.Stopping():
                self._pause(event.at)
            case journal.Ended():
                self._pause(event.at)
                self._finished = max(0, event.finished)

    def _pause(self, at: float) -> None:
        if self._training_since:
            self._trained_s += max(0.0, at - self._training_since)
        self._training_since = 0.0

    def _goodput(self, finished: int) -> Iterator[Metric]:
        """Yield the time of a step, and the share of the time in which the job made progress."""
        now = time.time()
        trained = self._trained_s
        if self._training_since:
            trained += max(0.0, now - self._training_since)
        lost = sum(one.steps_lost or 0 for one in self._incidents.by_number.values())
        if self._first is None or finished + lost <= self._first:
            return
        kept = max(0, finished - self._first)
        step_s = trained / (kept + lost)
        yield _gauge("rekindle_step_seconds", "Mean time of a step.", step_s)
        share = kept * step_s / max(now - self._began, 1e-9)
        text = "Share of the job's time in which it made new progress, 0 to 1."
        yield _gauge("rekindle_goodput_ratio", text, min(1.0, share))

    def _progress(self) -> Iterator[Metric]:
        world = list(self._machine.job.roster.world)
        alive = sum(rank.status not in (*GONE, Status.SPAWNING) for rank in world)
        present = min((rank.finished for rank in world), default=0)
        finished = max(present, self._finished)  # a new coordinator does not know the ranks yet
        if present or not self._training_since:  # a new coordinator does not know the ranks yet
            yield from self._goodput(finished)
        yield _gauge("rekindle_steps_finished", "Steps that all ranks have finished.", finished)
        total = self._machine.checkpoints.total
        yield _gauge("rekindle_steps_planned", "Steps of the whole job; 0: unknown.", total)
        yield _gauge("rekindle_ranks_alive", "Ranks that have a process.", alive)
        yield _gauge("rekindle_ranks", "Ranks of the present world.", len(world))
        attempt = self._machine.job.attempt
        yield _gauge("rekindle_attempt", "Number of the present attempt.", attempt)

    def _recoveries(self) -> Iterator[Metric]:
        incidents = [one for one in self._incidents.by_number.values() if one.faults]
        counted = Counter((i.cause.kind.value, _strategy(i)) for i in incidents)
        # A gauge: the kind and the strategy of an incident can still change.
        number = GaugeMetricFamily(
            "rekindle_incidents", "Incidents of the job.", labels=["kind", "strategy"]
        )
        for labels, count in counted.items():
            number.add_metric(labels, count)
        yield number
        # An incident without a duration has not interrupted the ranks.
        closed = [one for one in incidents if one.first_step > one.detected]
        ended = CounterMetricFamily("rekindle_recoveries", "Interruptions that are over.")
        ended.add_metric([], len(closed))
        yield ended
        seconds = CounterMetricFamily(
            "rekindle_recovery_seconds", "Time from the fault to the next finished step."
        )
        seconds.add_metric([], sum(one.first_step - one.detected for one in closed))
        yield seconds
        parts = CounterMetricFamily(
            "rekindle_recovery_part_seconds", "Time of the parts of recoveries.", labels=["part"]
        )
        for part, begin, end in PARTS:
            parts.add_metric([part], sum(_between(one, begin, end) for one in closed))
        yield parts
        repeated = CounterMetricFamily(
            "rekindle_steps_lost", "Finished steps that ranks had to repeat."
        )
        repeated.add_metric([], sum(one.steps_lost or 0 for one in incidents))
        yield repeated
        restarts = CounterMetricFamily("rekindle_restarts", "New starts of all ranks.")
        restarts.add_metric([], self._restarts)
        yield restarts

    def _writes(self) -> Iterator[Metric]:
        written = CounterMetricFamily(
            "rekindle_checkpoints", "Checkpoints that were due.", labels=["result"]
        )
        for result in ("written", "skipped", "failed"):
            written.add_metric([result], self._checkpoints[result])
        yield written
        if self._newest_checkpoint:
            age = max(0.0, time.time() - self._newest_checkpoint)
            yield _gauge(
                "rekindle_checkpoint_age_seconds", "Time since the newest checkpoint.", age
            )


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _strategy(incident: journal.Incident) -> str:
    return incident.strategy.value if incident.strategy else "none"


def _between(incident: journal.Incident, begin: str, end: str) -> float:
    """Return the seconds between two times of an incident; 0: it has not both."""
    first, last = getattr(incident, begin), getattr(incident, end)
    return max(0.0, last - first) if first and last else 0.0


@contextlib.asynccontextmanager
async def metrics_served(text: str, collector: Collector) -> AsyncIterator[None]:
    """Serve the metrics at the address in `text` while the block runs.

    An address that cannot be used gives a line in the log, and the job continues without metrics.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)

    body, until = b"", 0.0

    async def answer(_: web.Request) -> web.Response:
        nonlocal body, until
        if time.monotonic() >= until:
            body, until = generate_latest(registry), time.monotonic() + KEPT_S
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    app = web.Application()
    app.router.add_get(PATH, answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, keepalive_timeout=IDLE_S)
    await runner.setup()
    try:
        host, port = address(text)
        await web.TCPSite(runner, host, port).start()
        host = f"[{host}]" if ":" in host else host
        say(f"metrics are at http://{host}:{runner.addresses[0][1]}{PATH}", logging.INFO)
    except (UsageError, OSError, UnicodeError) as error:  # the last: a name that no host can have
        say(f"the job has no metrics: {error}", logging.ERROR)
    try:
        yield
    finally:
        await runner.cleanup()
