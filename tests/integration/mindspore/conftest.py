"""Undisturbed runs, for comparison with recovered ones."""

from mindspore_jobs.baselines import baseline

__all__ = ["baseline"]
