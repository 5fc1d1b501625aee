"""Undisturbed runs that recovered ones are compared with."""

from mindspore_jobs.baselines import baseline

__all__ = ["baseline"]
