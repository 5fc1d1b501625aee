"""Checkpoints: the layout of a shard, the manifest that commits it, the stores that keep it.

Framework neutral: torch, mindspore, numpy and prefect may not be imported here.
"""
