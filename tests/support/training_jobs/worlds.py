"""The records of a job whose world changes its size."""

from __future__ import annotations

import itertools
from typing import Any

from rekindle.training.sampler import StepSampler
from training_jobs import LENGTH
from training_jobs.record import Record


def logged(record: Record, name: str) -> list[list[Any]]:
    """Return the logged values of each step, by rank, in the last world that did the step."""
    lines = [line for rank in range(record.ranks) for line in record.lines(rank)]
    found = []
    for step in range(record.total):
        mine = [line for line in lines if line["step"] == step]
        last = max(line["generation"] for line in mine)
        # A rank logs after each of its parts: only the last of its records counts.
        by_rank = {
            line["rank"]: line["metrics"][name] for line in mine if line["generation"] == last
        }
        found.append([by_rank[rank] for rank in sorted(by_rank)])
    return found


def batches(record: Record) -> list[list[int]]:
    """Return the samples of each step."""
    return [list(itertools.chain(*step)) for step in logged(record, "samples")]


def assert_stream(record: Record) -> None:
    """Check that the steps have the stream from its start, each sample once and in order."""
    seen = [sample for batch in batches(record) for sample in batch]
    sampler = StepSampler(LENGTH, 1, seed=3)
    sampler.bind(0, 1)
    for sample in seen:
        assert [sample] == sampler.indices()
        sampler.advance()
