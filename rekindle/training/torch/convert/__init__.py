"""Checkpoints of other formats, read and written."""
