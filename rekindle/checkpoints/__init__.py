"""Checkpoints: the layout of a file, the manifest that commits a checkpoint, and the stores.

This package is framework-neutral: it must not import torch, mindspore, numpy or prefect.
"""
