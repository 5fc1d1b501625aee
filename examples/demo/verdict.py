"""Compare the disturbed run with the undisturbed run: losses, parameters and samples."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from job_side import Target, leftovers
from place import OUTPUT, SCRIPT

from rekindle.recovery.journal.journal import Incident
from rekindle.reporting.event_text import milliseconds
from rekindle.reporting.step_records import StepRecord, effective, read_records
from rekindle.training.torch import StepSampler


@dataclass(frozen=True)
class Plan:
    """The model, the data and the number of nodes and processes in both runs."""

    steps: int
    batch_size: int
    seed: int
    size: str
    nodes: int = 2
    processes_per_node: int = 2

    @property
    def world_size(self) -> int:
        """The number of all ranks."""
        return self.nodes * self.processes_per_node

    def arguments(self, out: Path) -> list[str]:
        """Return the command line of the training script."""
        pairs = {
            "--size": self.size,
            "--steps": self.steps,
            "--batch-size": self.batch_size,
            "--seed": self.seed,
            "--out": out,
        }
        return [str(word) for pair in pairs.items() for word in pair]


@dataclass(frozen=True)
class Verdict:
    """The comparison. `differing`: (rank, step) of losses that are not equal bit for bit."""

    losses: int
    differing: list[tuple[int, int]]
    digests: dict[str, list[str]]
    samples: int
    samples_lost: int
    samples_repeated: int
    leftover: list[str]

    @property
    def loss_identical(self) -> bool:
        """Whether all losses and all final parameters are equal, bit for bit."""
        return not self.differing and len({d for many in self.digests.values() for d in many}) == 1


def judge(plan: Plan, calm: Target, rough: Target) -> Verdict:
    """Compare two finished runs of the same plan."""
    expected, found = _steps(calm), _steps(rough)
    keys = [(rank, step) for rank in range(plan.world_size) for step in range(plan.steps)]
    trained = Counter(
        sample for record in found.values() for sample in record.metrics.get("samples", ())
    )
    stream = _stream(plan)
    return Verdict(
        losses=len(keys),
        differing=[key for key in keys if not _same(expected.get(key), found.get(key))],
        digests={target.job_id: _digests(plan, target) for target in (calm, rough)},
        samples=stream.total(),
        samples_lost=(stream - trained).total(),
        samples_repeated=(trained - stream).total(),
        leftover=leftovers(),
    )


def _steps(target: Target) -> dict[tuple[int, int], StepRecord]:
    """Return the valid record of each rank and step."""
    return {
        (rank, step): record
        for rank, records in read_records(target.directory).items()
        for step, record in effective(records).items()
    }


def _same(one: StepRecord | None, other: StepRecord | None) -> bool:
    return one is not None and other is not None and one.metrics["loss"] == other.metrics["loss"]


def _digests(plan: Plan, target: Target) -> list[str]:
    """Return each rank's digest of its final parameters; a missing one differs from all others."""
    files = [out_of(target) / f"final-rank{rank}.json" for rank in range(plan.world_size)]
    return [
        json.loads(file.read_text())["digest"] if file.exists() else f"no {file.name}"
        for file in files
    ]


def out_of(target: Target) -> Path:
    """Return the folder with the results of a run's ranks."""
    return OUTPUT / "results" / target.job_id.rpartition("-")[0]


def _stream(plan: Plan) -> Counter[int]:
    """Return how often the plan trains on each sample, from the sampler itself."""
    sys.path.insert(0, str(SCRIPT.parent))
    from corpus import Windows, load
    from model import SIZES
    from train import RECIPES

    training, _ = load(RECIPES[plan.size].characters)
    length = len(Windows(training, SIZES[plan.size].block_size))
    counted: Counter[int] = Counter()
    for rank in range(plan.world_size):
        sampler = StepSampler(length, plan.batch_size, seed=plan.seed)
        sampler.bind(rank, plan.world_size)
        for _ in range(plan.steps):
            counted.update(sampler.indices())
            sampler.advance()
    return counted


def incident_entry(incident: Incident, killed_at: float) -> dict[str, Any]:
    """Return one incident for demo-report.json, in milliseconds; total begins at the kill."""
    return {
        "kind": incident.cause.kind.value,
        "strategy": incident.strategy.value if incident.strategy else None,
        "generation": incident.generation,
        "detect_ms": milliseconds(killed_at, incident.detected),
        "regroup_ms": milliseconds(incident.detected, incident.regrouped),
        "restore_ms": milliseconds(incident.regrouped, incident.restored),
        "total_ms": milliseconds(killed_at, incident.first_step),
        "steps_lost": incident.steps_lost,
    }
